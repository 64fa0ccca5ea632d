//! Exclusive times and gaps: whose time it was. Pure.
//!
//! ```text
//!   recording   |────────────────────────────────────────|
//!   a             |────────────|         |──|                exclusive of a: what no child covers
//!     b             |────|                                   gap: what no top phase covers
//!     c                |───|                                 overlap: where b and c run at once
//! ```
//!
//! **Σ exclusive + gap − overlap = duration of the recording,** to the nanosecond.

use crate::error::{Result, TimingError};
use crate::phase::{Phase, PhaseId};
use crate::report::Report;

/// What follows from where phases lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Analysis {
    /// For each phase, the nanoseconds that none of its children covers.
    pub exclusive: Vec<u64>,
    /// Nanoseconds of the recording that no phase covers.
    pub gap: u64,
    /// Nanoseconds that children of one parent ran at once, counted once for each beyond the first.
    pub overlap: u64,
    /// For each phase, its children in the order of their beginning; the last list is of those without a parent.
    pub children: Vec<Vec<usize>>,
    /// For each phase, how many phases it lies in.
    pub depth: Vec<usize>,
}

/// The most bytes that all paths of a report may have together: a real one has thousands.
const MAX_PATHS: usize = 256 << 20;

impl Analysis {
    /// Works it out.
    pub fn of(report: &Report) -> Result<Self> {
        let phases = &report.phases;
        let mut children: Vec<Vec<usize>> = vec![Vec::new(); phases.len() + 1];
        let mut depth = vec![0; phases.len()];
        for (index, phase) in phases.iter().enumerate() {
            let parent = match phase.parent {
                None => phases.len(),
                Some(id) => {
                    let parent = id.index().filter(|&parent| parent < index);
                    parent.ok_or(TimingError::UnknownPhase(id))?
                }
            };
            depth[index] = depth.get(parent).map_or(0, |depth| depth + 1);
            children[parent].push(index);
        }
        let mut exclusive = Vec::with_capacity(phases.len());
        let mut overlap = 0_u64;
        for (phase, children) in phases.iter().zip(&children) {
            let (covered, sum) = covered(phases, children);
            overlap = overlap.saturating_add(sum - covered);
            exclusive.push(phase.duration.saturating_sub(covered));
        }
        let (top, sum) = covered(phases, &children[phases.len()]);
        overlap = overlap.saturating_add(sum - top);
        Ok(Self { exclusive, gap: report.duration.saturating_sub(top), overlap, children, depth })
    }

    /// The phases in the order of a walk through the tree: each before its children.
    pub fn walk(&self) -> Vec<usize> {
        let mut order = Vec::with_capacity(self.exclusive.len());
        let mut open: Vec<usize> = self.top().iter().rev().copied().collect();
        while let Some(index) = open.pop() {
            order.push(index);
            open.extend(self.children[index].iter().rev());
        }
        order
    }

    /// Phases without a parent.
    pub fn top(&self) -> &[usize] {
        self.children.last().map_or(&[], Vec::as_slice)
    }

    /// The names from the top down to each phase, joined. A report whose paths would take too much memory is refused.
    pub fn paths(
        &self,
        phases: &[Phase],
        separator: &str,
        clean: impl Fn(&Phase) -> String,
    ) -> Result<Vec<String>> {
        let mut paths: Vec<String> = Vec::with_capacity(phases.len());
        let mut bytes = 0;
        for phase in phases {
            let above = phase.parent.and_then(PhaseId::index).and_then(|parent| paths.get(parent));
            let name = clean(phase);
            let path = above.map_or_else(|| name.clone(), |above| format!("{above}{separator}{name}"));
            bytes += path.len();
            if bytes > MAX_PATHS {
                let (bytes, limit) = (bytes as u64, MAX_PATHS as u64);
                return Err(TimingError::TooLarge { what: "the report's tree".into(), bytes, limit });
            }
            paths.push(path);
        }
        Ok(paths)
    }
}

/// How much of the time some phase of the list covers, and the sum of their durations.
fn covered(phases: &[Phase], list: &[usize]) -> (u64, u64) {
    let mut list: Vec<&Phase> = list.iter().map(|&index| &phases[index]).collect();
    list.sort_by_key(|phase| (phase.start, phase.duration));
    let (mut union, mut sum, mut until) = (0_u64, 0_u64, 0_u64);
    for phase in list {
        let end = phase.end();
        union = union.saturating_add(end.saturating_sub(phase.start.max(until)));
        sum = sum.saturating_add(phase.duration);
        until = until.max(end);
    }
    (union, sum)
}
