//! One call that reads many tensors: chooses the way for each file, cuts the work, runs the threads, tells what happened.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{Advice, OFlags};
use serde::Serialize;

use super::choose::{self, Decision, Facts, IoChoice, IoMode};
use super::chunks::{self, Chunk, Wanted};
use super::gate::{self, Gate, Route};
use super::place::{self, DirectFile, Kind, Place};
use super::worker::{self, Named, Shared, Source};
use super::{Cancel, OpenFile, uring};
use crate::error::{CheckpointError, Result};
use crate::mapping::system;

/// Reads in flight at a time where the device is waited for: 64 MiB.
const DEPTH: usize = 16;
/// Threads that read a cold file through the page cache, each with read-ahead: 2 read half as fast, 16 no faster.
const AHEAD: usize = 8;
/// The most threads that copy out of the page cache; on 16 cores the rate still grew from 8 to 16.
const COPIERS: usize = 16;
/// Threads that keep a queue each. One would do for most devices; the others copy out of buffers meanwhile.
const QUEUES: usize = 8;
/// Threads for a device that rotates: more would only make it seek.
const ORDERLY: usize = 2;
/// Targets from this size on are asked to lie in huge pages.
const LARGE: usize = 4 << 20;
/// How many places of a file are asked whether they lie in the page cache.
const SAMPLES: usize = 64;

/// Bytes of a file that are wanted somewhere.
#[derive(Debug)]
pub struct ReadJob<'a> {
    /// The tensor's name, for errors.
    pub name: &'a str,
    /// The file.
    pub file: &'a Arc<OpenFile>,
    /// Where the bytes begin in the file.
    pub offset: u64,
    /// Where they go, all of them.
    pub target: &'a mut [u8],
}

/// How to read.
#[derive(Clone, Copy, Default)]
pub struct ReadOptions<'a> {
    /// The way; [`IoMode::Auto`] by default.
    pub mode: IoMode,
    /// How many threads read; 0, the default, for what suits the way and the machine. The calling thread is one of them.
    pub threads: usize,
    /// Stops the call between two chunks of at most 4 MiB a read in flight.
    pub cancel: Option<&'a Cancel>,
    /// Called from any of the threads with the number of bytes that were *newly* read, after each chunk.
    pub progress: Option<&'a (dyn Fn(u64) + Sync)>,
}

impl std::fmt::Debug for ReadOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadOptions")
            .field("mode", &self.mode)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

/// What one call did to one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileReport {
    /// The file.
    pub path: PathBuf,
    /// The way that was taken, and why.
    pub choice: IoChoice,
    /// Bytes that were wanted.
    pub bytes_asked: u64,
    /// Bytes that were read: holes between neighbours and the ends of aligned reads included.
    pub bytes_read: u64,
    /// Those of them that went through a buffer and were copied.
    pub bytes_bounced: u64,
}

/// What one call did.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ReadReport {
    /// By file, in the order in which they were first named.
    pub files: Vec<FileReport>,
    /// Bytes that were wanted.
    pub bytes_asked: u64,
    /// Bytes that were read.
    pub bytes_read: u64,
    /// How many threads read.
    pub threads: usize,
}

