//! What the emulator refuses: every broken contract is an error value that changes nothing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block, reason = "tests break contracts on purpose")]

mod conformance;

use conformance::{HostBuffer, Mapped};
use gpu_driver::{
    Access, Bytes, CopyOrder, DeviceAddress, Driver, DriverError, EventHandle, HostDriver, HostOptions,
    PageHandle, Registration, Result, StreamHandle,
};

const GRANULE: Bytes = HostOptions::DEFAULT_GRANULARITY;

fn device(order: CopyOrder) -> HostDriver {
    HostDriver::new(HostOptions::new(Bytes::mib(4)).order(order)).unwrap()
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, part: &str) {
    match result {
        Err(DriverError::InvalidArgument { what, .. }) => {
            assert!(what.contains(part), "{what:?} does not say {part:?}");
        }
        other => panic!("{other:?} is not a refusal"),
    }
}

#[test]
fn impossible_devices() {
    refused(HostDriver::new(HostOptions::new(Bytes::ZERO)), "0 bytes");
    let options = HostOptions::new(Bytes::mib(4));
    for granularity in [Bytes::ZERO, Bytes(1), Bytes(2048), Bytes(12_288)] {
        refused(HostDriver::new(options.clone().granularity(granularity)), "power of two");
    }
    refused(HostDriver::new(options.clone().granularity(Bytes::mib(8))), "above the device");
    refused(HostDriver::new(options.bandwidth(Some(0))), "bandwidth");
}

#[test]
fn a_full_device_says_what_is_free() {
    let driver = device(CopyOrder::Eager);
    let pages = driver.create_pages(Bytes::mib(3)).unwrap();
    let expected =
        DriverError::OutOfMemory { asked: Bytes::mib(2), free: Bytes::mib(1), total: Bytes::mib(4) };
    assert_eq!(driver.create_pages(Bytes::mib(2)), Err(expected));
    // Memory does not fragment: what was given back counts whole, wherever it was.
    let more = driver.create_pages(Bytes::mib(1)).unwrap();
    // SAFETY: made above, released once.
    unsafe { driver.release_pages(pages) }.unwrap();
    let large = driver.create_pages(Bytes::mib(3)).unwrap();
    // SAFETY: made above, released once.
    unsafe {
        driver.release_pages(more).unwrap();
        driver.release_pages(large).unwrap();
    }
    assert!(driver.counters().nothing_alive());
}

#[test]
fn released_pages_count_until_their_last_mapping_is_gone() {
    let driver = device(CopyOrder::Eager);
    let range = driver.reserve_address(Bytes(GRANULE.0 * 2), Bytes::ZERO).unwrap();
    let pages = driver.create_pages(GRANULE).unwrap();
    // SAFETY: contracts are kept, or broken for the emulator to refuse.
    unsafe {
        driver.map_pages(range, GRANULE, pages).unwrap();
        driver.release_pages(pages).unwrap();
        refused(driver.release_pages(pages), "not alive");
        refused(driver.map_pages(range.offset(GRANULE), GRANULE, pages), "not alive");
        assert_eq!(driver.counters().pages_alive, 1);
        assert_eq!(driver.memory_info().unwrap().free, Bytes::mib(4) - GRANULE);
        driver.unmap_pages(range, GRANULE).unwrap();
        assert_eq!(driver.counters().pages_alive, 0);
        assert_eq!(driver.memory_info().unwrap().free, Bytes::mib(4));
        driver.free_address(range, Bytes(GRANULE.0 * 2)).unwrap();
    }
}

#[test]
fn wrong_mappings() {
    let driver = device(CopyOrder::Eager);
    let two = Bytes(GRANULE.0 * 2);
    let range = driver.reserve_address(Bytes(GRANULE.0 * 4), Bytes::ZERO).unwrap();
    let pages = driver.create_pages(two).unwrap();
    let second = range.offset(GRANULE);
    // SAFETY: broken contracts, for the emulator to refuse.
    unsafe {
        refused(driver.map_pages(range, GRANULE, pages), "mapped whole");
        refused(driver.map_pages(range.offset(Bytes(4096)), two, pages), "multiples");
        refused(driver.map_pages(range.offset(Bytes(GRANULE.0 * 3)), two, pages), "no reservation");
        refused(driver.map_pages(DeviceAddress(GRANULE.0), two, pages), "no reservation");
        refused(driver.map_pages(range, two, PageHandle(99)), "not alive");
        driver.map_pages(range, two, pages).unwrap();
        refused(driver.map_pages(second, two, pages), "something is mapped");
        refused(driver.unmap_pages(range, GRANULE), "whole mappings");
        refused(driver.unmap_pages(second, two), "whole mappings");
        refused(driver.unmap_pages(range, Bytes(GRANULE.0 * 4)), "whole mappings");
        refused(driver.set_access(second, GRANULE, Access::ReadWrite), "whole mappings");
        refused(driver.free_address(range, Bytes(GRANULE.0 * 4)), "1 mappings");
        refused(driver.free_address(range, two), "are reserved there");
        refused(driver.free_address(second, two), "not the start");
        driver.unmap_pages(range, two).unwrap();
        refused(driver.unmap_pages(range, two), "whole mappings");
        driver.release_pages(pages).unwrap();
        driver.free_address(range, Bytes(GRANULE.0 * 4)).unwrap();
        refused(driver.free_address(range, Bytes(GRANULE.0 * 4)), "not the start");
    }
    refused(driver.reserve_address(GRANULE, Bytes(3)), "power of two");
    assert!(driver.counters().nothing_alive());
}

