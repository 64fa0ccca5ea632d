//! Budgets that change between steps: of a model alone, of models that share a device, and where the driver fails.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::BTreeSet;
use std::sync::Arc;

use gpu_driver::{CopyOrder, Faulty, HostDriver, HostOptions, Verb};
use pinned_pool::StoreOptions;
use streaming::{Attached, Model, attach, attach_with, model_of};
use weightstream::{Backing, Budget, Bytes, Company, Driver, EngineError, Error, PlanError, Share, UnitId};

mod streaming;

const UNIT: usize = 20_000;
const PAGE: Bytes = Bytes::kib(16);

fn device(order: CopyOrder) -> (Arc<HostDriver>, Arc<Faulty<HostDriver>>, Arc<dyn Driver>) {
    let options = HostOptions::new(Bytes::mib(64)).granularity(Bytes::kib(4)).order(order).seed(9);
    let host = Arc::new(HostDriver::new(options).unwrap());
    let device = Arc::new(Faulty::new(Arc::clone(&host)));
    let driver: Arc<dyn Driver> = Arc::<Faulty<HostDriver>>::clone(&device);
    (host, device, driver)
}

fn percent(model: &Model, share: u64) -> Budget {
    Budget::Bytes(Bytes(model.bytes() * share / 100))
}

fn own_pages(model: &Attached) -> usize {
    model.offloader.plan().backing.iter().filter(|backing| **backing == Backing::Own).count()
}

/// What is resident in one plan and was not in another, in bytes.
fn grown(before: &[Backing], now: &[Backing], page: u64) -> u64 {
    let new =
        now.iter().zip(before).filter(|(now, before)| **now == Backing::Own && **before != Backing::Own);
    new.count() as u64 * page
}

#[test]
fn a_budget_goes_up_and_down_and_copies_only_what_becomes_resident() {
    for order in [CopyOrder::Eager, CopyOrder::Lazy, CopyOrder::Random] {
        let (host, _, driver) = device(order);
        let model = model_of(UNIT, 3);
        let mut attached = attach(&driver, &model, model.bytes() * 45 / 100, StoreOptions::default());
        attached.step(&attached.all());
        attached.segment();
        attached.step(&attached.all());
        let address = attached.offloader.address(attached.turn(3)[0]).unwrap();
        let units = attached.offloader.plan().units.len();
        for share in [70, 55, 95, 60, 45, 130, 50] {
            let before = attached.offloader.plan();
            let (pages, uploaded) = (own_pages(&attached), attached.offloader.stats().uploaded_bytes);
            let held = attached.offloader.report().engine.page_bytes_in_use;
            let budget = percent(&model, share);
            attached.offloader.set_budget(budget).unwrap();
            let now = attached.offloader.plan();
            let (report, copied) =
                (attached.offloader.report(), attached.offloader.stats().uploaded_bytes - uploaded);
            let allowed = model.bytes() * share / 100;
            assert!(
                report.engine.page_bytes_in_use <= allowed,
                "{} of {allowed}",
                report.engine.page_bytes_in_use
            );
            assert_eq!(attached.offloader.budget(), Some(Bytes(allowed)));
            if allowed < held {
                assert_eq!(copied, 0, "a lower budget copies nothing");
                assert!(own_pages(&attached) <= pages);
            } else {
                let most = grown(&before.backing, &now.backing, report.engine.page_bytes);
                assert!(copied <= most && (copied > 0) == (most > 0), "{copied} bytes of {most}");
            }
            assert_eq!(now.units.len(), units, "units stay");
            for _ in 0..2 {
                attached.step(&attached.all());
            }
        }
        attached.offloader.set_budget(Budget::Unlimited).unwrap();
        let copies = attached.offloader.stats().copies;
        attached.step(&attached.all());
        assert_eq!(attached.offloader.stats().copies, copies, "everything is resident");
        attached.offloader.set_budget(Budget::DeviceShare(0.005)).unwrap();
        attached.step(&attached.all());
        attached.segment();
        attached.step(&attached.all());
        assert!(attached.turns_have(address));
        attached.offloader.close(attached.compute.handle()).unwrap();
        drop((attached, driver));
        assert!(host.counters().nothing_alive(), "{:?}", host.counters());
    }
}

