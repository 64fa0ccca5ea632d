//! Random lives of two ranges over one pool, beside a model that is a plain list.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;

use common::{Rig, handles, read, write};
use gpu_driver::{Access, Bytes};
use proptest::prelude::*;
use vmm_alloc::{AddressSpace, Page, PagePool};

const GRANULES: u32 = 6;
const LIMIT: u64 = 7;

#[derive(Debug, Clone)]
enum Step {
    Take(usize),
    Forget(usize),
    Map { space: usize, first: u32, pages: Vec<usize> },
    Remap { space: usize, first: u32, pages: Vec<usize> },
    Unmap { space: usize, first: u32, count: u32 },
    Access { space: usize, first: u32, count: u32, open: bool },
    Tail { space: usize, page: usize },
    Retire { space: usize },
    Replace { space: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let space = 0usize..2;
    let first = 0..GRANULES + 1;
    let pages = || proptest::collection::vec(0usize..8, 0..5);
    prop_oneof![
        3 => (0usize..5).prop_map(Step::Take),
        2 => (0usize..8).prop_map(Step::Forget),
        6 => (space.clone(), first.clone(), pages()).prop_map(|(space, first, pages)| Step::Map { space, first, pages }),
        4 => (space.clone(), first.clone(), pages())
            .prop_map(|(space, first, pages)| Step::Remap { space, first, pages }),
        4 => (space.clone(), first.clone(), 0u32..5)
            .prop_map(|(space, first, count)| Step::Unmap { space, first, count }),
        3 => (space.clone(), first, 0u32..4, any::<bool>())
            .prop_map(|(space, first, count, open)| Step::Access { space, first, count, open }),
        1 => (space.clone(), 0usize..8).prop_map(|(space, page)| Step::Tail { space, page }),
        1 => space.clone().prop_map(|space| Step::Retire { space }),
        1 => space.prop_map(|space| Step::Replace { space }),
    ]
}

/// What a range should be: a page number and access for each granule, the tail last.
#[derive(Debug, Clone, Default)]
struct Model {
    granules: Vec<Option<(u64, bool)>>,
    retired: bool,
}

struct World {
    rig: Rig,
    pool: PagePool,
    held: Vec<Arc<Page>>,
    spaces: Vec<Arc<AddressSpace>>,
    models: Vec<Model>,
}

fn fresh(rig: &Rig, granule: Bytes) -> (Arc<AddressSpace>, Model) {
    let space = AddressSpace::reserve(Arc::clone(&rig.driver), granule, GRANULES).unwrap();
    (space, Model { granules: vec![None; GRANULES as usize + 1], retired: false })
}

impl World {
    fn new(granularity: Bytes) -> Self {
        let rig = Rig::new(granularity);
        let pool = PagePool::new(Arc::clone(&rig.driver), granularity, Bytes(granularity.0 * LIMIT)).unwrap();
        let (spaces, models) = (0..2).map(|_| fresh(&rig, granularity)).unzip();
        Self { rig, pool, held: Vec::new(), spaces, models }
    }

    fn pages(&self, indexes: &[usize]) -> Vec<Arc<Page>> {
        let known =
            |index: &usize| (!self.held.is_empty()).then(|| Arc::clone(&self.held[index % self.held.len()]));
        indexes.iter().filter_map(known).collect()
    }

    fn alive(&self) -> BTreeSet<u64> {
        let mapped =
            self.models.iter().flat_map(|model| model.granules.iter().flatten().map(|(page, _)| *page));
        self.held.iter().map(|page| page.handle().0).chain(mapped).collect()
    }

    fn put(&mut self, space: usize, first: u32, pages: &[Arc<Page>]) {
        for (offset, page) in pages.iter().enumerate() {
            let granule = first as usize + offset;
            self.models[space].granules[granule] = Some((page.handle().0, true));
            // Every page carries its own number, so that each alias can be told from all others.
            if granule < GRANULES as usize {
                write(&self.spaces[space], granule as u32, page.handle().0);
            }
        }
    }

