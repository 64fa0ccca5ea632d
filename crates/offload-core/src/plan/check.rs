//! Every promise of a plan, checked the slow and obvious way: by looking at each granule and each pair of units.

use std::ops::Range;

use super::{Backing, Plan, PlanError};
use crate::layout::Layout;
use crate::model::UnitId;
use crate::unit_set::UnitSet;

impl Plan {
    /// Whether the plan keeps every promise: each byte of each unit is either resident or streamed by that unit alone,
    /// streamed bytes of a unit are one run that fits in the ring without meeting itself, no ring page is missing or
    /// unused, and two units conflict exactly if they share ring bytes. Debug builds check every plan they make.
    ///
    /// # Errors
    /// The first promise that is broken, as [`PlanError::Inconsistent`].
    pub fn check(&self, layout: &Layout) -> Result<(), PlanError> {
        self.check_pages(layout)?;
        let mut streamed = vec![Vec::new(); self.backing.len()];
        for (index, unit) in self.units.iter().enumerate() {
            let Range { start, end } = unit.streamed;
            if !unit.is_resident() && (start < unit.span.start || end > unit.span.end) {
                return broken(format!("{} streams {start}..{end} outside {:?}", unit.name, unit.span));
            }
            for granule in self.granules(&unit.span) {
                let bytes = self.within(granule, &unit.span);
                let copied = self.within(granule, &unit.streamed);
                let resident = self.backing[granule] == Backing::Own;
                if resident && !copied.is_empty() || !resident && copied != bytes {
                    return broken(format!(
                        "{} has bytes {bytes:?} of granule {granule} ({:?}) and streams {copied:?}",
                        unit.name, self.backing[granule]
                    ));
                }
                if !copied.is_empty() {
                    streamed[granule].push(index);
                }
            }
        }
        for (granule, units) in streamed.iter().enumerate() {
            if (self.backing[granule] == Backing::Own) != units.is_empty() {
                return broken(format!(
                    "granule {granule} is {:?} with streaming units {units:?}",
                    self.backing[granule]
                ));
            }
        }
        self.check_conflicts()
    }

    fn check_pages(&self, layout: &Layout) -> Result<(), PlanError> {
        if self.backing.len() != layout.granules() as usize || self.granule != layout.granule() {
            return broken(format!("{} granules for a line of {}", self.backing.len(), layout.granules()));
        }
        let own = self.backing.iter().filter(|backing| **backing == Backing::Own).count();
        if own != self.own_granules as usize {
            return broken(format!("{own} granules are resident, {} are stated", self.own_granules));
        }
        if self.backing.iter().take(self.base_granules as usize).any(|backing| *backing != Backing::Own) {
            return broken("a granule of the base region streams".to_owned());
        }
        let mut used = vec![false; self.ring_granules as usize];
        for backing in &self.backing {
            if let Backing::Ring(page) = *backing {
                match used.get_mut(page as usize) {
                    Some(used) => *used = true,
                    None => return broken(format!("ring page {page} of {} is used", self.ring_granules)),
                }
            }
        }
        match used.iter().position(|used| !used) {
            Some(page) => broken(format!("ring page {page} of {} is never used", self.ring_granules)),
            None => Ok(()),
        }
    }

    fn check_conflicts(&self) -> Result<(), PlanError> {
        let parts: Vec<Vec<Range<u64>>> =
            self.units.iter().map(|unit| self.ring_bytes_of(&unit.streamed)).collect();
        let meet = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
        for (index, unit) in self.units.iter().enumerate() {
            let own = &parts[index];
            if own.iter().enumerate().any(|(i, a)| own[i + 1..].iter().any(|b| meet(a, b))) {
                return broken(format!("{} meets itself in the ring", unit.name));
            }
            if own.first().map_or(0, |part| part.start) != unit.ring_start {
                return broken(format!(
                    "{} starts at ring byte {}, not where it says",
                    unit.name, unit.ring_start
                ));
            }
            let shares = |other: &usize| {
                *other != index && own.iter().any(|a| parts[*other].iter().any(|b| meet(a, b)))
            };
            let expected: UnitSet =
                (0..self.units.len()).filter(shares).map(|other| UnitId(other as u32)).collect();
            if expected != unit.conflicts {
                return broken(format!(
                    "{} shares ring bytes with {expected:?}, not {:?}",
                    unit.name, unit.conflicts
                ));
            }
        }
        Ok(())
    }

    /// The granules an interval of the line touches.
    fn granules(&self, bytes: &Range<u64>) -> Range<usize> {
        let granule = self.granule.0;
        if bytes.is_empty() {
            0..0
        } else {
            (bytes.start / granule) as usize..bytes.end.div_ceil(granule) as usize
        }
    }

    /// The part of an interval of the line that lies in a granule; `0..0` if none does.
    fn within(&self, granule: usize, bytes: &Range<u64>) -> Range<u64> {
        let start = granule as u64 * self.granule.0;
        let part = bytes.start.max(start)..bytes.end.min(start + self.granule.0);
        if part.is_empty() { 0..0 } else { part }
    }

    /// The ring bytes behind an interval of the line, granule by granule.
    fn ring_bytes_of(&self, bytes: &Range<u64>) -> Vec<Range<u64>> {
        let granule = self.granule.0;
        let on_page = |index: usize| match self.backing[index] {
            Backing::Own => None,
            Backing::Ring(page) => {
                let part = self.within(index, bytes);
                let shift = |byte: u64| byte % granule + u64::from(page) * granule;
                Some(shift(part.start)..shift(part.start) + (part.end - part.start))
            }
        };
        self.granules(bytes).filter_map(on_page).collect()
    }
}

fn broken(what: String) -> Result<(), PlanError> {
    Err(PlanError::Inconsistent { what })
}