#[test]
fn a_refused_budget_names_the_minimum_and_changes_nothing() {
    let (_, _, driver) = device(CopyOrder::Random);
    let model = model_of(UNIT, 3);
    let mut attached = attach(&driver, &model, model.bytes() * 60 / 100, StoreOptions::default());
    attached.step(&attached.all());
    attached.segment();
    let (plan, budget) = (attached.offloader.plan(), attached.offloader.budget());
    let refused = attached.offloader.set_budget(Budget::Bytes(Bytes(1000))).unwrap_err();
    let Error::Plan(PlanError::BudgetTooSmall { minimum, .. }) = refused else { panic!("{refused}") };
    for bad in [Budget::Bytes(minimum - Bytes(1)), Budget::Bytes(Bytes(0)), Budget::DeviceShare(2.0)] {
        assert!(attached.offloader.set_budget(bad).is_err());
    }
    let stream = attached.compute.handle();
    attached.offloader.begin_step(stream).unwrap();
    attached.offloader.enter(UnitId(0), stream).unwrap();
    let within = attached.offloader.set_budget(percent(&model, 90)).unwrap_err();
    assert!(matches!(within, Error::Engine(EngineError::InStep { .. })), "{within}");
    attached.offloader.leave(UnitId(0), stream).unwrap();
    attached.offloader.end_step(stream).unwrap();
    let held = attached.offloader.hold(&attached.turn(1), stream).unwrap();
    let within = attached.offloader.set_budget(percent(&model, 90)).unwrap_err();
    assert!(matches!(within, Error::Engine(EngineError::Held { .. })), "{within}");
    attached.offloader.release(&held, stream).unwrap();
    assert_eq!((attached.offloader.plan(), attached.offloader.budget()), (plan, budget));
    // The minimum works, also for the whole blocks that a model may come back to.
    attached.offloader.set_budget(Budget::Bytes(minimum)).unwrap();
    attached.step(&attached.all());
    attached.offloader.segment(&std::collections::BTreeMap::new(), None).unwrap();
    attached.offloader.close(stream).unwrap();
    assert!(attached.offloader.set_budget(percent(&model, 90)).is_err(), "it is closed");
}

struct Pair {
    share: Share,
    models: Vec<Attached>,
    bytes: u64,
}

/// Three models of the same bytes that accept each other, by their percentages.
fn shared(driver: &Arc<dyn Driver>, limit: u64, shares: [u64; 3]) -> Pair {
    let model = model_of(UNIT, 5);
    let share = Share::new(Arc::clone(driver), PAGE, Bytes(model.bytes() * limit / 100)).unwrap();
    let names = ["a", "b", "c"];
    let everyone: BTreeSet<String> = names.iter().map(|&name| name.into()).collect();
    let attached = names.iter().zip(shares).map(|(&name, percent)| {
        let budget = model.bytes() * percent / 100;
        attach_with(driver, &model, budget, StoreOptions::default(), |builder| {
            builder.share(&share, name, Company::Of(everyone.clone())).raise_budget(true);
        })
        .unwrap()
    });
    Pair { models: attached.collect(), share, bytes: model.bytes() }
}

impl Pair {
    fn set(&self, model: usize, percent: u64) -> weightstream::Result<()> {
        let budget = Bytes(self.bytes * percent / 100);
        self.models[model].offloader.set_budget(Budget::Bytes(budget))
    }

    fn step(&self, model: usize) {
        self.models[model].step(&self.models[model].all());
    }

    fn here(&self) -> Vec<String> {
        self.share.report().here
    }

    fn in_use(&self) -> u64 {
        self.share.report().page_bytes_in_use
    }
}

