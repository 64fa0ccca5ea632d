//! Addresses, pages, placing and transfers on a real GPU. Each test is skipped, with the reason printed, where there is none.
#![allow(clippy::unwrap_used, clippy::print_stdout, unsafe_code)]

mod common;

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use common::{PAGE, Part, Region, alone};
use gpu_driver::{Access, Bytes, CudaDriver, DeviceOrdinal, Driver, Registration, StreamHandle};
use pinned_pool::{
    Event, FileBytes, HostBytes, HostError, HostLevel, HostRun, HostStore, PreparedCopy, SourceFile,
    SourceTensor, StoreOptions, TransferStream,
};
use rustix::mm::MapFlags;
use vmm_alloc::{AddressSpace, PagePool, VmmError};

/// The first device, or `None` with the reason printed.
fn gpu(test: &str) -> Option<Arc<dyn Driver>> {
    match CudaDriver::open(DeviceOrdinal(0)) {
        Ok(driver) => Some(Arc::new(driver)),
        Err(error) => {
            println!("skipped {test}: {error}");
            None
        }
    }
}

/// A range of at least `bytes`, every granule with a page of its own.
fn space(driver: &Arc<dyn Driver>, bytes: u64) -> Arc<AddressSpace> {
    let granule = Bytes(driver.device_info().granularity.0 * 4);
    let granules = bytes.div_ceil(granule.0) as u32;
    let pool = PagePool::new(Arc::clone(driver), granule, Bytes(granule.0 * u64::from(granules))).unwrap();
    let space = AddressSpace::reserve(Arc::clone(driver), granule, granules).unwrap();
    space.map(0, &pool.take(granules as usize).unwrap()).unwrap();
    space
}

fn byte(stream: &TransferStream, space: &Arc<AddressSpace>, offset: u64) -> u8 {
    let mut bytes = [0];
    stream.read_back(space, offset, &mut bytes).unwrap();
    bytes[0]
}

#[test]
fn pages_are_mapped_aliased_guarded_remapped_and_retired() {
    let Some(driver) = gpu("pages_are_mapped_aliased_guarded_remapped_and_retired") else { return };
    let granule = driver.device_info().granularity;
    let stream = TransferStream::new(Arc::clone(&driver)).unwrap();
    let pool = PagePool::new(Arc::clone(&driver), granule, Bytes(granule.0 * 4)).unwrap();
    let space = AddressSpace::reserve(Arc::clone(&driver), granule, 8).unwrap();
    let pages = pool.take(4).unwrap();
    assert!(matches!(pool.take(1), Err(VmmError::Limit { .. })));
    space.map(0, &[&pages[..], &pages[2..], &pages[2..]].concat()).unwrap();
    space.set_tail(&pages[0]).unwrap();
    for (granules, value) in [(0, 10), (1, 11), (4, 12), (7, 13)] {
        stream.fill(&space, granules * granule.0, granule, value).unwrap();
    }
    let seen: Vec<u8> = (0..8).map(|index| byte(&stream, &space, index * granule.0 + 5)).collect();
    assert_eq!(seen, [10, 11, 12, 13, 12, 13, 12, 13]);

    stream.drain().unwrap();
    space.set_access(2, 6, Access::None).unwrap();
    space.set_access(2, 6, Access::ReadWrite).unwrap();
    space.remap(1, &[&pages[..1], &pages[3..]].concat()).unwrap();
    let seen: Vec<u8> = (0..4).map(|index| byte(&stream, &space, index * granule.0)).collect();
    assert_eq!(seen, [10, 10, 13, 13]);
    stream.drain().unwrap();
    // A run of several handles in one call.
    space.unmap(0, 8).unwrap();
    space.map(3, &pages[1..2]).unwrap();
    assert_eq!(byte(&stream, &space, 3 * granule.0 + 1), 11);
    stream.drain().unwrap();
    drop(pages);

    space.retire_to_poison(&pool).unwrap();
    assert_eq!(pool.report().in_use, granule);
    let mut last = [0u8; 16];
    let tail = space.address().offset(Bytes(8 * granule.0 + 100));
    // SAFETY: the whole range and its tail are mapped to the poison page; the buffer outlives the wait.
    unsafe { driver.copy_to_host(last.as_mut_ptr(), tail, Bytes(16), stream.handle()) }.unwrap();
    driver.synchronize_stream(stream.handle()).unwrap();
    assert_eq!(last, [0xFF; 16]);
    drop(space);
    assert_eq!(pool.report().in_use, Bytes::ZERO);
}

