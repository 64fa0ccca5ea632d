//! Shared RAM by examples, and compared with trying everything.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn model(pinning: Pinning, each_step: &[u64], preloaded: &[u64], rest: u64) -> ReserveModel {
    let block = |used| move |&bytes: &u64| ReserveBlock { bytes: Bytes(bytes), used };
    let blocks = each_step.iter().map(block(BlockUse::EachStep));
    let blocks = blocks.chain(preloaded.iter().map(block(BlockUse::Preloaded))).collect();
    ReserveModel { pinning, blocks, rest: Bytes(rest) }
}

fn locked(plan: &ReservePlan, model: usize) -> String {
    let blocks = plan.models[model].blocks.iter().map(|&locked| if locked { '#' } else { '.' });
    blocks.chain([if plan.models[model].rest { '+' } else { '-' }]).collect()
}

#[test]
fn what_fits_is_locked_whole_and_needs_no_ring() {
    let plan = ReservePlan::new(&[model(Pinning::Whole, &[10; 4], &[10; 2], 5)], Bytes(65), Bytes(30));
    assert_eq!((locked(&plan, 0).as_str(), plan.ring, plan.reserved), ("######+", Bytes(0), Bytes(65)));
}

#[test]
fn blocks_of_each_step_come_first_and_are_spread() {
    let models = [model(Pinning::Whole, &[10; 8], &[10; 2], 5)];
    let at = |left| ReservePlan::new(&models, Bytes(left), Bytes(20));
    assert_eq!(locked(&at(60), 0), ".#.#.#.#..-", "the ring's 20 are taken first");
    assert_eq!(at(60).ring, Bytes(20));
    // With a small ring: all of each step, one of the preloaded ones, and the rest if that still fits.
    let small = |left| ReservePlan::new(&models, Bytes(left), Bytes(3));
    assert_eq!(locked(&small(98), 0), "########.#+", "{:?}", small(98));
    assert_eq!(locked(&small(97), 0), "########.#-");
    // Without any block left over, the ring is not needed.
    assert_eq!((locked(&at(104), 0).as_str(), at(104).ring), ("##########-", Bytes(0)));
    assert_eq!((locked(&at(12), 0).as_str(), at(12).ring), ("..........-", Bytes(12)));
    assert_eq!(at(0).reserved, Bytes::ZERO);
}

#[test]
fn models_share_in_their_order() {
    let models = [
        model(Pinning::OneIn(2), &[10; 4], &[], 5),
        model(Pinning::Whole, &[10; 4], &[10], 5),
        model(Pinning::Blocks, &[10; 4], &[], 5),
        model(Pinning::None, &[10; 4], &[], 5),
    ];
    let at = |left| {
        let plan = ReservePlan::new(&models, Bytes(left), Bytes(6));
        (0..4).map(|model| locked(&plan, model)).collect::<Vec<_>>()
    };
    // Each step of both pinned models before the preloaded block of the first.
    assert_eq!(at(86), ["....-", "####.-", "####-", "....-"]);
    assert_eq!(at(66), ["....-", "####.-", ".#.#-", "....-"]);
    // Everything of the pinned ones (95 bytes), the ring (6), then one block in two.
    assert_eq!(at(95), ["....-", "#####+", "####-", "....-"]);
    assert_eq!(at(120), ["..#.-", "#####+", "####-", "....-"]);
    assert_eq!(at(500), [".#.#-", "#####+", "####-", "....-"]);
}

#[test]
fn a_model_of_the_ring_alone_locks_the_ring_alone() {
    let plan = ReservePlan::new(&[model(Pinning::Ring, &[10; 4], &[], 5)], Bytes(1000), Bytes(30));
    assert_eq!((locked(&plan, 0).as_str(), plan.ring, plan.reserved), ("....-", Bytes(30), Bytes(30)));
    let none = ReservePlan::new(&[model(Pinning::None, &[10; 4], &[], 5)], Bytes(1000), Bytes(30));
    assert_eq!(none.reserved, Bytes::ZERO);
}

#[test]
fn the_limit_counts_what_is_locked_and_what_there_is() {
    let limits = ReserveLimits { memory: Bytes(1000), share: 0.6, locked: Bytes(100), room: None };
    assert_eq!(limits.left(), Bytes(500));
    assert_eq!(ReserveLimits { room: Some(Bytes(70)), ..limits }.left(), Bytes(70));
    assert_eq!(ReserveLimits { locked: Bytes(700), ..limits }.left(), Bytes::ZERO);
    assert_eq!(ReserveLimits { share: f64::NAN, ..limits }.left(), Bytes::ZERO);
    assert_eq!(ReserveLimits { share: 7.0, ..limits }.left(), Bytes(900));
}

#[test]
fn the_share_is_the_callers_then_the_environments_then_the_default() {
    let text = |text: &str| {
        let text = text.to_owned();
        move |name: &str| (name == "perc_reserved_mem_max").then_some(text)
    };
    let share = |given, env| reserved_share(given, text(env)).unwrap();
    let default = DEFAULT_SHARE.to_bits();
    assert_eq!(share(0.4, "0.7").to_bits(), 0.4_f64.to_bits());
    assert_eq!(share(0.0, "0.7").to_bits(), 0.7_f64.to_bits());
    for env in ["", "  ", "0", "0.0"] {
        assert_eq!(share(0.0, env).to_bits(), default, "{env:?}");
    }
    assert_eq!(reserved_share(0.0, |_| None).unwrap().to_bits(), default);
    for env in ["60%", "1.5", "-0.1", "NaN", "inf", "half"] {
        let refused = reserved_share(0.0, text(env)).unwrap_err();
        assert_eq!(refused, HostError::ReservedShare { text: env.into() });
    }
    for given in [-1.0, 1.01, f64::NAN, f64::INFINITY] {
        assert!(reserved_share(given, text("0.5")).is_err(), "{given}");
    }
}

