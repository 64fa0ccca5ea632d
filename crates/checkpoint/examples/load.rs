//! A process that reads a checkpoint again and again and says how long each time took, for the bench of loading:
//! `load FILE`, then one command a line on its standard input, one JSON object a line back.
//!
//! - `read MODE [THREADS]` opens the file, allocates memory for every tensor and fills it.
//! - `raw BLOCK DEPTH` reads the whole file past the page cache and keeps nothing: what the device gives. BLOCK bytes a
//!   read, DEPTH reads at a time.
//! - `drop` takes the file out of the page cache, `warm` puts it there.
#![allow(clippy::print_stdout, reason = "its output is what it is for")]

use std::error::Error;
use std::fs::File;
use std::io::BufRead;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use checkpoint::{Checkpoint, IoMode, OpenOptions, ReadJob, ReadOptions};
use rustix::fs::{Advice, OFlags};
use serde_json::{Value, json};

type Answer = Result<Value, Box<dyn Error + Send + Sync>>;

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let path = PathBuf::from(std::env::args_os().nth(1).ok_or("say which file: load FILE")?);
    for line in std::io::stdin().lock().lines() {
        println!("{}", answer(&path, &line?)?);
    }
    Ok(())
}

fn answer(path: &Path, line: &str) -> Answer {
    let words: Vec<_> = line.split_whitespace().collect();
    match words[..] {
        ["read", mode] => load(path, serde_json::from_value(json!(mode))?, 0),
        ["read", mode, threads] => load(path, serde_json::from_value(json!(mode))?, threads.parse()?),
        ["raw", block, depth] => raw(path, block.parse()?, depth.parse()?),
        ["drop"] => {
            let file = File::open(path)?;
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
            resident(path)
        }
        ["warm"] => {
            let file = File::open(path)?;
            let mut block = vec![0; 4 << 20];
            let mut at = 0;
            loop {
                match file.read_at(&mut block, at)? {
                    0 => break,
                    read => at += read as u64,
                }
            }
            resident(path)
        }
        _ => Err(format!("{line:?} is no command").into()),
    }
}

fn resident(path: &Path) -> Answer {
    let file = checkpoint::OpenFile::open(path)?;
    Ok(json!({ "resident": file.resident_fraction(0..file.size()) }))
}

/// Every tensor into memory of its own, as a framework would have it.
fn load(path: &Path, mode: IoMode, threads: usize) -> Answer {
    let start = Instant::now();
    let model = Checkpoint::open(path, &OpenOptions::default())?;
    let tensors = model.tensors();
    let sizes = tensors.iter().map(|tensor| (tensor.range.end - tensor.range.start) as usize);
    let mut memory: Vec<Vec<u8>> = sizes.map(|size| vec![0; size]).collect();
    let jobs = tensors.iter().zip(&mut memory).map(|(tensor, target)| ReadJob {
        name: &tensor.name,
        file: &model.files()[tensor.file],
        offset: tensor.range.start,
        target,
    });
    let mut jobs: Vec<_> = jobs.collect();
    let report = checkpoint::read(&mut jobs, &ReadOptions { mode, threads, ..ReadOptions::default() })?;
    let seconds = start.elapsed().as_secs_f64();
    // One byte a page, so that nothing was left undone.
    let sum: u64 =
        memory.iter().flat_map(|bytes| bytes.iter().step_by(4096)).map(|byte| u64::from(*byte)).sum();
    Ok(json!({ "seconds": seconds, "bytes": report.bytes_asked, "sum": sum, "report": report }))
}

/// The whole file by `depth` threads that each wait for one read of `block` bytes at a time.
fn raw(path: &Path, block: usize, depth: usize) -> Answer {
    let flags = OFlags::DIRECT.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let size = file.metadata()?.len();
    let (next, read) = (AtomicU64::new(0), AtomicU64::new(0));
    // Written to before the clock starts, so that no page is missing.
    let mut memory: Vec<Vec<u8>> = (0..depth).map(|_| vec![1; block + 4096]).collect();
    let work = |memory: &mut Vec<u8>| -> std::io::Result<()> {
        let start = memory.as_ptr().addr().wrapping_neg() % 4096;
        let target = &mut memory[start..start + block];
        loop {
            let at = next.fetch_add(block as u64, Ordering::Relaxed);
            if at >= size {
                return Ok(());
            }
            read.fetch_add(rustix::io::pread(&file, &mut *target, at)? as u64, Ordering::Relaxed);
        }
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = memory.iter_mut().map(|memory| scope.spawn(|| work(memory))).collect();
        let failed = |_| std::io::Error::other("a thread panicked");
        threads.into_iter().try_for_each(|thread| thread.join().map_err(failed)?)
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let read = read.load(Ordering::Relaxed);
    if read != size {
        return Err(format!("read {read} of {size} bytes").into());
    }
    Ok(json!({ "seconds": seconds, "bytes": read }))
}