#[test]
fn every_kind_of_memory_reaches_the_device() {
    let _alone = alone();
    let Some(driver) = gpu("every_kind_of_memory_reaches_the_device") else { return };
    let mib = |count: u64| count << 20;
    let big = Region::anonymous(mib(60) / PAGE, 1).share();
    let packed = Region::anonymous(mib(36) / PAGE, 5).share();
    let file = Region::file(mib(24) / PAGE, 2, MapFlags::PRIVATE).share();
    let foreign = Region::anonymous(mib(36) / PAGE, 3).share();
    // SAFETY: whole pages of the region, which outlives the registration.
    unsafe { driver.register_host(foreign.address(), Bytes(PAGE), Registration::ReadWrite) }.unwrap();
    // One that is long enough, a file, one that shares a page with the first's, memory registered by someone else, a small
    // tensor, and three that fill their pages together.
    let groups = [
        vec![Part::new(&big, 100..mib(34) + 7), Part::new(&file, 0..mib(24))],
        vec![Part::new(&big, mib(34) + 8..mib(60)), Part::new(&foreign, 9..mib(36))],
        vec![Part::whole(Region::anonymous(3, 4))],
        [0..mib(10) + 3, mib(10) + 3..mib(25) + 1, mib(25) + 1..mib(36)]
            .map(|range| Part::new(&packed, range))
            .to_vec(),
    ];
    let (stays, slab) = (HostLevel::InPlace, HostLevel::Slab);
    let levels = [stays, slab, slab, slab, slab, stays, stays, stays];
    for (limit, levels) in [(None, levels), (Some(Bytes::ZERO), [HostLevel::Pageable; 8])] {
        let options =
            StoreOptions { chunk: Bytes::mib(16), register_limit: limit, ..StoreOptions::default() };
        let mut builder = HostStore::builder(Arc::clone(&driver), Bytes::mib(192), options);
        let (mut at, mut id) = (0, 0);
        let mut expected = Vec::new();
        for group in &groups {
            let mut sources = Vec::new();
            for part in group {
                sources.push(part.source(id, at));
                expected.push((at, part.expected()));
                at = (at + part.expected().len() as u64).next_multiple_of(512);
                id += 1;
            }
            builder.place(&sources).unwrap();
        }
        let store = builder.finish().unwrap();
        println!("{:?}", store.report());
        let placed: Vec<HostLevel> = (0..id).map(|id| store.placed(id).unwrap().level).collect();
        assert_eq!(placed, levels);

        if limit.is_some() {
            // Where its owners have it, some of it registered by others: for a staging ring, which reads it so.
            for ((_, bytes), id) in expected.iter().zip(0..) {
                let mut read = vec![0; bytes.len()];
                store.source_of(id).unwrap().read_at(0, &mut read).unwrap();
                assert!(read == *bytes, "tensor {id}");
            }
            continue;
        }
        let (space, stream) = (space(&driver, at), TransferStream::new(Arc::clone(&driver)).unwrap());
        // In stretches of the line that no tensor or registration knows of.
        let cuts: Vec<u64> = (0..at).step_by(5_000_011).chain([at]).collect();
        for cut in cuts.windows(2) {
            stream.enqueue(&PreparedCopy::new(&space, &store.runs(cut[0]..cut[1])).unwrap()).unwrap();
        }
        let check = || {
            let mut device = vec![0; at as usize];
            stream.read_back(&space, 0, &mut device).unwrap();
            stream.drain().unwrap();
            for (start, bytes) in &expected {
                assert!(device[*start as usize..][..bytes.len()] == *bytes, "the tensor at {start}");
            }
        };
        check();
        // And whole tensors, as an application copies them.
        stream.fill(&space, 0, Bytes(at), 0xAA).unwrap();
        for ((start, _), id) in expected.iter().zip(0..) {
            let run = HostRun::new(*start, store.bytes_of(id).unwrap().clone());
            stream.copy(&space, &[run]).unwrap();
        }
        check();
    }
    // SAFETY: registered above; no copy reads it.
    unsafe { driver.unregister_host(foreign.address()) }.unwrap();
}

