//! Several models on one emulated device: who stays, what is copied again, and what a failure leaves.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::BTreeSet;
use std::sync::Arc;

use gpu_driver::{CopyOrder, Faulty, HostDriver, HostOptions, Verb};
use pinned_pool::{Levels, StoreOptions};
use streaming::{Attached, attach_with, model_of};
use weightstream::{Budget, Bytes, Company, Driver, Error, Share, UnitId};

mod streaming;

const UNIT: usize = 20_000;
const PAGE: Bytes = Bytes::kib(16);

type Device = Faulty<HostDriver>;

struct Setting {
    host: Arc<HostDriver>,
    device: Arc<Device>,
    driver: Arc<dyn Driver>,
    share: Share,
}

fn setting(order: CopyOrder, seed: u64, limit: Bytes) -> Setting {
    setting_of(Bytes::mib(64), order, seed, limit)
}

fn setting_of(memory: Bytes, order: CopyOrder, seed: u64, limit: Bytes) -> Setting {
    let options = HostOptions::new(memory).granularity(Bytes::kib(4)).order(order).seed(seed);
    let host = Arc::new(HostDriver::new(options).unwrap());
    let device = Arc::new(Faulty::new(Arc::clone(&host)));
    let driver: Arc<dyn Driver> = Arc::<Device>::clone(&device);
    let share = Share::new(Arc::clone(&driver), PAGE, limit).unwrap();
    Setting { host, device, driver, share }
}

fn of(names: &[&str]) -> Company {
    if names == ["*"] {
        return Company::Everyone;
    }
    Company::Of(names.iter().map(|&name| name.into()).collect::<BTreeSet<String>>())
}

impl Setting {
    /// A model of `percent` of its bytes as budget.
    fn model(&self, name: &str, percent: u64, company: &[&str]) -> Attached {
        let seed = name.bytes().fold(percent, |seed, byte| seed * 31 + u64::from(byte));
        let model = model_of(UNIT, seed);
        let levels = if seed.is_multiple_of(3) { Levels::NONE } else { Levels::ALL };
        let store = StoreOptions { levels, min_in_place: Bytes::kib(16), ..StoreOptions::default() };
        let budget = model.bytes() * percent / 100;
        attach_with(&self.driver, &model, budget, store, |builder| {
            builder.share(&self.share, name, of(company)).raise_budget(true);
        })
        .unwrap()
    }

    fn in_use(&self) -> u64 {
        self.share.report().page_bytes_in_use
    }

    fn finish(self, models: Vec<Attached>) {
        self.device.reset();
        for model in &models {
            model.offloader.close(model.compute.handle()).unwrap();
        }
        assert_eq!(self.in_use(), 0, "{:?}", self.share.report());
        drop((models, self.share, self.driver, self.device));
        assert!(self.host.counters().nothing_alive(), "{:?}", self.host.counters());
    }
}

fn uploaded(model: &Attached) -> u64 {
    model.offloader.stats().uploaded_bytes
}

#[test]
fn models_that_accept_each_other_take_turns_without_loading_again() {
    for order in [CopyOrder::Eager, CopyOrder::Lazy, CopyOrder::Random] {
        let setting = setting(order, 3, Bytes::mib(16));
        let (a, b) = (setting.model("a", 60, &["b"]), setting.model("b", 70, &["a"]));
        for round in 0..4 {
            a.step(&a.all());
            b.step(&b.all());
            if round == 0 {
                assert!(uploaded(&a) > 0 && uploaded(&b) > 0);
            }
        }
        for model in [&a, &b] {
            let stats = model.offloader.stats();
            assert_eq!((stats.arrivals, stats.recoveries), (1, 0));
            assert!(stats.copies > 0, "it streams");
            assert!(model.offloader.is_here());
        }
        setting.finish(vec![a, b]);
    }
}

#[test]
fn a_model_that_is_not_accepted_leaves_and_reads_poison() {
    let setting = setting(CopyOrder::Random, 5, Bytes::mib(16));
    let (a, b) = (setting.model("a", 60, &[]), setting.model("b", 100, &[]));
    let address = a.offloader.address(a.turn(0)[0]).unwrap();
    a.step(&a.all());
    let alone = setting.in_use();
    b.step(&b.all());
    assert!(!a.offloader.is_here() && a.is_poisoned());
    assert_eq!(setting.share.report().here, ["b"]);
    b.step(&b.all());
    a.step(&a.all());
    assert!(a.offloader.is_here() && !b.offloader.is_here() && b.is_poisoned());
    assert_eq!(a.offloader.address(a.turn(0)[0]).unwrap(), address);
    assert!(setting.in_use() <= alone.max(setting.share.report().page_bytes_in_use));
    assert_eq!((a.offloader.stats().arrivals, b.offloader.stats().arrivals), (2, 1));
    let largest = a.offloader.plan().physical_bytes().max(b.offloader.plan().physical_bytes());
    assert!(setting.share.report().page_bytes_peak <= largest.0, "{:?}", setting.share.report());
    setting.finish(vec![a, b]);
}

