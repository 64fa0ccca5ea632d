//! The emulator tells right code from wrong: what a missing wait looks like in each copy order, and the link.
#![allow(clippy::unwrap_used, clippy::naive_bytecount, reason = "tests")]
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block, reason = "tests drive the unsafe verbs")]

mod conformance;

use std::time::{Duration, Instant};

use conformance::{HostBuffer, Mapped};
use gpu_driver::{Bytes, CopyOrder, Driver, HostDriver, HostOptions, StreamHandle, Verb};

fn device(order: CopyOrder, seed: u64) -> HostDriver {
    HostDriver::new(HostOptions::new(Bytes::mib(8)).order(order).seed(seed)).unwrap()
}

/// Reads device memory as compute on the host does.
fn read(mapped: &Mapped<'_>) -> Vec<u8> {
    let start = std::ptr::with_exposed_provenance::<u8>(mapped.at(0).0 as usize);
    // SAFETY: mapped with access; callers wait, or want to see what comes of not waiting.
    (0..mapped.size.as_usize()).map(|at| unsafe { start.wrapping_add(at).read_volatile() }).collect()
}

#[test]
fn device_addresses_are_addresses_of_this_process() {
    let driver = device(CopyOrder::Eager, 0);
    let mapped = Mapped::new(&driver, 1, 2);
    // SAFETY: mapped; the compute stream is this thread.
    unsafe { driver.fill(mapped.at(1), mapped.size, 0x5A, StreamHandle::DEFAULT) }.unwrap();
    assert!(read(&mapped).iter().all(|byte| *byte == 0x5A));
}

#[test]
fn without_a_wait_a_lazy_copy_has_not_happened() {
    let driver = device(CopyOrder::Lazy, 0);
    let mapped = Mapped::new(&driver, 1, 1);
    let stream = driver.create_stream().unwrap();
    let event = driver.create_event().unwrap();
    // SAFETY: mapped and alive; waited for below.
    unsafe {
        driver.fill(mapped.at(0), mapped.size, 0xFF, StreamHandle::DEFAULT).unwrap();
        driver.fill(mapped.at(0), mapped.size, 1, stream).unwrap();
        driver.record_event(event, stream).unwrap();
    }
    assert!(!driver.query_event(event).unwrap());
    assert!(read(&mapped).iter().all(|byte| *byte == 0xFF), "nobody waited");
    driver.wait_event(StreamHandle::DEFAULT, event).unwrap();
    assert!(read(&mapped).iter().all(|byte| *byte == 1));
    // SAFETY: idle.
    unsafe {
        driver.destroy_stream(stream).unwrap();
        driver.destroy_event(event).unwrap();
    }
}

/// Over the seeds a copy that nobody waits for is seen undone and seen half done.
#[test]
fn without_a_wait_a_random_copy_is_anything() {
    let (mut undone, mut partly) = (false, false);
    for seed in 0_u64.. {
        assert!(seed < 5000, "undone seen: {undone}, half done seen: {partly}");
        let driver = device(CopyOrder::Random, seed);
        let mapped = Mapped::new(&driver, 1, 1);
        let stream = driver.create_stream().unwrap();
        let event = driver.create_event().unwrap();
        // SAFETY: mapped and alive; waited for below.
        unsafe {
            driver.fill(mapped.at(0), mapped.size, 0, StreamHandle::DEFAULT).unwrap();
            driver.fill(mapped.at(0), mapped.size, 1, stream).unwrap();
            driver.record_event(event, stream).unwrap();
        }
        // What the seed allows may run meanwhile; how far it gets is nobody's promise.
        std::thread::sleep(Duration::from_millis(1));
        let done = read(&mapped).iter().filter(|byte| **byte == 1).count();
        undone |= done == 0;
        partly |= done > 0 && done < mapped.size.as_usize();
        driver.synchronize_event(event).unwrap();
        assert!(read(&mapped).iter().all(|byte| *byte == 1));
        // SAFETY: idle.
        unsafe {
            driver.destroy_stream(stream).unwrap();
            driver.destroy_event(event).unwrap();
        }
        if undone && partly {
            break;
        }
    }
}

/// A modelled link holds copies back; the bound is one side only, so a slow machine cannot fail it.
#[test]
fn a_modelled_link_takes_its_time() {
    let options = HostOptions::new(Bytes::mib(8)).bandwidth(Some(100_000_000));
    let driver = HostDriver::new(options).unwrap();
    let mapped = Mapped::new(&driver, 32, 1);
    let source = HostBuffer::pattern(mapped.size.as_usize(), 9);
    let streams = [driver.create_stream().unwrap(), driver.create_stream().unwrap()];
    let half = Bytes(mapped.size.0 / 2);
    let start = Instant::now();
    for (index, stream) in (0_u64..).zip(streams) {
        let from = index * half.0;
        // SAFETY: mapped and alive; waited for below.
        unsafe {
            driver.copy_to_device(&[source.copy_to(from, half.0, mapped.at(0).offset(Bytes(from)))], stream)
        }
        .unwrap();
    }
    for stream in streams {
        driver.synchronize_stream(stream).unwrap();
    }
    // 2 MiB at 100 MB/s are 21 ms, however many streams share them; a late timer is forgiven 1 ms a copy.
    assert!(start.elapsed() >= Duration::from_millis(15), "{:?}", start.elapsed());
    assert!(read(&mapped) == source.bytes());
    for stream in streams {
        // SAFETY: idle.
        unsafe { driver.destroy_stream(stream) }.unwrap();
    }
}

#[test]
fn counters_count() {
    let driver = device(CopyOrder::Eager, 0);
    {
        let mapped = Mapped::new(&driver, 2, 3);
        let source = HostBuffer::pattern(4096, 9);
        // SAFETY: mapped and alive; the compute stream is this thread.
        unsafe {
            driver.copy_to_device(&[source.copy_to(0, 4096, mapped.at(0))], StreamHandle::DEFAULT).unwrap();
            driver.fill(mapped.at(0), Bytes(10), 0, StreamHandle::DEFAULT).unwrap();
            driver.copy_to_host(source.start, mapped.at(0), Bytes(20), StreamHandle::DEFAULT).unwrap();
        }
        let counters = driver.counters();
        assert_eq!((counters.reservations_alive, counters.pages_alive, counters.mappings_alive), (1, 1, 3));
        assert_eq!(counters.page_bytes_alive, mapped.size);
        assert_eq!(counters.calls_of(Verb::MapPages), 3);
        assert_eq!(counters.calls_of(Verb::UnmapPages), 0);
        let bytes = (counters.bytes_to_device, counters.bytes_filled, counters.bytes_to_host);
        assert_eq!(bytes, (Bytes(4096), Bytes(10), Bytes(20)));
        assert!(!counters.nothing_alive());
    }
    assert!(driver.counters().nothing_alive());
}