#[test]
fn copies_to_where_nothing_may_be_written() {
    let driver = device(CopyOrder::Eager);
    let mapped = Mapped::new(&driver, 2, 1);
    let source = HostBuffer::pattern(mapped.size.as_usize() * 2, 5);
    let inside = source.copy_to(0, mapped.size.0, mapped.at(0));
    let beyond = source.copy_to(0, mapped.size.0 + 1, mapped.at(0));
    let nowhere = source.copy_to(0, 16, DeviceAddress(16));
    let mut null = inside;
    null.source = std::ptr::null();
    let stream = StreamHandle::DEFAULT;
    // SAFETY: broken contracts, for the emulator to refuse.
    unsafe {
        refused(driver.copy_to_device(&[beyond], stream), "nothing is mapped");
        refused(driver.copy_to_device(&[nowhere], stream), "no reservation");
        refused(driver.copy_to_device(&[null], stream), "host address 0x0");
        // All or nothing: the good copy before the bad one did not run.
        refused(driver.copy_to_device(&[inside, nowhere], stream), "no reservation");
        assert_eq!(driver.counters().bytes_to_device, Bytes::ZERO);
        driver.set_access(mapped.at(0), mapped.size, Access::None).unwrap();
        refused(driver.copy_to_device(&[inside], stream), "no access");
        refused(driver.fill(mapped.at(0), Bytes(1), 0, stream), "no access");
        refused(driver.copy_to_host(source.start, mapped.at(0), Bytes(1), stream), "no access");
        refused(driver.copy_to_device(&[inside], StreamHandle(77)), "not a stream");
    }
}

#[test]
fn memory_in_use_is_not_taken_away() {
    let driver = device(CopyOrder::Lazy);
    let mapped = Mapped::new(&driver, 1, 1);
    let source = HostBuffer::pattern(mapped.size.as_usize(), 6);
    let stream = driver.create_stream().unwrap();
    // SAFETY: broken contracts, for the emulator to refuse; kept again at the end.
    unsafe {
        driver.register_host(source.start, source.size(), Registration::ReadWrite).unwrap();
        driver.copy_to_device(&[source.copy_to(0, mapped.size.0, mapped.at(0))], stream).unwrap();
        refused(driver.unmap_pages(mapped.at(0), mapped.size), "still uses it");
        refused(driver.set_access(mapped.at(0), mapped.size, Access::None), "still uses it");
        refused(driver.unregister_host(source.start), "still uses it");
        refused(driver.destroy_stream(stream), "still has work");
        driver.synchronize_stream(stream).unwrap();
        driver.unregister_host(source.start).unwrap();
        driver.destroy_stream(stream).unwrap();
        refused(driver.destroy_stream(stream), "not alive");
        refused(driver.destroy_stream(StreamHandle::DEFAULT), "not a copy stream");
    }
}

#[test]
fn dead_events_and_odd_registrations() {
    let driver = device(CopyOrder::Eager);
    let event = driver.create_event().unwrap();
    let buffer = HostBuffer::new(8192);
    // SAFETY: broken contracts, for the emulator to refuse.
    unsafe {
        driver.destroy_event(event).unwrap();
        refused(driver.destroy_event(event), "not alive");
        refused(driver.register_host(buffer.start, Bytes(100), Registration::ReadWrite), "whole pages");
        let odd = buffer.start.wrapping_add(1);
        refused(driver.register_host(odd, Bytes(4096), Registration::ReadWrite), "whole pages");
        refused(
            driver.register_host(std::ptr::null_mut(), Bytes(4096), Registration::ReadOnly),
            "whole pages",
        );
    }
    refused(driver.query_event(event), "not alive");
    refused(driver.record_event(EventHandle(5), StreamHandle::DEFAULT), "not alive");
    refused(driver.wait_event(StreamHandle::DEFAULT, event), "not alive");
    refused(driver.synchronize_event(event), "not alive");
    refused(driver.synchronize_stream(StreamHandle(5)), "not a stream");
    refused(driver.is_capturing(StreamHandle(5)), "not a stream");
}

/// Dropped with copies submitted and everything alive: it ends, and its addresses go.
#[test]
fn dropping_a_busy_device_ends() {
    for order in [CopyOrder::Eager, CopyOrder::Lazy, CopyOrder::Random] {
        let driver = device(order);
        let source = HostBuffer::pattern(GRANULE.as_usize(), 7);
        let mapped = std::mem::ManuallyDrop::new(Mapped::new(&driver, 1, 1));
        let stream = driver.create_stream().unwrap();
        for _ in 0..50 {
            // SAFETY: the device is dropped before source and target go.
            unsafe { driver.copy_to_device(&[source.copy_to(0, GRANULE.0, mapped.at(0))], stream) }.unwrap();
        }
        drop(driver);
    }
}
