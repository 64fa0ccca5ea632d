//! Transfer streams: order against events, what copies in flight keep alive, refusals, and drop.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::{PAGE, Part, Region, Rig, small_options};
use gpu_driver::{Access, Bytes, CopyOrder, StreamHandle, Verb};
use pinned_pool::{Event, HostBytes, HostError, HostRun, HostStore, PreparedCopy, TransferStream};
use rustix::mm::MapFlags;
use vmm_alloc::{PagePool, VmmError};

const ORDERS: [CopyOrder; 3] = [CopyOrder::Eager, CopyOrder::Lazy, CopyOrder::Random];

fn run_of(value: u8, offset: u64, size: usize) -> (Arc<Vec<u8>>, HostRun) {
    let bytes = Arc::new(vec![value; size]);
    let run = HostRun::new(offset, HostBytes::of(&bytes));
    (bytes, run)
}

/// What the compute stream, this thread, sees on the emulator.
#[allow(unsafe_code, reason = "emulated device memory is memory of this process")]
fn seen(space: &vmm_alloc::AddressSpace, offset: u64, size: u64) -> Vec<u8> {
    let address = space.writable(offset, Bytes(size)).unwrap();
    let at = |index: u64| (address.0 + index) as *const u8;
    // SAFETY: mapped and open, as `writable` says.
    (0..size).map(|index| unsafe { at(index).read_volatile() }).collect()
}

#[test]
fn compute_that_waits_for_the_event_sees_the_copy_in_every_order() {
    for order in ORDERS {
        let rig = Rig::new(order, 3);
        let (space, stream) = (rig.space(8 * PAGE), rig.stream());
        let copied = Event::new(Arc::clone(&rig.driver)).unwrap();
        let runs = [(7, 0), (8, 5000)].map(|(value, offset)| run_of(value, offset, 5000).1);
        stream.fill(&space, 0, Bytes(8 * PAGE), 0xFF).unwrap();
        stream.copy(&space, &runs).unwrap();
        stream.record(&copied).unwrap();
        copied.hold(StreamHandle::DEFAULT).unwrap();
        assert!(copied.is_reached().unwrap());
        let device = seen(&space, 0, 8 * PAGE);
        assert!(device[..5000].iter().all(|&byte| byte == 7));
        assert!(device[5000..10_000].iter().all(|&byte| byte == 8));
        assert!(device[10_000..].iter().all(|&byte| byte == 0xFF));
        stream.drain().unwrap();
        drop((stream, copied, space));
        assert!(rig.host.counters().nothing_alive());
    }
}

#[test]
fn a_copy_that_waits_for_an_event_of_another_stream_comes_after_it() {
    let rig = Rig::new(CopyOrder::Random, 5);
    let (space, one, two) = (rig.space(PAGE), rig.stream(), rig.stream());
    let event = Event::new(Arc::clone(&rig.driver)).unwrap();
    one.copy(&space, &[run_of(1, 0, 4096).1]).unwrap();
    one.record(&event).unwrap();
    two.wait(&event).unwrap();
    two.copy(&space, &[run_of(2, 0, 4096).1]).unwrap();
    two.drain().unwrap();
    assert!(seen(&space, 0, PAGE).iter().all(|&byte| byte == 2));
    one.drain().unwrap();
    event.synchronize().unwrap();
}

#[test]
fn a_prepared_copy_is_one_driver_call_and_can_be_submitted_again() {
    let rig = Rig::eager();
    let (space, stream) = (rig.space(8 * PAGE), rig.stream());
    let runs: Vec<HostRun> = (0..5).map(|index| run_of(index, u64::from(index) * 1000, 999).1).collect();
    let copy = PreparedCopy::new(&space, &runs).unwrap();
    assert_eq!((copy.bytes(), copy.pieces()), (Bytes(5 * 999), 5));
    for _ in 0..3 {
        stream.enqueue(&copy).unwrap();
    }
    assert_eq!(rig.faulty.calls(Verb::CopyToDevice), 3);
    assert_eq!(Arc::strong_count(&copy), 2, "held once, however often it is in flight");
    stream.drain().unwrap();
    assert_eq!(Arc::strong_count(&copy), 1);

    let nothing = PreparedCopy::new(&space, &[run_of(0, 0, 0).1]).unwrap();
    stream.enqueue(&nothing).unwrap();
    assert_eq!((nothing.pieces(), rig.faulty.calls(Verb::CopyToDevice)), (0, 3));
}

#[test]
fn copies_in_flight_keep_sources_and_range_alive() {
    let rig = Rig::new(CopyOrder::Lazy, 0);
    let (space, stream) = (rig.space(PAGE), rig.stream());
    let (bytes, run) = run_of(3, 0, 100);
    let lease = Arc::downgrade(&space);
    stream.copy(&space, &[run]).unwrap();
    drop(space);
    assert_eq!((Arc::strong_count(&bytes), lease.strong_count()), (2, 1));
    assert!(!stream.is_idle().unwrap());
    stream.drain().unwrap();
    assert_eq!((Arc::strong_count(&bytes), lease.strong_count()), (1, 0));
    assert!(stream.is_idle().unwrap());
}

