//! Streams and events: order, marks that stay where they were, and waits across streams.

use gpu_driver::{Bytes, Driver, StreamHandle};

use super::Check;
use super::rig::{HostBuffer, Mapped, download};

pub(crate) const CHECKS: &[Check] = &[
    ("a_new_event_is_complete", a_new_event_is_complete),
    ("a_stream_is_in_order", a_stream_is_in_order),
    ("an_event_covers_what_came_before", an_event_covers_what_came_before),
    ("a_wait_keeps_its_mark", a_wait_keeps_its_mark),
    ("a_chain_over_three_streams", a_chain_over_three_streams),
    ("timers_keep_the_order_of_a_stream", timers_keep_the_order_of_a_stream),
    ("polling_ends", polling_ends),
    ("nobody_captures", nobody_captures),
    ("many_streams_and_events", many_streams_and_events),
];

fn a_new_event_is_complete(driver: &dyn Driver) {
    let event = driver.create_event().unwrap();
    assert!(driver.query_event(event).unwrap());
    driver.synchronize_event(event).unwrap();
    let stream = driver.create_stream().unwrap();
    driver.wait_event(stream, event).unwrap();
    driver.wait_event(StreamHandle::DEFAULT, event).unwrap();
    driver.synchronize_stream(stream).unwrap();
    driver.record_event(event, StreamHandle::DEFAULT).unwrap();
    driver.synchronize_event(event).unwrap();
    // SAFETY: idle, destroyed once.
    unsafe {
        driver.destroy_stream(stream).unwrap();
        driver.destroy_event(event).unwrap();
    }
}

fn a_stream_is_in_order(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 1, 1);
    let stream = driver.create_stream().unwrap();
    for value in 0..20 {
        // SAFETY: mapped, waited for below.
        unsafe { driver.fill(mapped.at(0), mapped.size, value, stream) }.unwrap();
    }
    driver.synchronize_stream(stream).unwrap();
    assert!(download(driver, mapped.at(0), mapped.size).iter().all(|byte| *byte == 19));
    // SAFETY: idle.
    unsafe { driver.destroy_stream(stream) }.unwrap();
}

fn an_event_covers_what_came_before(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 4, 1);
    let stream = driver.create_stream().unwrap();
    let event = driver.create_event().unwrap();
    let source = HostBuffer::pattern(mapped.size.as_usize(), 21);
    // SAFETY: mapped, alive, waited for below.
    unsafe { driver.copy_to_device(&[source.copy_to(0, mapped.size.0, mapped.at(0))], stream) }.unwrap();
    driver.record_event(event, stream).unwrap();
    driver.wait_event(StreamHandle::DEFAULT, event).unwrap();
    assert!(download(driver, mapped.at(0), mapped.size) == source.bytes(), "read before the copy was done");
    assert!(driver.query_event(event).unwrap());
    // SAFETY: idle.
    unsafe {
        driver.destroy_stream(stream).unwrap();
        driver.destroy_event(event).unwrap();
    }
}

/// The time from a record to a later one of the same stream is not negative, backwards it is the same with its sign
/// turned; events that keep no time, and timers never recorded, are refused.
fn timers_keep_the_order_of_a_stream(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 4, 1);
    let stream = driver.create_stream().unwrap();
    let timers = [driver.create_timer().unwrap(), driver.create_timer().unwrap()];
    let plain = driver.create_event().unwrap();
    driver.elapsed(timers[0], timers[1]).unwrap_err();
    for on in [stream, StreamHandle::DEFAULT] {
        driver.record_event(timers[0], on).unwrap();
        // SAFETY: mapped, waited for below.
        unsafe { driver.fill(mapped.at(0), mapped.size, 3, stream) }.unwrap();
        driver.record_event(timers[1], on).unwrap();
        driver.synchronize_stream(stream).unwrap();
        for timer in timers {
            driver.synchronize_event(timer).unwrap();
        }
        let forward = driver.elapsed(timers[0], timers[1]).unwrap().unwrap();
        let backward = driver.elapsed(timers[1], timers[0]).unwrap().unwrap();
        assert!((0.0..60.0).contains(&forward) && (forward + backward).abs() < 1e-6, "{forward} {backward}");
    }
    driver.record_event(plain, stream).unwrap();
    driver.elapsed(timers[0], plain).unwrap_err();
    driver.synchronize_stream(stream).unwrap();
    // SAFETY: idle, destroyed once.
    unsafe {
        driver.destroy_stream(stream).unwrap();
        for event in [timers[0], timers[1], plain] {
            driver.destroy_event(event).unwrap();
        }
    }
}