#[test]
fn a_file_is_read_where_the_page_cache_has_it_also_when_it_is_cut_short() {
    let _alone = alone();
    let Some(driver) = gpu("a_file_is_read_where_the_page_cache_has_it_also_when_it_is_cut_short") else {
        return;
    };
    let size = 40 << 20;
    let bytes: Vec<u8> = (0..size).map(|at| common::pattern(7, at)).collect();
    let named = tempfile::NamedTempFile::new().unwrap();
    named.as_file().write_all_at(&bytes, 0).unwrap();
    let file = SourceFile::open(named.path()).unwrap();
    // Neither begins nor ends with a page; in pieces of 8 MiB.
    let (from, to) = (1003, size - 77);
    let options = StoreOptions { piece: Bytes::mib(8), chunk: Bytes::mib(8), ..StoreOptions::default() };
    let mut builder = HostStore::builder(Arc::clone(&driver), Bytes(size), options);
    let source = FileBytes::new(&file, from, Bytes(to - from)).unwrap();
    builder.place(&[SourceTensor::new(0, 512, source)]).unwrap();
    let store = builder.finish().unwrap();
    println!("{:?}", store.report());
    if store.report().mapped == Bytes::ZERO {
        let reasons: Vec<String> =
            store.report().step_downs.iter().map(|step| step.reason.to_string()).collect();
        println!("skipped: {}", reasons.join("; "));
        return;
    }
    assert_eq!(store.report().registrations, 5);
    let (space, stream) = (space(&driver, size), TransferStream::new(Arc::clone(&driver)).unwrap());
    let copy = PreparedCopy::new(&space, &store.runs(0..size)).unwrap();
    for cut_short in [false, true] {
        if cut_short {
            named.as_file().set_len(PAGE).unwrap();
            assert!(matches!(store.check_unchanged(), Err(HostError::FileChanged { .. })));
        }
        stream.fill(&space, 0, Bytes(size), 0xAA).unwrap();
        stream.enqueue(&copy).unwrap();
        let mut device = vec![0; (to - from) as usize];
        stream.read_back(&space, 512, &mut device).unwrap();
        stream.drain().unwrap();
        // The copy runs either way. What was cut off is still there, or zero: the kernel cannot split a large page of its
        // cache that is locked, and clears the end of it instead.
        let mut both = device.iter().zip(&bytes[from as usize..to as usize]);
        assert!(both.all(|(now, was)| now == was || (cut_short && *now == 0)), "cut short: {cut_short}");
    }
}

/// Prints the rates and host times that the numbers in this crate come from; asserts only that the bytes arrive.
#[test]
fn rates_are_printed() {
    let _alone = alone();
    let Some(driver) = gpu("rates_are_printed") else { return };
    let block = 256 << 20;
    let blocks: Vec<Arc<Vec<u8>>> = (0..8u8).map(|value| Arc::new(vec![value + 1; block])).collect();
    let line = Bytes((block * blocks.len()) as u64);
    let stream = TransferStream::new(Arc::clone(&driver)).unwrap();
    let space = space(&driver, line.0);
    for slab_only in [true, false] {
        let begin = Instant::now();
        let options = StoreOptions { slab_only, ..StoreOptions::default() };
        let mut builder = HostStore::builder(Arc::clone(&driver), line, options);
        for (index, bytes) in (0u32..).zip(&blocks) {
            let source = SourceTensor::new(index, u64::from(index) * block as u64, HostBytes::of(bytes));
            builder.place(&[source]).unwrap();
        }
        let store = builder.finish().unwrap();
        let placed = begin.elapsed();
        let runs = store.runs(0..line.0);
        let copy = PreparedCopy::new(&space, &runs).unwrap();
        let begin = Instant::now();
        stream.enqueue(&copy).unwrap();
        stream.drain().unwrap();
        let copied = begin.elapsed();
        let rate = |elapsed: std::time::Duration| line.0 as f64 / elapsed.as_secs_f64() / 1e9;
        println!(
            "slab only {slab_only}: placed at {:.1} GB/s, copied at {:.1} GB/s in {} pieces",
            rate(placed),
            rate(copied),
            copy.pieces()
        );
        for index in 0..blocks.len() as u64 {
            assert_eq!(byte(&stream, &space, index * block as u64 + 77), index as u8 + 1);
        }
        // A steady unit visit: wait, copy, record here; hold and record on the compute stream.
        for pieces in [1u64, 2, 8] {
            let part = 64 * PAGE;
            let cut = |index: u64| store.runs(index * block as u64..index * block as u64 + part);
            let runs: Vec<HostRun> = (0..pieces).flat_map(cut).collect();
            let copy = PreparedCopy::new(&space, &runs).unwrap();
            let (last_use, copied) =
                (Event::new(Arc::clone(&driver)).unwrap(), Event::new(Arc::clone(&driver)).unwrap());
            let visits = 200;
            let begin = Instant::now();
            for _ in 0..visits {
                stream.wait(&last_use).unwrap();
                stream.enqueue(&copy).unwrap();
                stream.record(&copied).unwrap();
                copied.hold(StreamHandle::DEFAULT).unwrap();
                last_use.record(StreamHandle::DEFAULT).unwrap();
            }
            let host = begin.elapsed().as_secs_f64() * 1e6 / f64::from(visits);
            println!("a visit of {} pieces takes the host {host:.1} us", copy.pieces());
            stream.drain().unwrap();
        }
    }
}