#[test]
fn a_shared_model_takes_more_without_loading_again_and_others_leave_for_it() {
    let (host, _, driver) = device(CopyOrder::Lazy);
    let pair = shared(&driver, 185, [50, 50, 50]);
    (0..3).for_each(|model| pair.step(model));
    assert_eq!(pair.here(), ["a", "b", "c"]);
    let uploaded = |model: usize| pair.models[model].offloader.stats().uploaded_bytes;
    let before = [uploaded(0), uploaded(1), uploaded(2)];
    pair.set(2, 80).unwrap();
    assert_eq!(pair.here(), ["a", "b", "c"], "all fit");
    (0..3).rev().for_each(|model| pair.step(model));
    assert_eq!([uploaded(0), uploaded(1)], [before[0], before[1]], "nobody was loaded again");
    assert!(uploaded(2) > before[2] && uploaded(2) - before[2] < pair.bytes * 40 / 100);
    pair.set(2, 50).unwrap();
    // Now c ran longest ago, and a last.
    pair.set(0, 115).unwrap();
    assert_eq!(pair.here(), ["a", "b"]);
    pair.step(0);
    pair.set(1, 90).unwrap();
    assert_eq!(pair.here(), ["a"], "a ran since: b comes back with more when it runs");
    pair.step(1);
    assert_eq!(pair.here(), ["b"]);
    pair.step(1);
    pair.set(1, 45).unwrap();
    assert!(pair.in_use() <= pair.bytes * 45 / 100 + PAGE.0);
    pair.step(1);
    for model in &pair.models {
        model.offloader.close(model.compute.handle()).unwrap();
    }
    assert_eq!(pair.in_use(), 0);
    drop((pair, driver));
    assert!(host.counters().nothing_alive(), "{:?}", host.counters());
}

#[test]
fn a_budget_that_the_device_has_not_for_one_alone_is_refused_without_naming_others() {
    let (_, _, driver) = device(CopyOrder::Eager);
    let pair = shared(&driver, 60, [50, 50, 50]);
    pair.step(1);
    let refused = pair.set(1, 90).unwrap_err();
    assert!(matches!(&refused, Error::Crowded { staying, .. } if staying.is_empty()), "{refused}");
    let text = refused.to_string();
    assert!(text.starts_with("b may take ") && text.ends_with("lower its budget"), "{text}");
    pair.step(1);
}

#[test]
fn a_shared_model_is_not_sent_away_from_its_step_for_another_ones_budget() {
    let (_, _, driver) = device(CopyOrder::Eager);
    let pair = shared(&driver, 120, [50, 50, 50]);
    pair.step(1);
    let stream = pair.models[0].compute.handle();
    pair.models[0].offloader.begin_step(stream).unwrap();
    assert_eq!(pair.here(), ["a", "b"]);
    let crowded = pair.set(1, 90).unwrap_err();
    assert!(matches!(&crowded, Error::Crowded { staying, .. } if staying == "a"), "{crowded}");
    assert!(matches!(pair.set(0, 60).unwrap_err(), Error::Engine(EngineError::InStep { .. })));
    let busy = pair.set(1, 60).unwrap_err();
    assert!(matches!(&busy, Error::Busy { other, .. } if other == "a"), "the ring is a's: {busy}");
    pair.models[0].offloader.end_step(stream).unwrap();
    pair.set(1, 60).unwrap();
    pair.step(1);
    pair.step(0);
    for model in &pair.models {
        model.offloader.close(model.compute.handle()).unwrap();
    }
}

#[test]
fn a_failure_anywhere_while_a_shared_budget_changes_leaves_all_models_usable() {
    let verbs = [
        Verb::CreatePages,
        Verb::MapPages,
        Verb::UnmapPages,
        Verb::SetAccess,
        Verb::CopyToDevice,
        Verb::ReleasePages,
        Verb::SynchronizeEvent,
        Verb::SynchronizeStream,
        Verb::RecordEvent,
        Verb::WaitEvent,
        Verb::Fill,
    ];
    let mut struck = 0;
    for verb in verbs {
        for index in 0..16 {
            let (host, device, driver) = device(CopyOrder::Lazy);
            let pair = shared(&driver, 170, [50, 50, 50]);
            (0..3).for_each(|model| pair.step(model));
            device.reset();
            device.fail(verb, index);
            let changed = [pair.set(2, 110).is_err(), pair.set(1, 40).is_err(), pair.set(2, 45).is_err()];
            let calls = device.calls(verb);
            device.reset();
            struck += changed.iter().filter(|failed| **failed).count();
            for model in [0, 2, 1, 2, 0] {
                let ran = pair.models[model].try_step(&pair.models[model].all());
                assert!(ran.is_ok(), "after {verb:?} {index}: {ran:?}, {:?}", pair.share.report());
                assert!(pair.share.report().page_bytes_in_use <= pair.bytes * 170 / 100);
            }
            for model in &pair.models {
                model.offloader.close(model.compute.handle()).unwrap();
            }
            assert_eq!(pair.in_use(), 0, "{:?}", pair.share.report());
            drop((pair, driver, device));
            assert!(host.counters().nothing_alive(), "{:?}", host.counters());
            if calls <= index {
                break;
            }
        }
    }
    assert!(struck > 20, "only {struck} calls failed");
}