#[test]
fn a_roomy_device_keeps_the_ring_within_the_budget_of_a_model_that_needs_none() {
    for (memory, kept) in [(Bytes::mib(64), 5), (Bytes::kib(1536), 0)] {
        let setting = setting_of(memory, CopyOrder::Random, 5, Bytes::mib(16));
        let (a, b) = (setting.model("a", 60, &[]), setting.model("b", 200, &[]));
        a.step(&a.all());
        let ring = setting.share.report().ring_pages;
        assert!(ring >= 5);
        b.step(&b.all());
        let report = setting.share.report();
        assert_eq!((report.ring_pages.min(5), &report.here[..]), (kept, &["b".to_owned()][..]), "{report:?}");
        assert!(report.page_bytes_in_use <= b.offloader.report().model_bytes * 2, "{report:?}");
        assert!(a.is_poisoned());
        a.step(&a.all());
        setting.finish(vec![a, b]);
    }
}

#[test]
fn addresses_of_a_model_that_leaves_are_taken_away_while_its_successors_bytes_are_copied() {
    let setting = setting(CopyOrder::Lazy, 1, Bytes::mib(16));
    let (a, b) = (setting.model("a", 60, &[]), setting.model("b", 50, &[]));
    a.step(&a.all());
    setting.device.reset();
    setting.device.record();
    b.offloader.arrive(b.compute.handle()).unwrap();
    let calls = setting.device.recorded();
    let first = |verb| calls.iter().position(|call| *call == verb).unwrap();
    let last = |verb| calls.iter().rposition(|call| *call == verb).unwrap();
    // It comes for the first time, so that nothing of its own is unmapped.
    assert!(first(Verb::UnmapPages) > last(Verb::CopyToDevice), "{calls:?}");
    let waited = last(Verb::SynchronizeEvent)
        .max(calls.iter().rposition(|c| *c == Verb::SynchronizeStream).unwrap_or(0));
    assert!(last(Verb::UnmapPages) < waited && last(Verb::ReleasePages) < waited, "{calls:?}");
    assert!(a.is_poisoned());
    setting.finish(vec![a, b]);
}

#[test]
fn what_uses_resident_bytes_outside_steps_is_waited_for_before_they_go() {
    let setting = setting(CopyOrder::Lazy, 5, Bytes::mib(16));
    let (a, b) = (setting.model("a", 60, &[]), setting.model("b", 50, &[]));
    for _ in 0..3 {
        a.offloader.arrive(a.compute.handle()).unwrap();
        let reads = a.begin_base();
        b.step(&b.all());
        assert!(a.is_poisoned());
        for (expected, pending) in reads {
            assert!(pending.finish().unwrap() == *expected, "read what came after");
        }
    }
    a.offloader.arrive(a.compute.handle()).unwrap();
    let reads = a.begin_base();
    a.offloader.vacate().unwrap();
    assert!(reads.into_iter().all(|(expected, pending)| pending.finish().unwrap() == *expected));
    setting.finish(vec![a, b]);
}

#[test]
fn the_learned_order_survives_an_absence() {
    let setting = setting(CopyOrder::Lazy, 5, Bytes::mib(16));
    let (a, b) = (setting.model("a", 45, &[]), setting.model("b", 45, &[]));
    let mut backwards = a.all();
    backwards.reverse();
    a.step(&backwards);
    a.step(&backwards);
    let before = a.offloader.stats().fetched_on_demand;
    b.step(&b.all());
    a.step(&backwards);
    assert_eq!(a.offloader.stats().fetched_on_demand, before);
    setting.finish(vec![a, b]);
}

#[test]
fn a_model_is_not_sent_away_while_it_runs() {
    let setting = setting(CopyOrder::Eager, 5, Bytes::mib(16));
    let (a, b, vae) = (
        setting.model("a", 60, &["vae"]),
        setting.model("b", 60, &["vae"]),
        setting.model("vae", 200, &["*"]),
    );
    let stream = a.compute.handle();
    a.offloader.begin_step(stream).unwrap();
    a.offloader.enter(UnitId(0), stream).unwrap();
    let refused = b.try_step(&b.all()).unwrap_err();
    assert!(matches!(&refused, Error::Busy { model, other } if model == "b" && other == "a"), "{refused}");
    // What is resident and accepted runs within another's step.
    vae.step(&vae.all());
    a.check_turn(0);
    a.offloader.leave(UnitId(0), stream).unwrap();
    a.offloader.end_step(stream).unwrap();
    b.step(&b.all());
    assert_eq!(setting.share.report().here, ["b", "vae"]);
    let held = b.offloader.hold(&b.turn(1), b.compute.handle()).unwrap();
    assert!(matches!(a.try_step(&a.all()).unwrap_err(), Error::Busy { .. }));
    b.offloader.release(&held, b.compute.handle()).unwrap();
    a.step(&a.all());
    setting.finish(vec![a, b, vae]);
}

