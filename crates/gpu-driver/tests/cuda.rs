//! The CUDA driver on a real GPU. Each test is skipped, with the reason printed, where there is none.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block, reason = "tests drive the unsafe verbs")]

mod conformance;

use std::os::fd::AsFd;

use conformance::{HostBuffer, Mapped};
use gpu_driver::{
    Access, Bytes, CudaDriver, DeviceOrdinal, Driver, EventHandle, HostToDevice, Registration, StreamHandle,
};

/// The first device, or `None` with the reason printed.
fn gpu(test: &str) -> Option<CudaDriver> {
    match CudaDriver::open(DeviceOrdinal(0)) {
        Ok(driver) => Some(driver),
        Err(error) => {
            println!("skipped {test}: {error}");
            None
        }
    }
}

#[test]
fn a_gpu_conforms() {
    let Some(driver) = gpu("a_gpu_conforms") else { return };
    println!("{}", CudaDriver::probe());
    println!("{:?}", driver.device_info());
    for (name, check) in conformance::all() {
        println!("conformance: {name}");
        check(&driver);
    }
}

#[test]
fn memory_comes_back() {
    let Some(driver) = gpu("memory_comes_back") else { return };
    let size = Bytes::mib(256);
    let cycle = || {
        let pages = driver.create_pages(size).unwrap();
        let during = driver.memory_info().unwrap().free;
        // SAFETY: made above, released once.
        unsafe { driver.release_pages(pages) }.unwrap();
        during
    };
    cycle();
    let before = driver.memory_info().unwrap().free;
    let during = cycle();
    let after = driver.memory_info().unwrap().free;
    println!("free before {before}, during {during}, after {after}");
    assert!(before.0 >= during.0 + size.0 / 2, "the pages were counted");
    assert!(after.0 + Bytes::mib(64).0 >= before.0, "the pages came back");
}

/// A write at one address on one stream, an event, a read at the other address on another: never stale.
#[test]
fn aliases_are_never_stale_across_streams() {
    let Some(driver) = gpu("aliases_are_never_stale_across_streams") else { return };
    let mapped = Mapped::new(&driver, 4, 2);
    let streams = [driver.create_stream().unwrap(), driver.create_stream().unwrap()];
    let written = driver.create_event().unwrap();
    let target = HostBuffer::new(mapped.size.as_usize());
    for round in 0..100_u8 {
        // SAFETY: mapped and alive; ordered by the event; waited for in each round.
        unsafe {
            driver.fill(mapped.at(0), mapped.size, round, streams[0]).unwrap();
            driver.record_event(written, streams[0]).unwrap();
            driver.wait_event(streams[1], written).unwrap();
            driver.copy_to_host(target.start, mapped.at(1), mapped.size, streams[1]).unwrap();
        }
        driver.synchronize_stream(streams[1]).unwrap();
        assert!(target.bytes().iter().all(|byte| *byte == round), "round {round}");
    }
    // SAFETY: idle.
    unsafe {
        for stream in streams {
            driver.synchronize_stream(stream).unwrap();
            driver.destroy_stream(stream).unwrap();
        }
        driver.destroy_event(written).unwrap();
    }
}

/// A read-only shared file mapping can be registered and copied from.
#[test]
fn a_mapped_file_is_a_source() {
    let Some(driver) = gpu("a_mapped_file_is_a_source") else { return };
    if !driver.device_info().read_only_registration {
        println!("skipped a_mapped_file_is_a_source: no read-only registration");
        return;
    }
    let content = HostBuffer::pattern(8 << 20, 41);
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = if path.is_dir() { path.to_owned() } else { std::env::temp_dir() };
    let path = folder.join(format!("gpu-driver-mapped-{}", std::process::id()));
    std::fs::write(&path, content.bytes()).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    let size = content.size();
    // SAFETY: a fresh mapping of a file that nobody changes.
    let start = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            size.as_usize(),
            rustix::mm::ProtFlags::READ,
            rustix::mm::MapFlags::SHARED,
            file.as_fd(),
            0,
        )
    }
    .unwrap();
    let mapped = Mapped::new(&driver, size.0.div_ceil(driver.device_info().granularity.0), 1);
    let target = HostBuffer::new(size.as_usize());
    // SAFETY: whole pages that stay mapped; waited for before they are unregistered and unmapped.
    unsafe {
        driver.register_host(start.cast(), size, Registration::ReadOnly).unwrap();
        let stream = driver.create_stream().unwrap();
        let copy = HostToDevice { target: mapped.at(0), source: start.cast_const().cast(), size };
        driver.copy_to_device(&[copy], stream).unwrap();
        driver.copy_to_host(target.start, mapped.at(0), size, stream).unwrap();
        driver.synchronize_stream(stream).unwrap();
        driver.unregister_host(start.cast()).unwrap();
        driver.destroy_stream(stream).unwrap();
        rustix::mm::munmap(start, size.as_usize()).unwrap();
    }
    let _ = std::fs::remove_file(&path);
    assert!(target.bytes() == content.bytes());
}