/// The same, by trying every block and every number of them.
fn naive(models: &[ReserveModel], left: u64, ring: u64) -> ReservePlan {
    let pinned = |model: &ReserveModel| matches!(model.pinning, Pinning::Whole | Pinning::Blocks);
    let attempt = |ring: u64| {
        let mut left = left;
        let mut plan = ReservePlan { models: Vec::new(), ring: Bytes(ring.min(left)), reserved: Bytes::ZERO };
        left -= ring.min(left);
        for model in models {
            plan.models.push(ModelReserve { blocks: vec![false; model.blocks.len()], rest: false });
        }
        let fill = |plan: &mut ReservePlan, left: &mut u64, index: usize, these: &[usize], most: usize| {
            let sets = (0..=most).map(|count| -> Vec<usize> {
                (0..count).map(|i| these[(2 * i + 1) * these.len() / (2 * count)]).collect()
            });
            let sum =
                |set: &[usize]| set.iter().map(|&block| models[index].blocks[block].bytes.0).sum::<u64>();
            let best = sets.filter(|set| sum(set) <= *left).max_by_key(Vec::len).unwrap();
            *left -= sum(&best);
            for block in best {
                plan.models[index].blocks[block] = true;
            }
        };
        for used in [BlockUse::EachStep, BlockUse::Preloaded] {
            for (index, model) in models.iter().enumerate().filter(|(_, model)| pinned(model)) {
                let blocks = model.blocks.iter().enumerate();
                let these: Vec<usize> =
                    blocks.filter(|(_, block)| block.used == used).map(|(at, _)| at).collect();
                fill(&mut plan, &mut left, index, &these, these.len());
            }
        }
        let all = models
            .iter()
            .zip(&plan.models)
            .all(|(model, got)| !pinned(model) || got.blocks.iter().all(|&yes| yes));
        for (index, model) in models.iter().enumerate() {
            if model.pinning == Pinning::Whole && model.rest.0 <= left {
                left -= model.rest.0;
                plan.models[index].rest = true;
            }
        }
        (plan, left, all)
    };
    let (mut plan, mut room, all) = attempt(0);
    if !all {
        (plan, room, _) = attempt(ring);
    } else if models.iter().any(|model| match model.pinning {
        Pinning::Ring => !model.blocks.is_empty(),
        Pinning::OneIn(count) => count > 1 && model.blocks.len() > 1,
        _ => false,
    }) {
        plan.ring = Bytes(ring.min(room));
        room -= ring.min(room);
    }
    for (index, model) in models.iter().enumerate() {
        if let Pinning::OneIn(count) = model.pinning {
            let length = model.blocks.len();
            for most in (0..=length.div_ceil(count.max(1) as usize)).rev() {
                let set: Vec<usize> = (0..most).map(|i| (2 * i + 1) * length / (2 * most)).collect();
                let sum: u64 = set.iter().map(|&block| model.blocks[block].bytes.0).sum();
                if sum <= room {
                    room -= sum;
                    for block in set {
                        plan.models[index].blocks[block] = true;
                    }
                    break;
                }
            }
        }
    }
    plan.reserved = Bytes(left - room);
    plan
}

fn any_model() -> impl Strategy<Value = ReserveModel> {
    let pinning = prop_oneof![
        Just(Pinning::None),
        Just(Pinning::Whole),
        Just(Pinning::Blocks),
        Just(Pinning::Ring),
        (0u32..5).prop_map(Pinning::OneIn),
    ];
    let used = prop_oneof![Just(BlockUse::EachStep), Just(BlockUse::Preloaded)];
    let block = (0u64..20, used).prop_map(|(bytes, used)| ReserveBlock { bytes: Bytes(bytes), used });
    (pinning, proptest::collection::vec(block, 0..12), 0u64..20)
        .prop_map(|(pinning, blocks, rest)| ReserveModel { pinning, blocks, rest: Bytes(rest) })
}

proptest! {
    #[test]
    fn it_is_what_trying_everything_gives(
        models in proptest::collection::vec(any_model(), 0..5), left in 0u64..400, ring in 0u64..40,
    ) {
        let plan = ReservePlan::new(&models, Bytes(left), Bytes(ring));
        prop_assert_eq!(&plan, &naive(&models, left, ring));
        prop_assert!(plan.reserved <= Bytes(left));
        let mut total = plan.ring;
        for (model, got) in models.iter().zip(&plan.models) {
            let blocks = model.blocks.iter().zip(&got.blocks).filter(|(_, locked)| **locked);
            total = total + blocks.map(|(block, _)| block.bytes).sum();
            total = if got.rest { total + model.rest } else { total };
            prop_assert!(!got.rest || model.pinning == Pinning::Whole);
            prop_assert!(got.blocks.iter().all(|locked| !locked)
                || matches!(model.pinning, Pinning::Whole | Pinning::Blocks | Pinning::OneIn(_)));
        }
        prop_assert_eq!(total, plan.reserved);
    }

    #[test]
    fn places_are_spread(length in 1usize..60, count in 1usize..60) {
        prop_assume!(count <= length);
        let places: Vec<usize> = evenly(length, count).collect();
        prop_assert!(places.iter().all(|&place| place < length));
        let gaps: Vec<usize> = places.windows(2).map(|pair| pair[1] - pair[0]).collect();
        if let (Some(&least), Some(&most)) = (gaps.iter().min(), gaps.iter().max()) {
            prop_assert!(least >= 1 && most - least <= 1, "{:?}", places);
        }
    }
}