/// Fills every job's target from its file.
///
/// Reads go in the order of files and of bytes in them, neighbours together, by several threads; the memory taken besides
/// the targets is 4 MiB a read in flight, at most 80 MiB unless more threads are asked for. Whatever a fast way cannot do is done by plain reads, so that a failure is the
/// file's: one that ends early, changed while it was read, or cannot be read. The error names the tensor. What the targets
/// hold after an error is not defined.
///
/// # Example
///
/// ```
/// use std::sync::Arc;
///
/// use checkpoint::io::{OpenFile, ReadJob, ReadOptions, read};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("weights");
/// std::fs::write(&path, "aaaabbbbcccc")?;
/// let file = Arc::new(OpenFile::open(&path)?);
/// let (mut a, mut c) = ([0; 4], [0; 4]);
/// let mut jobs = [
///     ReadJob { name: "c", file: &file, offset: 8, target: &mut c },
///     ReadJob { name: "a", file: &file, offset: 0, target: &mut a },
/// ];
/// let report = read(&mut jobs, &ReadOptions::default())?;
/// assert_eq!((&a, &c), (b"aaaa", b"cccc"));
/// println!("{}", report.files[0].choice.why);
/// # Ok(())
/// # }
/// ```
pub fn read(jobs: &mut [ReadJob<'_>], options: &ReadOptions<'_>) -> Result<ReadReport> {
    read_past(jobs, options, &gate::Open)
}

/// The same, with every outcome of a read shown to a gate.
pub(super) fn read_past(
    jobs: &mut [ReadJob<'_>],
    options: &ReadOptions<'_>,
    gate: &dyn Gate,
) -> Result<ReadReport> {
    let mut files: Vec<&OpenFile> = Vec::new();
    let mut named = Vec::with_capacity(jobs.len());
    let mut wanted = Vec::with_capacity(jobs.len());
    for (index, job) in jobs.iter_mut().enumerate() {
        let file: &OpenFile = job.file;
        let size = job.target.len() as u64;
        check_inside(file, job.name, job.offset, size)?;
        // Few files, and jobs mostly name the one before.
        let number = files.iter().rposition(|known| std::ptr::eq(*known, file)).unwrap_or_else(|| {
            files.push(file);
            files.len() - 1
        });
        named.push(Named { name: job.name, offset: job.offset, size });
        if job.target.len() >= LARGE {
            system::advise_huge(job.target);
        }
        wanted.push(Wanted { file: number, job: index, offset: job.offset, target: &mut *job.target });
    }
    let chunks = chunks::cut(wanted);
    let plans: Vec<_> = files.iter().enumerate().map(|(i, file)| plan(file, i, &chunks, options)).collect();
    let threads = threads(&plans, chunks.len(), options.threads);
    let (sources, decisions): (Vec<_>, Vec<_>) =
        plans.into_iter().map(|plan| (plan.source, (plan.decision, plan.asked))).unzip();
    let shared = Shared {
        sources: &sources,
        jobs: &named,
        queue: Mutex::new(chunks.into_iter()),
        failure: Mutex::new(None),
        stop: AtomicBool::new(false),
        cancel: options.cancel,
        progress: options.progress,
        gate,
        depth: DEPTH.div_ceil(threads),
    };
    run(&shared, threads);
    let failure = shared.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    failure.map_or(Ok(()), Err)?;
    for file in &files {
        file.check_unchanged()?;
    }
    Ok(report(&sources, decisions, threads))
}

fn check_inside(file: &OpenFile, name: &str, offset: u64, asked: u64) -> Result<()> {
    if offset.checked_add(asked).is_some_and(|end| end <= file.size()) {
        return Ok(());
    }
    Err(CheckpointError::OutsideFile {
        path: file.path().to_owned(),
        what: format!("tensor {name:?}"),
        offset,
        asked,
        size: file.size(),
    })
}

/// Runs the workers, one of them on this thread. Threads that cannot be started are done without.
fn run(shared: &Shared<'_>, threads: usize) {
    std::thread::scope(|scope| {
        for _ in 1..threads {
            let builder = std::thread::Builder::new().name("weights-read".into());
            if let Err(error) = builder.spawn_scoped(scope, || worker::work(shared)) {
                tracing::warn!(%error, "a thread to read with could not be started");
                break;
            }
        }
        worker::work(shared);
    });
}

/// How one file is read.
struct Plan<'a> {
    source: Source<'a>,
    decision: Decision,
    asked: u64,
    rotating: bool,
    kind: Kind,
}

fn plan<'a>(open: &'a OpenFile, number: usize, chunks: &[Chunk<'_>], options: &ReadOptions<'_>) -> Plan<'a> {
    let first = chunks.partition_point(|chunk| chunk.file < number);
    let last = chunks.partition_point(|chunk| chunk.file <= number);
    let chunks = &chunks[first..last];
    let asked = chunks.iter().map(Chunk::bytes).sum();
    let direct = match options.mode {
        IoMode::Mapped | IoMode::Buffered => Err("not asked for".to_owned()),
        IoMode::Auto | IoMode::Direct | IoMode::Uring => {
            DirectFile::of(open.file()).map_err(|error| error.to_string())
        }
    };
    let facts = Facts {
        place: Place::of(open.file()),
        resident: resident(open, chunks),
        asked,
        few_threads: (1..DEPTH).contains(&options.threads),
        direct: direct.as_ref().map(|_| ()).map_err(Clone::clone),
        uring: uring::available(),
    };
    let decision = choose::choose(options.mode, &facts);
    let route = match decision.choice.mode {
        IoMode::Direct => Route::Direct,
        IoMode::Uring => Route::Uring,
        IoMode::Auto | IoMode::Mapped | IoMode::Buffered => Route::Buffered,
    };
    // Without read-ahead, so that a tenth of the tensors takes a tenth of the bytes from the device. On a file
    // description of its own: others read this file in other ways.
    let few = asked.saturating_mul(2) < open.size();
    let buffered = (route == Route::Buffered && decision.cold && few).then(|| unahead(open)).flatten();
    let source = Source {
        open,
        buffered,
        direct: direct.ok().filter(|_| route != Route::Buffered),
        route,
        mixed: decision.mixed,
        refused: AtomicBool::new(false),
        read: AtomicU64::new(0),
        bounced: AtomicU64::new(0),
    };
    Plan { source, decision, asked, rotating: facts.place.rotating, kind: facts.place.kind }
}