/// Many threads that never touched CUDA may call any verb.
#[test]
fn any_thread_may_call() {
    let Some(driver) = gpu("any_thread_may_call") else { return };
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let driver = &driver;
            scope.spawn(move || {
                let mapped = Mapped::new(driver, 1, 1);
                let source = HostBuffer::pattern(1 << 20, seed);
                let target = HostBuffer::new(1 << 20);
                let stream = driver.create_stream().unwrap();
                // SAFETY: mapped and alive; waited for.
                unsafe {
                    driver.copy_to_device(&[source.copy_to(0, 1 << 20, mapped.at(0))], stream).unwrap();
                    driver.copy_to_host(target.start, mapped.at(0), Bytes::mib(1), stream).unwrap();
                    driver.synchronize_stream(stream).unwrap();
                    driver.destroy_stream(stream).unwrap();
                }
                assert!(target.bytes() == source.bytes());
            });
        }
    });
}

/// The host cost of one unit visit: two waits, two records and one copy. Printed, not asserted.
#[test]
fn the_calls_of_a_visit_are_cheap() {
    let Some(driver) = gpu("the_calls_of_a_visit_are_cheap") else { return };
    let mapped = Mapped::new(&driver, 1, 1);
    let source = HostBuffer::pattern(64 << 10, 43);
    // SAFETY: whole pages that outlive the registration.
    unsafe { driver.register_host(source.start, source.size(), Registration::ReadWrite) }.unwrap();
    let (copy, compute) = (driver.create_stream().unwrap(), driver.create_stream().unwrap());
    let events: [EventHandle; 2] = [driver.create_event().unwrap(), driver.create_event().unwrap()];
    let visit = || {
        driver.wait_event(copy, events[0]).unwrap();
        let copies = [source.copy_to(0, 64 << 10, mapped.at(0))];
        // SAFETY: mapped and alive; waited for below.
        unsafe { driver.copy_to_device(&copies, copy) }.unwrap();
        driver.record_event(events[1], copy).unwrap();
        driver.wait_event(compute, events[1]).unwrap();
        driver.record_event(events[0], compute).unwrap();
    };
    visit();
    driver.synchronize_stream(compute).unwrap();
    let rounds = 200;
    let start = std::time::Instant::now();
    for _ in 0..rounds {
        visit();
    }
    println!("host time a visit: {:?}", start.elapsed() / rounds);
    driver.synchronize_stream(copy).unwrap();
    driver.synchronize_stream(compute).unwrap();
    // SAFETY: idle.
    unsafe {
        driver.unregister_host(source.start).unwrap();
        driver.destroy_stream(copy).unwrap();
        driver.destroy_stream(compute).unwrap();
        for event in events {
            driver.destroy_event(event).unwrap();
        }
    }
}

/// What the emulator refuses to be safe, asked of the real driver. Printed, not asserted.
#[test]
fn what_the_driver_does_at_the_edges() {
    let Some(driver) = gpu("what_the_driver_does_at_the_edges") else { return };
    let granule = driver.device_info().granularity;
    // Two neighbouring registrations, one copy over both.
    let mapped = Mapped::new(&driver, 1, 1);
    let buffer = HostBuffer::pattern(1 << 20, 44);
    let half = Bytes(buffer.size().0 / 2);
    let second = buffer.start.wrapping_add(half.as_usize());
    // SAFETY: whole pages that outlive the registrations; waited for.
    unsafe {
        driver.register_host(buffer.start, half, Registration::ReadWrite).unwrap();
        driver.register_host(second, half, Registration::ReadWrite).unwrap();
        let copy = buffer.copy_to(0, buffer.size().0, mapped.at(0));
        println!(
            "one copy over two registrations: {:?}",
            driver.copy_to_device(&[copy], StreamHandle::DEFAULT)
        );
        driver.synchronize_stream(StreamHandle::DEFAULT).unwrap();
        driver.unregister_host(buffer.start).unwrap();
        driver.unregister_host(second).unwrap();
    }
    // Unmapping and protecting over a gap.
    let size = Bytes(granule.0 * 3);
    let range = driver.reserve_address(size, Bytes::ZERO).unwrap();
    let pages = driver.create_pages(granule).unwrap();
    // SAFETY: inside a fresh reservation; unmapped before it is freed.
    unsafe {
        driver.map_pages(range, granule, pages).unwrap();
        driver.map_pages(range.offset(Bytes(granule.0 * 2)), granule, pages).unwrap();
        println!("set access over a gap: {:?}", driver.set_access(range, size, Access::ReadWrite));
        let unmapped = driver.unmap_pages(range, size);
        println!("unmap over a gap: {unmapped:?}");
        if unmapped.is_err() {
            println!("then the first: {:?}", driver.unmap_pages(range, granule));
            println!("and the last: {:?}", driver.unmap_pages(range.offset(Bytes(granule.0 * 2)), granule));
        }
        driver.release_pages(pages).unwrap();
        driver.free_address(range, size).unwrap();
    }
}
