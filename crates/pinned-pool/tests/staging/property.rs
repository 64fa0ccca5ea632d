//! Random models, rings, places and copy orders: every byte arrives, whatever passed through the ring before it.

use gpu_driver::{Bytes, CopyOrder, Verb};
use pinned_pool::StagingOptions;

use super::rig::{Model, Place, Rig, Rng, device};

const ORDERS: [CopyOrder; 3] = [CopyOrder::Eager, CopyOrder::Lazy, CopyOrder::Random];

fn sizes(rng: &mut Rng) -> Vec<(u64, Place)> {
    let places = [Place::Memory, Place::File, Place::File, Place::Locked];
    let size = |rng: &mut Rng| match rng.below(4) {
        0 => rng.below(3000),
        1 => rng.below(400_000),
        _ => rng.below(90_000),
    };
    let mut sizes: Vec<_> = (0..=rng.below(9)).map(|_| (size(rng), places[rng.below(4) as usize])).collect();
    sizes.push((1, Place::Memory));
    sizes
}

#[test]
fn every_byte_arrives_from_wherever_it_is() {
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let order = ORDERS[rng.below(3) as usize];
        let (host, device) = device(order, seed);
        let chunk = 4096 * (1 + rng.below(24));
        let options = StagingOptions {
            chunk: Some(Bytes(chunk)),
            bytes: Some(Bytes(chunk * (2 + rng.below(5)))),
            threads: Some(1 + rng.below(4) as usize),
            ..StagingOptions::default()
        };
        let count = 1 + rng.below(3);
        let rigs: Vec<Rig> = (0..count)
            .map(|_| {
                let sizes = sizes(&mut rng);
                let model = Model::new(&device, &mut rng, &sizes);
                Rig::new(&device, model, &options, rng.below(2) == 0).unwrap()
            })
            .collect();
        for round in 0..3 {
            // All at once, then each is looked at: they share the ring, and none sees another's bytes.
            let tickets: Vec<_> = rigs.iter().map(|rig| rig.line.submit(rig.job()).unwrap()).collect();
            for (rig, ticket) in rigs.iter().zip(tickets) {
                rig.line.wait_submitted(ticket).unwrap();
                assert!(rig.arrived().unwrap(), "seed {seed}, round {round}, {order:?}");
            }
        }
        let staged: u64 = rigs.iter().map(|rig| rig.copy.staged_bytes().0 * 3).sum();
        let report = rigs[0].line.report();
        assert!(report.staged.0 >= staged, "padding aside, what was staged was counted");
        assert_eq!(report.locked.0, report.chunk.0 * u64::from(report.chunks));
        for rig in rigs {
            rig.close().unwrap();
        }
        drop(device);
        assert!(host.counters().nothing_alive(), "seed {seed}: {:?}", host.counters());
    }
}

/// Many jobs are given before the first is waited for, to a ring of two chunks.
#[test]
fn jobs_given_ahead_keep_their_order() {
    for (seed, order) in (0..).zip(ORDERS) {
        let (host, device) = device(order, seed);
        let mut rng = Rng::new(seed);
        let model = Model::new(&device, &mut rng, &[(300_000, Place::Memory), (200_000, Place::File)]);
        let options = StagingOptions { bytes: Some(Bytes::kib(128)), ..super::rig::small_ring() };
        let rig = Rig::new(&device, model, &options, false).unwrap();
        // Each wipes what the one before copied.
        let tickets: Vec<_> = (0..6).map(|_| rig.line.submit(rig.job()).unwrap()).collect();
        let last = tickets[tickets.len() - 1];
        rig.line.wait_submitted(last).unwrap();
        assert!(rig.line.is_clear());
        assert!(rig.arrived().unwrap());
        assert_eq!(host.counters().calls_of(Verb::Fill), 6);
        rig.close().unwrap();
    }
}