#[test]
fn what_is_preloaded_is_given_back_in_the_middle_of_a_step_and_the_step_goes_on() {
    for order in [CopyOrder::Eager, CopyOrder::Lazy, CopyOrder::Random] {
        let (host, _, driver) = device(order);
        let model = model_of(UNIT, 3);
        let mut attached = attach(&driver, &model, model.bytes() * 45 / 100, StoreOptions::default());
        attached.step(&attached.all());
        attached.segment();
        attached.step(&attached.all());
        assert_eq!(
            attached.offloader.release_preload(Bytes(1)).unwrap(),
            Bytes(0),
            "the budget is not preloaded"
        );
        attached.offloader.preload(Bytes(model.bytes() * 2)).unwrap();
        attached.step(&attached.all());
        let held = || attached.offloader.report().engine.page_bytes_in_use;
        let (before, stream, all) = (held(), attached.compute.handle(), attached.all());
        attached.offloader.begin_step(stream).unwrap();
        for &unit in &all {
            attached.offloader.enter(UnitId(unit), stream).unwrap();
            attached.check_turn(unit as usize);
            if unit == all.len() as u32 / 2 {
                let asked = Bytes(before / 4);
                let freed = attached.offloader.release_preload(asked).unwrap();
                assert!(freed >= asked && held() + freed.0 <= before, "{freed} of {asked}, {} held", held());
                assert!(
                    attached.offloader.set_budget(Budget::Unlimited).is_err(),
                    "that is for between steps"
                );
            }
            attached.check_turn(unit as usize);
            attached.offloader.leave(UnitId(unit), stream).unwrap();
        }
        attached.offloader.end_step(stream).unwrap();
        attached.step(&all);
        let (preloaded, budget) = (attached.offloader.preloaded(), model.bytes() * 45 / 100);
        assert_eq!(attached.offloader.budget(), Some(Bytes(budget) + preloaded));
        attached.offloader.release_preload(Bytes(u64::MAX)).unwrap();
        assert_eq!(attached.offloader.preloaded(), Bytes(0));
        assert!(held() <= budget);
        attached.step(&all);
        attached.offloader.close(stream).unwrap();
        drop((attached, driver));
        assert!(host.counters().nothing_alive(), "{:?}", host.counters());
    }
}

#[test]
fn a_shared_model_gives_its_preload_back_in_its_step() {
    let (host, _, driver) = device(CopyOrder::Random);
    let pair = shared(&driver, 200, [45, 45, 45]);
    (0..3).for_each(|model| pair.step(model));
    let model = &pair.models[1];
    model.offloader.preload(Bytes(pair.bytes * 2)).unwrap();
    pair.step(1);
    let copies = model.offloader.stats().copies;
    pair.step(1);
    assert_eq!(model.offloader.stats().copies, copies, "all of it is resident");
    let (stream, before) = (model.compute.handle(), pair.in_use());
    model.offloader.begin_step(stream).unwrap();
    for &unit in &model.all() {
        model.offloader.enter(UnitId(unit), stream).unwrap();
        if unit == 4 {
            let freed = model.offloader.release_preload(Bytes(pair.bytes / 4)).unwrap();
            assert!(freed.0 >= pair.bytes / 4 && pair.in_use() + freed.0 <= before);
        }
        model.check_turn(unit as usize);
        model.offloader.leave(UnitId(unit), stream).unwrap();
    }
    model.offloader.end_step(stream).unwrap();
    (0..3).for_each(|model| pair.step(model));
    for model in &pair.models {
        model.offloader.close(model.compute.handle()).unwrap();
    }
    drop((pair, driver));
    assert!(host.counters().nothing_alive(), "{:?}", host.counters());
}
