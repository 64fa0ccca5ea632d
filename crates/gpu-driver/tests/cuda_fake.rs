//! The CUDA driver's code paths without a GPU, against a library that answers as libcuda does.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block, reason = "tests drive the unsafe verbs")]

mod conformance;
mod fake_libcuda;

use std::path::Path;
use std::sync::Arc;

use conformance::{HostBuffer, Mapped};
use fake_libcuda::Fake;
use gpu_driver::{
    Bytes, CudaDriver, DeviceKind, DeviceOrdinal, Driver, DriverError, Module, Registration, StreamHandle,
};

#[test]
fn no_library_is_an_error_value() {
    let missing = Path::new("/nonexistent/libcuda.so.1");
    for _ in 0..2 {
        // SAFETY: there is nothing to load.
        let opened = unsafe { CudaDriver::open_library(missing, DeviceOrdinal(0)) };
        assert_eq!(opened.unwrap_err(), DriverError::LibraryMissing);
    }
    // SAFETY: there is nothing to load.
    let probe = unsafe { CudaDriver::probe_library(missing) };
    assert!(!probe.usable());
    assert_eq!(probe.to_string(), DriverError::LibraryMissing.to_string());
}

/// The library that is installed here, if any: asking never panics and both ways agree.
#[test]
fn the_installed_library_is_asked_safely() {
    let probe = CudaDriver::probe();
    let opened = CudaDriver::open(DeviceOrdinal(0));
    match (&probe.refusal, &opened) {
        (None, Ok(driver)) => assert_eq!(driver.device_info().name, probe.devices[0].name),
        (None, Err(error)) => println!("there is a driver, but device 0 did not open: {error}"),
        (Some(refusal), Err(error)) => assert_eq!(refusal, error),
        (Some(refusal), Ok(_)) => panic!("opened what the probe refused: {refusal}"),
    }
}

#[test]
fn it_conforms_and_leaves_nothing() {
    let fake = Fake::new();
    let driver = fake.open().unwrap();
    assert_eq!(driver.device_info().kind, DeviceKind::Cuda);
    assert_eq!(driver.device_info().name, "Fake GPU 0");
    assert_eq!(driver.device_info().granularity, Bytes::mib(2));
    assert_eq!(driver.device_info().driver_version, 12_080);
    assert!(driver.device_info().batch_copies);
    conformance::run(&driver);
    assert!(fake.count("cuMemcpyBatchAsync") > 0);
    drop(driver);
    assert_eq!(fake.alive(), 0);
    assert_eq!(fake.outside_context(), 0, "a call was made outside the context");
}

#[test]
fn a_driver_without_batches_conforms() {
    let fake = Fake::without("batch");
    let driver = fake.open().unwrap();
    assert!(!driver.device_info().batch_copies);
    conformance::run(&driver);
}

#[test]
fn a_missing_function_is_named() {
    let fake = Fake::without("map");
    assert_eq!(fake.open().unwrap_err(), DriverError::SymbolMissing { symbol: "cuMemMap" });
    assert_eq!(fake.probe().refusal, Some(DriverError::SymbolMissing { symbol: "cuMemMap" }));
}

#[test]
fn an_old_driver_is_refused_before_it_is_started() {
    let fake = Fake::new();
    fake.set("version", 11_080);
    assert_eq!(fake.open().unwrap_err(), DriverError::DriverTooOld { found: 11_080, needed: 12_000 });
    assert_eq!(fake.count("cuInit"), 0);
    let probe = fake.probe();
    assert_eq!(probe.driver_version, Some(11_080));
    assert!(probe.to_string().starts_with("CUDA driver 11.8: the CUDA driver is version 11080"), "{probe}");
}

#[test]
fn devices_that_are_not_there_or_cannot_stream_are_refused() {
    let fake = Fake::new();
    fake.set("devices", 2);
    assert_eq!(fake.open_device(2).unwrap_err(), DriverError::NoSuchDevice { asked: 2, count: 2 });
    assert_eq!(fake.probe().devices.len(), 2);
    assert!(fake.probe().usable());
    fake.set("vmm", 0);
    assert!(matches!(fake.open().unwrap_err(), DriverError::Unsupported { .. }));
    assert!(!fake.probe().usable());
    fake.set("devices", 0);
    assert_eq!(fake.open().unwrap_err(), DriverError::NoSuchDevice { asked: 0, count: 0 });
    fake.fail("cuInit", 0, 100);
    assert_eq!(fake.open_device(1).unwrap_err(), DriverError::NoSuchDevice { asked: 1, count: 0 });
    assert_eq!(fake.count("cuDevicePrimaryCtxRetain"), 0, "no context is made for a refused device");
}

