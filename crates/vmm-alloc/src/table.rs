//! Which page stands behind each granule of a range, as data: no driver, no unsafe.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use gpu_driver::Access;

use crate::error::{Result, VmmError};
use crate::page::Page;

/// A granule's page and what may be done there.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub(crate) page: Arc<Page>,
    pub(crate) access: Access,
}

/// The granules of a range, the tail last.
#[derive(Debug)]
pub(crate) struct Table {
    slots: Vec<Option<Slot>>,
    pub(crate) retired: bool,
}

impl Table {
    pub(crate) fn new(granules: usize) -> Self {
        Self { slots: vec![None; granules], retired: false }
    }

    pub(crate) fn whole(&self) -> Range<usize> {
        0..self.slots.len()
    }

    pub(crate) fn get(&self, granule: usize) -> Option<&Slot> {
        self.slots.get(granule).and_then(Option::as_ref)
    }

    /// The slots of a range, for putting them back later.
    pub(crate) fn copy(&self, range: Range<usize>) -> Vec<Option<Slot>> {
        self.slots[range].to_vec()
    }

    pub(crate) fn put(&mut self, first: usize, pages: &[Arc<Page>], access: Access) {
        for (slot, page) in self.slots[first..].iter_mut().zip(pages) {
            *slot = Some(Slot { page: Arc::clone(page), access });
        }
    }

    /// Empties a range; the pages that nothing else holds are released.
    pub(crate) fn clear(&mut self, range: Range<usize>) {
        self.slots[range].fill(None);
    }

    pub(crate) fn set_access(&mut self, range: Range<usize>, access: Access) {
        for slot in self.slots[range].iter_mut().flatten() {
            slot.access = access;
        }
    }

    pub(crate) fn expect_live(&self) -> Result<()> {
        if self.retired { Err(VmmError::Retired) } else { Ok(()) }
    }

    pub(crate) fn expect_unmapped(&self, range: Range<usize>) -> Result<()> {
        match range.clone().find(|&granule| self.slots[granule].is_some()) {
            Some(granule) => Err(VmmError::Mapped { granule: granule as u32 }),
            None => Ok(()),
        }
    }

    pub(crate) fn expect_mapped(&self, range: Range<usize>) -> Result<()> {
        match range.clone().find(|&granule| self.slots[granule].is_none()) {
            Some(granule) => Err(VmmError::Unmapped { granule: granule as u32 }),
            None => Ok(()),
        }
    }

    pub(crate) fn expect_writable(&self, range: Range<usize>) -> Result<()> {
        for granule in range {
            match &self.slots[granule] {
                None => return Err(VmmError::Unmapped { granule: granule as u32 }),
                Some(slot) if slot.access == Access::None => {
                    return Err(VmmError::Guarded { granule: granule as u32 });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// The longest runs of mapped granules inside `range`, in order.
    pub(crate) fn mapped_runs(&self, range: Range<usize>) -> Vec<Range<usize>> {
        runs(range, |granule| self.slots[granule].as_ref().map(|_| ()))
    }
}

/// Mapped runs of one access each, in slots that start at granule `first`.
pub(crate) fn access_runs(slots: &[Option<Slot>]) -> Vec<Range<usize>> {
    runs(0..slots.len(), |index| slots[index].as_ref().map(|slot| slot.access))
}

/// The longest runs inside `range` over which `key` is one and the same `Some`.
fn runs<K: PartialEq>(range: Range<usize>, key: impl Fn(usize) -> Option<K>) -> Vec<Range<usize>> {
    let mut found: Vec<(Range<usize>, K)> = Vec::new();
    for index in range {
        let Some(here) = key(index) else { continue };
        match found.last_mut() {
            Some((run, before)) if run.end == index && *before == here => run.end += 1,
            _ => found.push((index..index + 1, here)),
        }
    }
    found.into_iter().map(|(run, _)| run).collect()
}