#[test]
fn an_undrained_stream_is_leaked_with_all_it_holds_and_never_blocks() {
    let rig = Rig::new(CopyOrder::Lazy, 0);
    let (space, stream) = (rig.space(PAGE), rig.stream());
    let (bytes, run) = run_of(3, 0, 100);
    stream.copy(&space, &[run]).unwrap();
    drop(stream);
    assert_eq!(rig.faulty.calls(Verb::SynchronizeStream), 0);
    assert_eq!((Arc::strong_count(&bytes), Arc::strong_count(&space)), (2, 2));
    assert_eq!(rig.host.counters().streams_alive, 1);
}

#[test]
fn a_stream_that_ran_dry_may_be_dropped_undrained() {
    let rig = Rig::eager();
    let (space, stream) = (rig.space(PAGE), rig.stream());
    let (bytes, run) = run_of(3, 0, 100);
    stream.copy(&space, &[run]).unwrap();
    while !stream.is_idle().unwrap() {
        std::thread::yield_now();
    }
    drop(stream);
    assert_eq!((Arc::strong_count(&bytes), Arc::strong_count(&space)), (1, 1));
    drop(space);
    assert!(rig.host.counters().nothing_alive());
}

#[test]
fn a_store_dropped_during_a_copy_stays_registered_until_the_drain() {
    let rig = Rig::new(CopyOrder::Lazy, 0);
    let (space, stream) = (rig.space(16 * PAGE), rig.stream());
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(16 * PAGE), small_options());
    let parts = [Part::whole(Region::anonymous(4, 1)), Part::whole(Region::file(1, 2, MapFlags::PRIVATE))];
    builder.place(&[parts[0].source(0, 0), parts[1].source(1, 8 * PAGE)]).unwrap();
    let store = builder.finish().unwrap();
    stream.copy(&space, &store.runs(0..16 * PAGE)).unwrap();
    let expected = parts[0].expected();
    drop((parts, store));
    assert_eq!(rig.host.counters().registrations_alive, 2);
    stream.drain().unwrap();
    assert_eq!(rig.host.counters().registrations_alive, 0);
    assert_eq!(seen(&space, 0, 4 * PAGE), expected);
}

#[test]
fn targets_are_checked_before_anything_is_submitted_and_again_after_a_remap() {
    let rig = Rig::eager();
    let granule = Bytes::kib(64);
    let (space, stream) = (rig.space(3 * granule.0), rig.stream());
    let copy = PreparedCopy::new(&space, &[run_of(1, 0, 3 << 16).1]).unwrap();
    stream.enqueue(&copy).unwrap();
    stream.drain().unwrap();
    let page = space.page(1).unwrap();
    space.unmap(1, 1).unwrap();
    let refused = stream.enqueue(&copy).unwrap_err();
    assert_eq!(refused, HostError::Space(VmmError::Unmapped { granule: 1 }));
    space.map(1, &[page]).unwrap();
    stream.enqueue(&copy).unwrap();
    stream.drain().unwrap();
    space.set_access(2, 1, Access::None).unwrap();
    assert_eq!(stream.enqueue(&copy).unwrap_err(), HostError::Space(VmmError::Guarded { granule: 2 }));
    let filled = stream.fill(&space, granule.0, granule + Bytes(1), 0);
    assert_eq!(filled.unwrap_err(), HostError::Space(VmmError::Guarded { granule: 2 }));
    assert!(stream.read_back(&space, 2 * granule.0, &mut [0; 4]).is_err());
    assert_eq!((rig.faulty.calls(Verb::CopyToDevice), rig.faulty.calls(Verb::Fill)), (2, 0));

    let beyond = PreparedCopy::new(&space, &[run_of(1, 3 * granule.0 - 1, 2).1]).unwrap_err();
    assert!(matches!(beyond, HostError::Space(VmmError::OutOfBounds { .. })), "{beyond}");
}

#[test]
fn ranges_and_events_of_another_device_are_refused() {
    let (rig, other) = (Rig::eager(), Rig::eager());
    let (space, stream) = (other.space(PAGE), rig.stream());
    let event = Event::new(Arc::clone(&other.driver)).unwrap();
    let results = [
        stream.copy(&space, &[run_of(1, 0, 1).1]),
        stream.fill(&space, 0, Bytes(1), 0),
        stream.read_back(&space, 0, &mut [0]),
        stream.wait(&event),
        stream.record(&event),
    ];
    for result in results {
        assert!(matches!(result, Err(HostError::ForeignDevice { .. })), "{result:?}");
    }
}

#[test]
fn bytes_come_back_over_several_buffers() {
    let rig = Rig::new(CopyOrder::Random, 9);
    // The buffer is 16 MiB.
    let size = (17 << 20) + 123;
    let (space, stream) = (rig.space(size), rig.stream());
    let bytes: Arc<Vec<u8>> = Arc::new((0..size - 1).map(|at| common::pattern(1, at)).collect());
    stream.copy(&space, &[HostRun::new(1, HostBytes::of(&bytes))]).unwrap();
    let mut back = vec![0; bytes.len()];
    stream.read_back(&space, 1, &mut back).unwrap();
    assert!(back == **bytes);
    stream.read_back(&space, 0, &mut []).unwrap();
    let pending = stream.begin_read(&space, 1, Bytes(1000)).unwrap();
    assert_eq!(pending.finish().unwrap(), bytes[..1000]);
    stream.drain().unwrap();
}