#[test]
fn codes_the_bindings_do_not_know_are_numbers() {
    let fake = Fake::new();
    let driver = fake.open().unwrap();
    fake.fail("cuEventCreate", 0, 4242);
    let error = driver.create_event().unwrap_err();
    let expected = DriverError::Call {
        call: "cuEventCreate",
        code: 4242,
        name: "unknown".into(),
        detail: String::new(),
    };
    assert_eq!(error, expected);
    assert_eq!(error.to_string(), "cuEventCreate failed with unknown (4242)");
    fake.fail("cuStreamSynchronize", 0, 700);
    let error = driver.synchronize_stream(StreamHandle::DEFAULT).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cuStreamSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS (700): StreamHandle(0)"
    );
}

#[test]
fn running_out_of_memory_says_what_there_is() {
    let fake = Fake::new();
    let driver = fake.open().unwrap();
    let pages = driver.create_pages(Bytes::mib(8)).unwrap();
    let expected =
        DriverError::OutOfMemory { asked: Bytes::mib(64), free: Bytes::mib(56), total: Bytes::mib(64) };
    assert_eq!(driver.create_pages(Bytes::mib(64)).unwrap_err(), expected);
    fake.fail("cuMemCreate", 0, 2);
    assert!(matches!(driver.create_pages(Bytes::mib(2)), Err(DriverError::OutOfMemory { .. })));
    // SAFETY: made above, released once.
    unsafe { driver.release_pages(pages) }.unwrap();
}

#[test]
fn a_failure_while_opening_gives_the_context_back() {
    let fake = Fake::new();
    fake.fail("cuMemGetAllocationGranularity", 0, 999);
    assert!(matches!(fake.open().unwrap_err(), DriverError::Call { code: 999, .. }));
    assert_eq!(fake.alive(), 0);
}

#[test]
fn the_callers_context_is_left_as_found() {
    let fake = Fake::new();
    let driver = fake.open().unwrap();
    assert_eq!(fake.current_context(), 0);
    driver.memory_info().unwrap();
    assert_eq!(fake.current_context(), 0);
    fake.push_context(77);
    driver.memory_info().unwrap();
    fake.fail("cuMemGetInfo_v2", 0, 999);
    driver.memory_info().unwrap_err();
    assert_eq!(fake.current_context(), 77, "also after a failure");
    // Another user of the primary context on this thread: nothing is pushed at all.
    fake.push_context(0x00C0_FFEE);
    let pushes = fake.count("cuCtxPushCurrent_v2");
    driver.memory_info().unwrap();
    assert_eq!(fake.count("cuCtxPushCurrent_v2"), pushes);
    std::thread::scope(|scope| {
        scope.spawn(|| driver.memory_info().unwrap());
    });
    assert_eq!(fake.outside_context(), 0);
}

/// Submits two copies on a copy stream and says whether they arrived.
fn two_copies(driver: &dyn Driver) -> bool {
    let mapped = Mapped::new(driver, 1, 1);
    let source = HostBuffer::pattern(8192, 3);
    let target = HostBuffer::new(8192);
    let stream = driver.create_stream().unwrap();
    let copies =
        [source.copy_to(0, 4096, mapped.at(0)), source.copy_to(4096, 4096, mapped.at(0).offset(Bytes(4096)))];
    // SAFETY: mapped and alive; waited for.
    unsafe {
        driver.copy_to_device(&copies, stream).unwrap();
        driver.copy_to_host(target.start, mapped.at(0), Bytes(8192), stream).unwrap();
        driver.synchronize_stream(stream).unwrap();
        driver.destroy_stream(stream).unwrap();
    }
    target.bytes() == source.bytes()
}

#[test]
fn a_refused_batch_goes_one_by_one_and_is_given_up_in_the_end() {
    let fake = Fake::new();
    let driver = fake.open().unwrap();
    for code in [801, 1, 1] {
        fake.fail("cuMemcpyBatchAsync", 0, code);
        assert!(two_copies(&driver));
    }
    assert_eq!(fake.count("cuMemcpyBatchAsync"), 3);
    assert!(two_copies(&driver));
    assert_eq!(fake.count("cuMemcpyBatchAsync"), 3, "given up after three refusals");
}

