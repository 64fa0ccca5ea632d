//! How fast bytes reach the device through the staging ring: from memory and from a file, beside page-locked memory.
//!
//! ```text
//! cargo run --release -p pinned-pool --example stage -- cuda 8192 [FOLDER] [CHUNK_MIB] [RING_MIB] [THREADS]
//! ```
//!
//! Prints one line a kind of source, in GB/s, and the rate relative to page-locked memory.
#![allow(clippy::print_stdout, reason = "a program")]

use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use gpu_driver::{Bytes, CudaDriver, DeviceOrdinal, Driver, HostDriver, HostOptions};
use pinned_pool::{
    Event, FileBytes, HostBytes, HostStore, LineRun, SourceFile, SourceTensor, StagedJob, StagingLine,
    StagingOptions, StoreOptions, TransferStream,
};
use vmm_alloc::{AddressSpace, PagePool};

const TENSOR: u64 = 64 << 20;
const TENSORS: u64 = 8;
const ROUNDS: u64 = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|text| text.parse::<u64>().ok());
    let driver: Arc<dyn Driver> = match arguments.first().map(String::as_str) {
        Some("cuda") => Arc::new(CudaDriver::open(DeviceOrdinal(0))?),
        _ => Arc::new(HostDriver::new(HostOptions::new(Bytes(TENSOR * 16)))?),
    };
    // Sources are so long that no processor's cache holds them.
    let rounds = number(1).map_or(ROUNDS, |mib| (mib << 20).div_ceil(TENSOR * TENSORS)).max(1);
    let options = StagingOptions {
        chunk: number(3).map(Bytes::mib),
        bytes: number(4).map(Bytes::mib),
        threads: number(5).map(|threads| threads as usize),
        ..StagingOptions::default()
    };
    let line = Bytes(TENSOR * TENSORS);
    let granule = Bytes(driver.device_info().granularity.0.max(2 << 20));
    let granules = line.0.div_ceil(granule.0);
    let space = AddressSpace::reserve(Arc::clone(&driver), granule, granules as u32)?;
    let pool = PagePool::new(Arc::clone(&driver), granule, Bytes(granule.0 * granules))?;
    space.map(0, &pool.take(granules as usize)?)?;

    let weights: Vec<_> = (0..TENSORS).map(|tensor| Arc::new(vec![tensor as u8; TENSOR as usize])).collect();
    let mut store = HostStore::builder(
        Arc::clone(&driver),
        line,
        StoreOptions { slab_only: true, ..StoreOptions::default() },
    );
    for (tensor, bytes) in (0..).zip(&weights) {
        store.place(&[SourceTensor::new(tensor as u32, tensor * TENSOR, HostBytes::of(bytes))])?;
    }
    let store = store.finish()?;
    let folder = arguments.get(2).map_or_else(std::env::temp_dir, Into::into);
    let mut named = tempfile::NamedTempFile::new_in(folder)?;
    weights.iter().try_for_each(|bytes| named.write_all(bytes))?;
    named.as_file().sync_all()?;
    let file = SourceFile::open(named.path())?;
    let in_memory = (0..).zip(&weights).map(|(tensor, bytes): (u64, _)| LineRun::Staged {
        offset: tensor * TENSOR,
        bytes: HostBytes::of(bytes).into(),
    });
    let in_memory: Vec<LineRun> = in_memory.collect();
    let in_file = [LineRun::Staged { offset: 0, bytes: FileBytes::new(&file, 0, line)?.into() }];

    let locked = rate(&driver, &space, &store.line_runs(0..line.0), &options, Bytes(1), rounds)?;
    println!("page-locked          {locked:6.2} GB/s");
    for (what, runs, bytes) in [
        ("memory", &in_memory[..], Bytes(1)),
        ("file, page cache", &in_file[..], Bytes(1)),
        ("file, around it", &in_file[..], Bytes(1 << 50)),
    ] {
        let rate = rate(&driver, &space, runs, &options, bytes, rounds)?;
        println!("{what:20} {rate:6.2} GB/s {:5.3}", rate / locked);
    }
    Ok(())
}

/// Bytes a second, in GB, of copying `runs` so many times.
fn rate(
    driver: &Arc<dyn Driver>,
    space: &Arc<AddressSpace>,
    runs: &[LineRun],
    options: &StagingOptions,
    in_files: Bytes,
    rounds: u64,
) -> Result<f64, Box<dyn Error>> {
    let stream = Arc::new(TransferStream::new(Arc::clone(driver))?);
    let mut line = StagingLine::new(&stream, options, in_files)?;
    let copy = line.prepare(space, runs)?;
    let copied = Arc::new(Event::new(Arc::clone(driver))?);
    let job = || StagedJob {
        copy: Some(Arc::clone(&copy)),
        copied: Some(Arc::clone(&copied)),
        ..StagedJob::default()
    };
    line.wait_submitted(line.submit(job())?)?;
    copied.synchronize()?;
    let begun = Instant::now();
    for _ in 0..rounds {
        line.submit(job())?;
    }
    line.wait_clear()?;
    copied.synchronize()?;
    let seconds = begun.elapsed().as_secs_f64();
    line.close()?;
    stream.drain()?;
    Ok((rounds * copy.bytes().0) as f64 / seconds / 1e9)
}