#[test]
fn what_never_leaves_and_does_not_fit_is_refused_by_name() {
    let setting = setting(CopyOrder::Eager, 5, Bytes::mib(1));
    let (vae, a) = (setting.model("vae", 200, &["*"]), setting.model("a", 90, &[]));
    vae.step(&vae.all());
    let refused = a.try_step(&a.all()).unwrap_err();
    assert!(matches!(&refused, Error::Crowded { staying, .. } if staying == "vae"), "{refused}");
    vae.offloader.vacate().unwrap();
    a.step(&a.all());
    setting.finish(vec![vae, a]);
}

#[test]
fn a_model_taken_off_gives_its_memory_back_until_it_runs_again() {
    let setting = setting(CopyOrder::Random, 5, Bytes::mib(16));
    let (a, b) = (setting.model("a", 60, &["b"]), setting.model("b", 70, &["a"]));
    a.step(&a.all());
    b.step(&b.all());
    a.offloader.vacate().unwrap();
    assert_eq!(setting.share.report().here, ["b"]);
    assert!(setting.in_use() <= b.offloader.plan().physical_bytes().0);
    b.offloader.vacate().unwrap();
    assert_eq!(setting.in_use(), 0);
    b.offloader.arrive(b.compute.handle()).unwrap();
    b.step(&b.all());
    a.step(&a.all());
    setting.finish(vec![a, b]);
}

#[test]
fn a_failure_anywhere_in_a_switch_leaves_both_models_usable() {
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
    ];
    for verb in verbs {
        for index in 0..24 {
            let setting = setting(CopyOrder::Lazy, index, Bytes::mib(16));
            let (a, b) = (setting.model("a", 60, &[]), setting.model("b", 50, &["c"]));
            let c = setting.model("c", 55, &["b"]);
            a.step(&a.all());
            c.step(&c.all());
            setting.device.reset();
            setting.device.fail(verb, index);
            let come = |model: &Attached| model.offloader.arrive(model.compute.handle());
            let struck = come(&b).is_err() | come(&a).is_err();
            let calls = setting.device.calls(verb);
            setting.device.reset();
            for model in [&a, &b, &c] {
                model.offloader.abandon_step();
            }
            for model in [&c, &b, &a, &b] {
                let ran = model.try_step(&model.all());
                assert!(ran.is_ok(), "after {verb:?} {index}: {ran:?}, {:?}", setting.share.report());
            }
            setting.finish(vec![a, b, c]);
            if calls <= index && !struck {
                break;
            }
        }
    }
}

/// Numbers that are the same in every run.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

#[test]
fn random_models_in_random_turns_read_their_own_bytes_within_their_budgets() {
    let names = ["a", "b", "c", "d"];
    let (mut switches, mut rebudgeted) = (0, 0);
    for seed in 0..60 {
        let mut draw = Draw(seed);
        let order = draw.pick(&[CopyOrder::Eager, CopyOrder::Lazy, CopyOrder::Random]);
        let limit = Bytes::kib(1400 + 400 * draw.below(6));
        let setting = setting(order, seed, limit);
        let mut models = Vec::new();
        let mut allowed = 0;
        for name in names {
            let company: Vec<&str> = names.into_iter().filter(|_| draw.below(2) == 0).collect();
            let company = if draw.below(8) == 0 { vec!["*"] } else { company };
            let percent = 40 + 20 * draw.below(5);
            let model = setting.model(name, percent, &company);
            allowed += model
                .offloader
                .report()
                .engine
                .page_limit_bytes
                .max(model.offloader.plan().physical_bytes().0);
            models.push(model);
        }
        for _ in 0..14 {
            let place = draw.below(models.len() as u64) as usize;
            match draw.below(8) {
                0 => models[place].offloader.vacate().unwrap(),
                1 if draw.below(2) == 0 => models[place].segment(),
                1 => {
                    let bytes = model_of(UNIT, 1).bytes() * (40 + draw.below(120)) / 100;
                    match models[place].offloader.set_budget(Budget::Bytes(Bytes(bytes))) {
                        Err(Error::Crowded { .. }) => {}
                        set => {
                            set.unwrap();
                            rebudgeted += 1;
                        }
                    }
                }
                2 if models.len() > 2 => {
                    let model = models.remove(place);
                    model.offloader.close(model.compute.handle()).unwrap();
                }
                _ => {
                    let model = &models[place];
                    let mut order = model.all();
                    if draw.below(3) == 0 {
                        order.reverse();
                    }
                    match model.try_step(&order) {
                        Err(Error::Crowded { .. }) => {}
                        ran => {
                            ran.unwrap();
                            assert!(model.offloader.is_here());
                        }
                    }
                }
            }
            let report = setting.share.report();
            assert!(report.page_bytes_in_use <= limit.0 + allowed, "{report:?}");
            assert!(report.page_bytes_peak <= limit.0, "{report:?} over {limit}");
        }
        switches += models.iter().map(|model| model.offloader.stats().arrivals).sum::<u64>();
        setting.finish(models);
    }
    assert!(switches > 200 && rebudgeted > 20, "{switches}, {rebudgeted}");
}