#[test]
fn a_batch_that_fails_otherwise_is_an_error_and_nothing_is_tried_again() {
    let fake = Fake::new();
    let driver = fake.open().unwrap();
    let mapped = Mapped::new(&driver, 1, 1);
    let source = HostBuffer::pattern(4096, 4);
    let stream = driver.create_stream().unwrap();
    let copies =
        [source.copy_to(0, 16, mapped.at(0)), source.copy_to(16, 16, mapped.at(0).offset(Bytes(16)))];
    let singles = fake.count("cuMemcpyHtoDAsync_v2");
    fake.fail("cuMemcpyBatchAsync", 0, 700);
    // SAFETY: mapped and alive.
    let error = unsafe { driver.copy_to_device(&copies, stream) }.unwrap_err();
    assert!(matches!(&error, DriverError::Call { call: "cuMemcpyBatchAsync", code: 700, .. }), "{error}");
    assert_eq!(fake.count("cuMemcpyHtoDAsync_v2"), singles);
    // SAFETY: idle.
    unsafe { driver.destroy_stream(stream) }.unwrap();
}

#[test]
fn capturing_streams_and_default_streams_take_single_copies() {
    let fake = Fake::new();
    let driver = fake.open().unwrap();
    fake.set("capturing", 1);
    assert!(driver.is_capturing(StreamHandle::DEFAULT).unwrap());
    assert!(two_copies(&driver));
    assert_eq!(fake.count("cuMemcpyBatchAsync"), 0);
}

#[test]
fn read_only_registration_needs_the_device_to_have_it() {
    let fake = Fake::new();
    fake.set("read_only", 0);
    let driver = fake.open().unwrap();
    let buffer = HostBuffer::new(4096);
    // SAFETY: whole pages that outlive the registration.
    unsafe {
        let refused = driver.register_host(buffer.start, buffer.size(), Registration::ReadOnly);
        assert!(matches!(refused, Err(DriverError::Unsupported { .. })));
        assert_eq!(fake.count("cuMemHostRegister_v2"), 0);
        driver.register_host(buffer.start, buffer.size(), Registration::ReadWrite).unwrap();
        driver.unregister_host(buffer.start).unwrap();
    }
}

#[test]
fn a_module_is_unloaded_with_the_last_of_its_kernels() {
    let fake = Fake::new();
    let driver: Arc<dyn Driver> = Arc::new(fake.open().unwrap());
    let image = c".version 7.0";
    // SAFETY: the fake takes any text that begins as PTX.
    let module = unsafe { Module::load(driver.clone(), image) }.unwrap();
    let kernel = module.kernel(c"copy_one").unwrap();
    assert!(module.kernel(c"copy_two").is_err());
    drop((module, driver));
    assert_eq!(fake.count("cuModuleUnload"), 0, "the kernel keeps it");
    drop(kernel);
    assert_eq!((fake.count("cuModuleUnload"), fake.alive()), (1, 0));
    assert_eq!(fake.outside_context(), 0, "a call was made outside the context");
}

#[test]
fn a_refused_module_says_what_the_compiler_says() {
    let fake = Fake::new();
    let driver: Arc<dyn Driver> = Arc::new(fake.open().unwrap());
    // SAFETY: terminated text.
    let refused = unsafe { Module::load(driver, c".version 9.2") }.unwrap_err().to_string();
    assert_eq!(
        refused,
        "the driver refused a module of kernels with CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222): Unsupported .version; \
         current version is '8.7'"
    );
}

#[test]
fn a_refused_page_lock_is_reported_by_that_call_alone() {
    let fake = Fake::new();
    let driver = fake.open().unwrap();
    let memory = HostBuffer::pattern(8192, 1);
    fake.fail("cuMemHostRegister_v2", 0, 2);
    let register = || {
        // SAFETY: whole pages of the buffer, which outlives the registration.
        unsafe { driver.register_host(memory.start, Bytes(8192), Registration::ReadWrite) }
    };
    let refused = register().unwrap_err().to_string();
    assert!(refused.starts_with("cuMemHostRegister failed with CUDA_ERROR_OUT_OF_MEMORY (2)"), "{refused}");
    driver.memory_info().unwrap();
    driver.synchronize_stream(StreamHandle::DEFAULT).unwrap();
    register().unwrap();
    // SAFETY: registered above; no copy reads it.
    unsafe { driver.unregister_host(memory.start) }.unwrap();
}