    fn act(&mut self, step: &Step) -> Result<(), TestCaseError> {
        let fits = |first: u32, count: usize| first as usize + count <= GRANULES as usize;
        match step {
            Step::Take(count) => {
                let fits = self.alive().len() + count <= LIMIT as usize;
                let taken = self.pool.take(*count);
                prop_assert_eq!(taken.is_ok(), fits);
                self.held.extend(taken.unwrap_or_default());
            }
            Step::Forget(index) => {
                if !self.held.is_empty() {
                    self.held.swap_remove(index % self.held.len());
                }
            }
            Step::Map { space, first, pages } => {
                let pages = self.pages(pages);
                let model = &self.models[*space];
                let free = fits(*first, pages.len())
                    && model.granules[*first as usize..][..pages.len()].iter().all(Option::is_none);
                let mapped = self.spaces[*space].map(*first, &pages);
                prop_assert_eq!(mapped.is_ok(), free && !model.retired);
                if mapped.is_ok() {
                    self.put(*space, *first, &pages);
                }
            }
            Step::Remap { space, first, pages } => {
                let pages = self.pages(pages);
                let mapped = self.spaces[*space].remap(*first, &pages);
                prop_assert_eq!(mapped.is_ok(), fits(*first, pages.len()) && !self.models[*space].retired);
                if mapped.is_ok() {
                    self.put(*space, *first, &pages);
                }
            }
            Step::Unmap { space, first, count } => {
                let model = &mut self.models[*space];
                let unmapped = self.spaces[*space].unmap(*first, *count);
                prop_assert_eq!(unmapped.is_ok(), fits(*first, *count as usize) && !model.retired);
                if unmapped.is_ok() {
                    model.granules[*first as usize..][..*count as usize].fill(None);
                }
            }
            Step::Access { space, first, count, open } => {
                let model = &mut self.models[*space];
                let range = *first as usize..*first as usize + *count as usize;
                let mapped =
                    fits(*first, range.len()) && model.granules[range.clone()].iter().all(Option::is_some);
                let access = if *open { Access::ReadWrite } else { Access::None };
                let set = self.spaces[*space].set_access(*first, *count, access);
                prop_assert_eq!(set.is_ok(), mapped && !model.retired);
                if set.is_ok() {
                    model.granules[range].iter_mut().flatten().for_each(|slot| slot.1 = *open);
                }
            }
            Step::Tail { space, page } => {
                let pages = self.pages(&[*page]);
                if let Some(page) = pages.first() {
                    prop_assert_eq!(self.spaces[*space].set_tail(page).is_ok(), !self.models[*space].retired);
                    if !self.models[*space].retired {
                        self.put(*space, GRANULES, &pages);
                    }
                }
            }
            Step::Retire { space } => {
                self.spaces[*space].retire().unwrap();
                self.models[*space] = Model { granules: vec![None; GRANULES as usize + 1], retired: true };
            }
            Step::Replace { space } => {
                (self.spaces[*space], self.models[*space]) = fresh(&self.rig, self.pool.granule());
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let alive = self.alive();
        let mut mapped = 0;
        for (space, model) in self.spaces.iter().zip(&self.models) {
            let expected: Vec<Option<u64>> =
                model.granules.iter().map(|slot| slot.map(|(page, _)| page)).collect();
            prop_assert_eq!(handles(space), expected);
            for (granule, slot) in (0..GRANULES).zip(&model.granules) {
                let offset = u64::from(granule) * space.granule().0;
                let open = slot.is_some_and(|(_, open)| open);
                prop_assert_eq!(space.writable(offset, space.granule()).is_ok(), open);
                if let Some((page, true)) = slot {
                    prop_assert_eq!(read(space, granule), *page);
                }
            }
            mapped += model.granules.iter().flatten().count();
        }
        let counters = self.rig.host.counters();
        prop_assert_eq!(counters.mappings_alive, mapped as u64);
        prop_assert_eq!(counters.pages_alive, alive.len() as u64);
        prop_assert_eq!(self.pool.report().in_use.0, self.pool.granule().0 * alive.len() as u64);
        prop_assert!(self.pool.report().peak <= self.pool.report().limit);
        Ok(())
    }
}

fn run(granularity: Bytes, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut world = World::new(granularity);
    for step in steps {
        world.act(step)?;
        world.check()?;
    }
    let host = Arc::clone(&world.rig.host);
    drop(world);
    prop_assert!(host.counters().nothing_alive(), "{:?}", host.counters());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn behaves_as_a_list_at_64_kib(steps in proptest::collection::vec(step(), 1..40)) {
        run(Bytes::kib(64), &steps)?;
    }

    #[test]
    fn behaves_as_a_list_at_2_mib(steps in proptest::collection::vec(step(), 1..40)) {
        run(Bytes::mib(2), &steps)?;
    }
}
