//! Random sequences of memory verbs on the emulator beside a naive model: the same calls succeed, the same bytes
//! are seen at every address, and the same things are alive.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block, reason = "tests drive the unsafe verbs")]

use std::collections::BTreeMap;

use gpu_driver::{Access, Bytes, DeviceAddress, Driver, HostDriver, HostOptions, PageHandle, StreamHandle};
use proptest::prelude::*;

const GRANULE: u64 = HostOptions::DEFAULT_GRANULARITY.0;
const RANGE: u64 = 8;
const TOTAL: u64 = 6;

/// A verb with its arguments in granules; handles by their order of making.
#[derive(Debug, Clone)]
enum Step {
    Create { granules: u64 },
    Release { handle: usize },
    Map { at: u64, handle: usize },
    Unmap { at: u64, granules: u64 },
    Access { at: u64, granules: u64, access: Access },
    Write { at: u64, granules: u64, value: u8 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let access = prop_oneof![4 => Just(Access::ReadWrite), 1 => Just(Access::None)];
    let step = prop_oneof![
        3 => (1..4_u64).prop_map(|granules| Step::Create { granules }),
        1 => (0..6_usize).prop_map(|handle| Step::Release { handle }),
        5 => (0..RANGE, 0..6_usize).prop_map(|(at, handle)| Step::Map { at, handle }),
        2 => (0..RANGE, 1..5_u64).prop_map(|(at, granules)| Step::Unmap { at, granules }),
        4 => (0..RANGE, 1..5_u64, access).prop_map(|(at, granules, access)| Step::Access { at, granules, access }),
        5 => (0..RANGE, 1..4_u64, 1..255_u8).prop_map(|(at, granules, value)| Step::Write { at, granules, value }),
    ];
    proptest::collection::vec(step, 1..60)
}

/// What a granule of the range shows: which handle, which of its granules, and whether it may be used.
#[derive(Debug, Clone, Copy)]
struct Shown {
    handle: usize,
    part: u64,
    access: Access,
}

#[derive(Debug, Default)]
struct Model {
    /// Size, released, and a value a granule (zero: as made).
    handles: Vec<(u64, bool, Vec<u8>)>,
    range: BTreeMap<u64, Shown>,
}

impl Model {
    fn mapped(&self, handle: usize) -> bool {
        self.range.values().any(|shown| shown.handle == handle)
    }

    fn alive(&self) -> Vec<usize> {
        let every = 0..self.handles.len();
        every.filter(|handle| !self.handles[*handle].1 || self.mapped(*handle)).collect()
    }

    fn used(&self) -> u64 {
        self.alive().iter().map(|handle| self.handles[*handle].0).sum()
    }

    /// Whether the range is a run of whole mappings.
    fn whole(&self, at: u64, granules: u64) -> bool {
        let inside = (at..at + granules).all(|granule| self.range.contains_key(&granule));
        let first = self.range.get(&at).is_some_and(|shown| shown.part == 0);
        let last = self.range.get(&(at + granules - 1));
        inside && first && last.is_some_and(|shown| shown.part + 1 == self.handles[shown.handle].0)
    }

    /// Applies a step; says whether the driver must accept it.
    fn apply(&mut self, step: &Step) -> bool {
        match *step {
            Step::Create { granules } => {
                let fits = self.used() + granules <= TOTAL;
                if fits {
                    self.handles.push((granules, false, vec![0; granules as usize]));
                }
                fits
            }
            Step::Release { handle } => match self.handles.get_mut(handle) {
                Some((_, released @ false, _)) => {
                    *released = true;
                    true
                }
                _ => false,
            },
            Step::Map { at, handle } => {
                let Some((granules, false, _)) = self.handles.get(handle).cloned() else { return false };
                let free = (at..at + granules).all(|granule| !self.range.contains_key(&granule));
                if free && at + granules <= RANGE {
                    for part in 0..granules {
                        self.range.insert(at + part, Shown { handle, part, access: Access::None });
                    }
                    return true;
                }
                false
            }
            Step::Unmap { at, granules } => {
                let whole = self.whole(at, granules);
                if whole {
                    self.range.retain(|granule, _| !(at..at + granules).contains(granule));
                }
                whole
            }
            Step::Access { at, granules, access } => {
                let whole = self.whole(at, granules);
                if whole {
                    self.range.range_mut(at..at + granules).for_each(|(_, shown)| shown.access = access);
                }
                whole
            }
            Step::Write { at, granules, value } => {
                let may = |granule: u64| {
                    self.range.get(&granule).is_some_and(|shown| shown.access == Access::ReadWrite)
                };
                let usable = (at..at + granules).all(may);
                if usable {
                    for granule in at..at + granules {
                        let shown = self.range[&granule];
                        self.handles[shown.handle].2[shown.part as usize] = value;
                    }
                }
                usable
            }
        }
    }
}

fn apply(driver: &HostDriver, range: DeviceAddress, handles: &mut Vec<PageHandle>, step: &Step) -> bool {
    let address = |at: u64| range.offset(Bytes(at * GRANULE));
    let bytes = |granules: u64| Bytes(granules * GRANULE);
    let handle_of =
        |handles: &[PageHandle], index: usize| handles.get(index).copied().unwrap_or(PageHandle(u64::MAX));
    // SAFETY: the emulator checks every contract; nothing else uses the memory.
    unsafe {
        match *step {
            Step::Create { granules } => {
                driver.create_pages(bytes(granules)).map(|handle| handles.push(handle)).is_ok()
            }
            Step::Release { handle } => driver.release_pages(handle_of(handles, handle)).is_ok(),
            Step::Map { at, handle } => {
                // A wrong size would be refused for its own reason: sizes are kept beside by the model.
                let handle = handle_of(handles, handle);
                (1..4).any(|granules| driver.map_pages(address(at), bytes(granules), handle).is_ok())
            }
            Step::Unmap { at, granules } => driver.unmap_pages(address(at), bytes(granules)).is_ok(),
            Step::Access { at, granules, access } => {
                driver.set_access(address(at), bytes(granules), access).is_ok()
            }
            Step::Write { at, granules, value } => {
                driver.fill(address(at), bytes(granules), value, StreamHandle::DEFAULT).is_ok()
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_emulator_is_the_model(steps in steps()) {
        let driver = HostDriver::new(HostOptions::new(Bytes(TOTAL * GRANULE))).unwrap();
        let range = driver.reserve_address(Bytes(RANGE * GRANULE), Bytes::ZERO).unwrap();
        let mut model = Model::default();
        let mut handles = Vec::new();
        for step in &steps {
            let expected = model.apply(step);
            prop_assert_eq!(apply(&driver, range, &mut handles, step), expected, "{:?}", step);
            let counters = driver.counters();
            prop_assert_eq!(counters.pages_alive, model.alive().len() as u64);
            prop_assert_eq!(counters.page_bytes_alive, Bytes(model.used() * GRANULE));
            let starts = model.range.values().filter(|shown| shown.part == 0).count();
            prop_assert_eq!(counters.mappings_alive, starts as u64);
            for (granule, shown) in &model.range {
                if shown.access == Access::ReadWrite {
                    let value = model.handles[shown.handle].2[shown.part as usize];
                    for offset in [0, GRANULE - 1] {
                        let at = range.0 + granule * GRANULE + offset;
                        // SAFETY: the model says it is mapped with access, and so did the emulator.
                        let seen = unsafe { std::ptr::with_exposed_provenance::<u8>(at as usize).read_volatile() };
                        prop_assert_eq!(seen, value, "granule {} of {:?}", granule, shown);
                    }
                }
            }
        }
    }
}
