//! How fast weights become page-locked, as one line of JSON: into a slab (copied and registered at the same time), in place,
//! and where the page cache has them.
//!
//! ```text
//! cargo run --release -p pinned-pool --example lock_slab -- [cuda|host] [MiB] [file]
//! ```
//!
//! The bytes are copied from touched, unlocked memory in tensors of 64 MiB, a group of 16 at a time. `fill` is the copy alone,
//! for a driver that locks nothing; `cancel` ends a load when half of it is filled. With a file, its tensors of 64 MiB are locked where the page cache has them, after it was
//! read once.
#![allow(clippy::print_stdout, reason = "a program")]

use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use gpu_driver::{Bytes, CudaDriver, DeviceOrdinal, Driver, HostDriver, HostOptions};
use pinned_pool::{
    FileBytes, HostBytes, HostStore, Levels, SourceBytes, SourceFile, SourceTensor, StoreOptions, Watch,
    Work, registered_bytes,
};

const TENSOR: u64 = 64 << 20;
const GROUP: usize = 16;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Seconds, and what was locked.
fn lock(
    driver: &Arc<dyn Driver>,
    tensors: &[SourceBytes],
    options: StoreOptions,
) -> Result<(f64, HostStore)> {
    let line = Bytes(TENSOR * tensors.len() as u64);
    let sources = tensors.iter().zip(0u32..);
    let sources: Vec<_> =
        sources.map(|(bytes, id)| SourceTensor::new(id, u64::from(id) * TENSOR, bytes.clone())).collect();
    let start = Instant::now();
    let mut builder = HostStore::builder(Arc::clone(driver), line, options);
    for group in sources.chunks(GROUP) {
        builder.place(group)?;
    }
    let store = builder.finish()?;
    Ok((start.elapsed().as_secs_f64(), store))
}

fn measure(
    driver: &Arc<dyn Driver>,
    what: &str,
    tensors: &[SourceBytes],
    options: StoreOptions,
) -> Result<String> {
    let bytes = (TENSOR * tensors.len() as u64) as f64;
    let (seconds, store) = lock(driver, tensors, options)?;
    let report = store.report();
    let (registered, registrations) = (report.registered.0, report.registrations);
    let locked = report.mapped.0 + report.in_place.0 + report.slab.0;
    let start = Instant::now();
    drop(store);
    let release = start.elapsed().as_secs_f64();
    Ok(format!(
        "\"{what}\":{{\"bytes\":{bytes},\"locked\":{locked},\"registered\":{registered},\"registrations\":{registrations},\
         \"seconds\":{seconds:.4},\"bytes_per_second\":{:.0},\"release_seconds\":{release:.4}}}",
        bytes / seconds
    ))
}

/// Ends a load when half of it is filled, and says after how many seconds its caller goes on and all memory is back.
fn cancel(driver: &Arc<dyn Driver>, tensors: &[SourceBytes], options: StoreOptions) -> Result<String> {
    let (half, before) = (TENSOR * tensors.len() as u64 / 2, registered_bytes());
    let (filled, since) = (Arc::new(AtomicU64::new(0)), Arc::new(OnceLock::<Instant>::new()));
    let (reached, began) = (Arc::clone(&filled), Arc::clone(&since));
    let watch = Watch::new()
        .reports_to(move |work, bytes| {
            if work == Work::Filled && reached.fetch_add(bytes.0, Ordering::Relaxed) + bytes.0 >= half {
                began.get_or_init(Instant::now);
            }
        })
        .cancelled_by({
            let since = Arc::clone(&since);
            move || since.get().is_some()
        });
    let mut builder = HostStore::builder(Arc::clone(driver), Bytes(TENSOR * tensors.len() as u64), options);
    builder.watch(watch);
    let mut ids = 0u32..;
    let ended = tensors.chunks(GROUP).try_for_each(|group| {
        let tensor =
            |(bytes, id): (&SourceBytes, u32)| SourceTensor::new(id, u64::from(id) * TENSOR, bytes.clone());
        let group: Vec<_> = group.iter().zip(ids.by_ref()).map(tensor).collect();
        builder.place(&group).map(drop)
    });
    drop(builder);
    let since = since.get().ok_or("the load ended before half of it was filled")?;
    let returned = since.elapsed().as_secs_f64();
    while registered_bytes() > before && since.elapsed().as_secs() < 60 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (released, ended) = (since.elapsed().as_secs_f64(), ended.is_err());
    Ok(format!(
        "\"cancel\":{{\"ended\":{ended},\"return_seconds\":{returned:.4},\"release_seconds\":{released:.4}}}"
    ))
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let kind = arguments.next().unwrap_or_else(|| "host".into());
    let mib: u64 = arguments.next().map_or(Ok(512), |text| text.parse())?;
    let file = arguments.next();
    let driver: Arc<dyn Driver> = match kind.as_str() {
        "cuda" => Arc::new(CudaDriver::open(DeviceOrdinal(0))?),
        _ => Arc::new(HostDriver::new(HostOptions::new(Bytes::mib(64)))?),
    };
    let count = (mib << 20).div_ceil(TENSOR).max(1);
    let tensors: Vec<SourceBytes> = (0..count)
        .map(|seed| HostBytes::of(&Arc::new(vec![seed as u8 | 1; TENSOR as usize])).into())
        .collect();
    let slab = || StoreOptions { slab_only: true, ..StoreOptions::default() };
    let mut fields = vec![format!("\"device\":\"{}\"", driver.device_info().name)];
    let emulator: Arc<dyn Driver> = Arc::new(HostDriver::new(HostOptions::new(Bytes::mib(64)))?);
    fields.push(measure(&emulator, "fill", &tensors, slab())?);
    fields.push(measure(&driver, "slab", &tensors, slab())?);
    fields.push(cancel(&driver, &tensors, slab())?);
    fields.push(measure(&driver, "in_place", &tensors, StoreOptions::default())?);
    drop(tensors);
    if let Some(path) = file {
        let file = SourceFile::open(path)?;
        let count = file.size().0 / TENSOR;
        let tensors = (0..count).map(|index| FileBytes::new(&file, index * TENSOR, Bytes(TENSOR)));
        let tensors: Vec<SourceBytes> =
            tensors.map(|bytes| bytes.map(SourceBytes::from)).collect::<std::result::Result<_, _>>()?;
        let mut once = vec![0; TENSOR as usize];
        for tensor in &tensors {
            tensor.read_at(0, &mut once)?;
        }
        let mapped = Levels { slab: false, ..Levels::ALL };
        fields.push(measure(
            &driver,
            "mapped",
            &tensors,
            StoreOptions { levels: mapped, ..StoreOptions::default() },
        )?);
    }
    println!("{{{}}}", fields.join(","));
    Ok(())
}