fn unahead(open: &OpenFile) -> Option<std::fs::File> {
    let file = place::reopen(open.file(), OFlags::empty()).ok()?;
    rustix::fs::fadvise(&file, 0, None, Advice::Random).ok()?;
    Some(file)
}

/// The part of some of the chunks that lies in the page cache; all of them would take long to ask for.
fn resident(open: &OpenFile, chunks: &[Chunk<'_>]) -> Option<f64> {
    let step = chunks.len().div_ceil(SAMPLES).max(1);
    let (mut pages, mut bytes) = (0.0, 0.0);
    for chunk in chunks.iter().step_by(step) {
        let size = (chunk.range.end - chunk.range.start) as f64;
        pages += open.resident_fraction(chunk.range.clone())? * size;
        bytes += size;
    }
    Some(if bytes > 0.0 { pages / bytes } else { 1.0 })
}

fn threads(plans: &[Plan<'_>], chunks: usize, asked: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let suits = |plan: &Plan<'_>| match plan.source.route {
        Route::Uring => QUEUES,
        Route::Direct => DEPTH,
        Route::Buffered if plan.rotating && plan.decision.cold => ORDERLY,
        // Answers from afar take long, and what is read ahead is the server's business.
        Route::Buffered if plan.decision.cold && plan.kind == Kind::Network => DEPTH,
        Route::Buffered if plan.decision.cold => AHEAD,
        Route::Buffered => cores.min(COPIERS),
    };
    let suitable = plans.iter().map(suits).max().unwrap_or(1);
    let threads = if asked == 0 { suitable } else { asked };
    threads.min(chunks).max(1)
}

fn report(sources: &[Source<'_>], decisions: Vec<(Decision, u64)>, threads: usize) -> ReadReport {
    let mut report = ReadReport { threads, ..ReadReport::default() };
    for (source, (Decision { mut choice, .. }, asked)) in sources.iter().zip(decisions) {
        if source.refused.load(Ordering::Relaxed) {
            choice.mode = IoMode::Buffered;
            choice.why +=
                "; the system then refused direct reads, so that the rest went through the page cache";
        }
        let read = source.read.load(Ordering::Relaxed);
        report.bytes_asked += asked;
        report.bytes_read += read;
        report.files.push(FileReport {
            path: source.open.path().to_owned(),
            choice,
            bytes_asked: asked,
            bytes_read: read,
            bytes_bounced: source.bounced.load(Ordering::Relaxed),
        });
    }
    report
}