#[test]
fn a_failed_drain_holds_on_to_everything() {
    let rig = Rig::eager();
    let (space, stream) = (rig.space(PAGE), rig.stream());
    let (bytes, run) = run_of(3, 0, 100);
    stream.copy(&space, &[run]).unwrap();
    stream.fill(&space, 200, Bytes(1), 0).unwrap();
    rig.fail_ahead(Verb::SynchronizeStream, &[0]);
    stream.drain().unwrap_err();
    assert_eq!((Arc::strong_count(&bytes), Arc::strong_count(&space)), (2, 3));
    stream.drain().unwrap();
    assert_eq!((Arc::strong_count(&bytes), Arc::strong_count(&space)), (1, 1));
}

#[test]
fn a_batch_that_failed_half_way_is_held_like_any_other() {
    let rig = Rig::new(CopyOrder::Lazy, 0);
    let (space, stream) = (rig.space(PAGE), rig.stream());
    let (sources, runs): (Vec<_>, Vec<_>) = (0..4u64).map(|index| run_of(5, index * 10, 10)).unzip();
    rig.fail_ahead(Verb::CopyToDevice, &[0]);
    stream.copy(&space, &runs).unwrap_err();
    drop(runs);
    assert!(sources.iter().all(|source| Arc::strong_count(source) == 2), "some of it was submitted");
    stream.drain().unwrap();
    assert!(sources.iter().all(|source| Arc::strong_count(source) == 1));
}

/// A small life of a stream; every error is passed on.
fn life(rig: &Rig) -> Result<(), HostError> {
    let pool = PagePool::new(Arc::clone(&rig.driver), Bytes::kib(64), Bytes::kib(128))?;
    let space = vmm_alloc::AddressSpace::reserve(Arc::clone(&rig.driver), Bytes::kib(64), 2)?;
    space.map(0, &pool.take(2)?)?;
    let stream = TransferStream::new(Arc::clone(&rig.driver))?;
    let outcome = (|| {
        let event = Event::new(Arc::clone(&rig.driver))?;
        let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(8 * PAGE), small_options());
        let parts =
            [Part::whole(Region::anonymous(3, 1)), Part::whole(Region::file(1, 2, MapFlags::PRIVATE))];
        builder.place(&[parts[0].source(0, 0), parts[1].source(1, 4 * PAGE)])?;
        let store = builder.finish().unwrap();
        stream.fill(&space, 0, space.size(), 0xFF)?;
        stream.wait(&event)?;
        stream.copy(&space, &store.runs(0..8 * PAGE))?;
        stream.record(&event)?;
        event.hold(StreamHandle::DEFAULT)?;
        let mut back = vec![0; 5 * PAGE as usize];
        stream.read_back(&space, 0, &mut back)?;
        assert_eq!(back[..3 * PAGE as usize], parts[0].expected());
        assert_eq!(back[4 * PAGE as usize..], parts[1].expected());
        let pending = stream.begin_read(&space, 0, Bytes(10))?;
        assert_eq!(pending.finish()?, parts[0].expected()[..10]);
        Ok(())
    })();
    // Whatever happened, a drain that works lets everything go.
    stream.drain().or_else(|_| stream.drain())?;
    outcome
}

#[test]
fn any_single_refusal_is_an_error_or_a_step_down_and_the_next_life_is_right() {
    let rig = Rig::eager();
    life(&rig).unwrap();
    assert!(rig.host.counters().nothing_alive());
    let calls: Vec<(Verb, u64)> = Verb::ALL.iter().map(|&verb| (verb, rig.faulty.calls(verb))).collect();
    for (verb, calls) in calls {
        for index in 0..calls {
            rig.faulty.reset();
            rig.faulty.fail(verb, index);
            let outcome = life(&rig);
            let survives = [
                Verb::RegisterHost,
                Verb::UnregisterHost,
                Verb::UnmapPages,
                Verb::FreeAddress,
                Verb::ReleasePages,
                Verb::DestroyEvent,
                Verb::DestroyStream,
            ];
            // Asking whether a stream is idle at drop, and draining twice, need not fail the life either.
            let may_survive = [Verb::SynchronizeStream, Verb::RecordEvent, Verb::QueryEvent];
            if survives.contains(&verb) {
                assert!(outcome.is_ok(), "{verb} call {index}: {outcome:?}");
            } else if !may_survive.contains(&verb) {
                assert!(outcome.is_err(), "{verb} call {index}");
            }
            assert!(rig.host.counters().nothing_alive(), "{verb} call {index}: {:?}", rig.host.counters());
        }
    }
    rig.faulty.reset();
    life(&rig).unwrap();
}
