//! Who shares a ring, what is cancelled, and what is left when users go.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_driver::{Bytes, CopyOrder, Faulty, HostDriver};
use pinned_pool::HostError;

use super::rig::{Device, Model, Place, Rig, Rng, device, small_ring};

fn rig(device: &Arc<Device>, seed: u64, size: u64) -> Rig {
    let mut rng = Rng::new(seed);
    let model = Model::new(device, &mut rng, &[(size, Place::Memory), (size / 2, Place::File)]);
    Rig::new(device, model, &small_ring(), false).unwrap()
}

/// What takes a moment: threads that were told to end do so by themselves.
fn eventually(what: &str, test: impl Fn() -> bool) {
    let begun = Instant::now();
    while !test() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what} did not come about");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn registrations(host: &HostDriver) -> u64 {
    host.counters().registrations_alive
}

#[test]
fn all_users_of_a_device_share_one_ring_and_the_last_ends_it() {
    let (host, device) = device(CopyOrder::Random, 1);
    let first = rig(&device, 1, 100_000);
    let only = registrations(&host);
    let second = rig(&device, 2, 100_000);
    assert_eq!(registrations(&host), only, "the ring is page-locked once");
    assert!(first.run().unwrap() && second.run().unwrap());
    assert_eq!(first.line.report().staged, second.line.report().staged);
    first.close().unwrap();
    assert_eq!(registrations(&host), only);
    assert!(second.run().unwrap());
    second.close().unwrap();
    assert_eq!(registrations(&host), 0, "closing gives the memory back before it returns");
    // And it begins anew.
    let third = rig(&device, 3, 100_000);
    assert!(third.run().unwrap());
    third.close().unwrap();
    drop(device);
    assert!(host.counters().nothing_alive());
}

/// As two libraries of a process open a GPU: each has a driver, and streams and events of one are good for the other.
#[test]
fn two_drivers_of_a_device_share_its_ring() {
    let (host, one) = device(CopyOrder::Random, 6);
    let two = Arc::new(Faulty::new(Arc::clone(&host)));
    let first = rig(&one, 1, 100_000);
    let only = registrations(&host);
    let second = rig(&two, 2, 200_000);
    assert_eq!(registrations(&host), only, "the ring is page-locked once");
    for _ in 0..3 {
        assert!(first.run().unwrap() && second.run().unwrap());
    }
    assert_eq!(first.line.report().staged, second.line.report().staged);
    // The driver that the ring was made with may go before the others.
    first.close().unwrap();
    drop(one);
    assert!(second.run().unwrap());
    second.close().unwrap();
    drop(two);
    assert_eq!(registrations(&host), 0);
    assert!(host.counters().nothing_alive());
}

#[test]
fn devices_have_rings_of_their_own() {
    let ((host, one), (other_host, two)) = (device(CopyOrder::Eager, 1), device(CopyOrder::Lazy, 2));
    let (first, second) = (rig(&one, 1, 100_000), rig(&two, 2, 100_000));
    assert!(first.run().unwrap() && second.run().unwrap());
    assert_eq!((registrations(&host), registrations(&other_host)), (1, 1));
    let foreign = second.job();
    assert!(matches!(first.line.submit(foreign), Err(HostError::ForeignDevice { .. })));
    first.close().unwrap();
    second.close().unwrap();
}

#[test]
fn what_is_cancelled_is_an_error_and_what_follows_is_right() {
    for seed in 0..30 {
        let (_host, device) = device(CopyOrder::Random, seed);
        let rig = rig(&device, seed, 400_000);
        let tickets: Vec<_> = (0..4).map(|_| rig.line.submit(rig.job()).unwrap()).collect();
        if seed % 2 == 0 {
            rig.line.wait_submitted(tickets[0]).unwrap();
        }
        rig.line.cancel().unwrap();
        assert!(rig.line.is_clear());
        rig.stream.drain().unwrap();
        assert!(rig.run().unwrap());
        rig.close().unwrap();
    }
}

#[test]
fn dropped_without_closing_a_ring_ends_by_itself() {
    let (host, device) = device(CopyOrder::Random, 3);
    let rig = rig(&device, 3, 300_000);
    for _ in 0..3 {
        rig.line.submit(rig.job()).unwrap();
    }
    let Rig { line, stream, space, copy, copied, model } = rig;
    drop((line, copy, copied, model));
    eventually("the end of the ring", || {
        stream.drain().unwrap();
        registrations(&host) == 0
    });
    drop((stream, space, device));
    eventually("the end of everything", || host.counters().nothing_alive());
}

#[test]
fn a_closed_line_refuses_and_closing_twice_is_no_error() {
    let (_host, device) = device(CopyOrder::Eager, 4);
    let mut rig = rig(&device, 4, 100_000);
    let ticket = rig.line.submit(rig.job()).unwrap();
    rig.line.wait_submitted(ticket).unwrap();
    rig.line.close().unwrap();
    rig.line.close().unwrap();
    assert!(matches!(rig.line.submit(rig.job()), Err(HostError::StagingStopped)));
    assert!(matches!(rig.line.wait_submitted(ticket), Err(HostError::StagingStopped)));
    assert_eq!(rig.line.report().locked, Bytes::ZERO);
    rig.stream.drain().unwrap();
}

/// A job with nothing to stage, and one with nothing at all, are submitted in their turn.
#[test]
fn jobs_without_chunks_keep_their_turn() {
    let (_host, device) = device(CopyOrder::Lazy, 5);
    let mut rng = Rng::new(5);
    let model = Model::new(&device, &mut rng, &[(100_000, Place::Locked)]);
    let rig = Rig::new(&device, model, &small_ring(), false).unwrap();
    assert_eq!((rig.copy.staged_bytes(), rig.copy.bytes()), (Bytes::ZERO, Bytes(100_000)));
    let nothing = rig.line.submit(pinned_pool::StagedJob::default()).unwrap();
    assert!(rig.run().unwrap());
    rig.line.wait_submitted(nothing).unwrap();
    rig.close().unwrap();
}