/// A wait submitted between two records of one event means the first.
fn a_wait_keeps_its_mark(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 1, 1);
    let streams = [driver.create_stream().unwrap(), driver.create_stream().unwrap()];
    let event = driver.create_event().unwrap();
    // SAFETY: mapped; the two streams write one range only in the order of the events.
    unsafe {
        driver.fill(mapped.at(0), mapped.size, 1, streams[0]).unwrap();
        driver.record_event(event, streams[0]).unwrap();
        driver.wait_event(streams[1], event).unwrap();
        driver.fill(mapped.at(0), mapped.size, 2, streams[1]).unwrap();
        driver.record_event(event, streams[1]).unwrap();
        // The same event again, now meaning the second stream: no cycle, as the wait above keeps its mark.
        driver.wait_event(streams[0], event).unwrap();
        driver.fill(mapped.at(0), Bytes(8), 3, streams[0]).unwrap();
    }
    driver.synchronize_stream(streams[0]).unwrap();
    let back = download(driver, mapped.at(0), Bytes(16));
    assert_eq!(back[..8], [3; 8]);
    assert_eq!(back[8..], [2; 8]);
    // SAFETY: the first stream waited for the second, so both are idle.
    unsafe {
        for stream in streams {
            driver.synchronize_stream(stream).unwrap();
            driver.destroy_stream(stream).unwrap();
        }
        driver.destroy_event(event).unwrap();
    }
}

fn a_chain_over_three_streams(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 2, 1);
    let streams: Vec<_> = (0..3).map(|_| driver.create_stream().unwrap()).collect();
    let events: Vec<_> = (0..3).map(|_| driver.create_event().unwrap()).collect();
    let source = HostBuffer::pattern(mapped.size.as_usize(), 22);
    let target = HostBuffer::new(mapped.size.as_usize());
    // SAFETY: mapped and alive; ordered by events; waited for below.
    unsafe {
        driver.fill(mapped.at(0), mapped.size, 0xEE, streams[0]).unwrap();
        driver.record_event(events[0], streams[0]).unwrap();
        driver.wait_event(streams[1], events[0]).unwrap();
        driver.copy_to_device(&[source.copy_to(0, mapped.size.0, mapped.at(0))], streams[1]).unwrap();
        driver.record_event(events[1], streams[1]).unwrap();
        driver.wait_event(streams[2], events[1]).unwrap();
        driver.copy_to_host(target.start, mapped.at(0), mapped.size, streams[2]).unwrap();
        driver.record_event(events[2], streams[2]).unwrap();
    }
    driver.synchronize_event(events[2]).unwrap();
    assert!(target.bytes() == source.bytes());
    for event in &events {
        assert!(driver.query_event(*event).unwrap(), "the last event implies the others");
    }
    // SAFETY: idle.
    unsafe {
        for stream in streams {
            driver.synchronize_stream(stream).unwrap();
            driver.destroy_stream(stream).unwrap();
        }
        for event in events {
            driver.destroy_event(event).unwrap();
        }
    }
}

/// A loop that polls an event comes to an end, whoever else waits or not.
fn polling_ends(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 1, 1);
    let stream = driver.create_stream().unwrap();
    let event = driver.create_event().unwrap();
    // SAFETY: mapped, waited for by polling.
    unsafe { driver.fill(mapped.at(0), mapped.size, 9, stream) }.unwrap();
    driver.record_event(event, stream).unwrap();
    while !driver.query_event(event).unwrap() {
        std::thread::yield_now();
    }
    assert_eq!(download(driver, mapped.at(0), Bytes(4)), [9; 4]);
    // SAFETY: idle.
    unsafe {
        driver.synchronize_stream(stream).unwrap();
        driver.destroy_stream(stream).unwrap();
        driver.destroy_event(event).unwrap();
    }
}

fn nobody_captures(driver: &dyn Driver) {
    let stream = driver.create_stream().unwrap();
    assert!(!driver.is_capturing(stream).unwrap());
    assert!(!driver.is_capturing(StreamHandle::DEFAULT).unwrap());
    // SAFETY: idle.
    unsafe { driver.destroy_stream(stream) }.unwrap();
}

fn many_streams_and_events(driver: &dyn Driver) {
    let streams: Vec<_> = (0..8).map(|_| driver.create_stream().unwrap()).collect();
    let events: Vec<_> = (0..256).map(|_| driver.create_event().unwrap()).collect();
    for (index, event) in events.iter().enumerate() {
        driver.record_event(*event, streams[index % streams.len()]).unwrap();
        driver.wait_event(streams[(index + 1) % streams.len()], *event).unwrap();
    }
    for stream in &streams {
        driver.synchronize_stream(*stream).unwrap();
    }
    // SAFETY: idle.
    unsafe {
        for event in events {
            driver.destroy_event(event).unwrap();
        }
        for stream in streams {
            driver.destroy_stream(stream).unwrap();
        }
    }
}
