//! Every verb can be made to fail, at the call that was named and no other.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unsafe_code, reason = "tests drive the unsafe verbs")]

mod conformance;

use std::sync::Arc;

use gpu_driver::{
    Bytes, Driver, DriverError, Faulty, HostDriver, HostOptions, Registration, StreamHandle, Verb,
};

fn faulty() -> Faulty<HostDriver> {
    Faulty::new(Arc::new(HostDriver::new(HostOptions::new(Bytes::mib(64))).unwrap()))
}

#[test]
fn without_faults_it_is_the_driver_behind() {
    let driver = faulty();
    conformance::run(&driver);
    assert!(driver.inner().counters().nothing_alive());
    for verb in Verb::ALL {
        assert!(driver.calls(*verb) > 0, "the conformance suite never calls {verb}");
        assert_eq!(driver.calls(*verb), driver.inner().counters().calls_of(*verb), "{verb}");
    }
}

#[test]
fn the_named_call_fails_and_no_other() {
    let driver = faulty();
    driver.fail(Verb::CreateEvent, 2);
    let made: Vec<_> = (0..4).map(|_| driver.create_event()).collect();
    assert_eq!(made[2], Err(DriverError::Injected { verb: "create_event", index: 2 }));
    assert_eq!(made.iter().filter(|event| event.is_ok()).count(), 3);
    assert_eq!(driver.inner().counters().events_alive, 3);
}

#[test]
fn a_chosen_error_is_given() {
    let driver = faulty();
    let error = DriverError::OutOfMemory { asked: Bytes(1), free: Bytes(0), total: Bytes(1) };
    driver.fail_with(Verb::CreatePages, 0, error.clone());
    assert_eq!(driver.create_pages(Bytes::mib(1)), Err(error));
    assert!(driver.inner().counters().nothing_alive());
}

#[test]
fn a_failed_batch_leaves_its_first_half_submitted() {
    let driver = faulty();
    let mapped = conformance::Mapped::new(&driver, 1, 1);
    let source = conformance::HostBuffer::pattern(4096, 1);
    let copies = [source.copy_to(0, 8, mapped.at(0)), source.copy_to(8, 8, mapped.at(0).offset(Bytes(8)))];
    driver.fail(Verb::CopyToDevice, 0);
    // SAFETY: mapped and alive; the compute stream runs at once.
    let failed = unsafe { driver.copy_to_device(&copies, StreamHandle::DEFAULT) };
    assert_eq!(failed, Err(DriverError::Injected { verb: "copy_to_device", index: 0 }));
    assert_eq!(driver.inner().counters().bytes_to_device, Bytes(8));
}

#[test]
fn calls_are_recorded_in_order_until_reset() {
    let driver = faulty();
    let event = driver.create_event().unwrap();
    driver.record();
    driver.record_event(event, StreamHandle::DEFAULT).unwrap();
    driver.fail(Verb::QueryEvent, 0);
    driver.query_event(event).unwrap_err();
    assert_eq!(driver.recorded(), [Verb::RecordEvent, Verb::QueryEvent]);
    driver.reset();
    assert!(driver.recorded().is_empty());
    assert_eq!(driver.calls(Verb::RecordEvent), 0);
    assert!(driver.query_event(event).unwrap());
}

#[test]
fn an_error_that_stays_is_reported_by_the_next_call_and_then_gone() {
    let driver = faulty();
    let error = DriverError::Injected { verb: "create_event", index: 7 };
    driver.fail_pending(Verb::CreateEvent, 0, error.clone());
    assert_eq!(driver.create_event(), Err(error.clone()));
    assert!(driver.is_pending());
    assert_eq!(driver.create_stream(), Err(error), "an innocent call reports it");
    assert!(!driver.is_pending());
    driver.memory_info().unwrap();
    assert!(driver.inner().counters().nothing_alive());
}

#[test]
fn registrations_above_a_size_are_refused() {
    let driver = faulty();
    let memory = conformance::HostBuffer::pattern(4 << 12, 1);
    driver.refuse_registrations_above(Bytes(2 << 12));
    for (pages, taken) in [(3, false), (2, true)] {
        // SAFETY: whole pages of the buffer, which outlives the registration.
        let registered =
            unsafe { driver.register_host(memory.start, Bytes(pages << 12), Registration::ReadWrite) };
        assert_eq!(registered.is_ok(), taken, "{registered:?}");
    }
    // SAFETY: registered above; no copy reads it.
    unsafe { driver.unregister_host(memory.start) }.unwrap();
}
