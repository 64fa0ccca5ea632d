//! From a request to a plan: validation, what is planned for, and what there is to say about the result.

use gpu_driver::Bytes;

use super::conflicts::conflicts;
use super::estimate::Pattern;
use super::ground::{Ground, Sequence};
use super::ring::{Placement, Turns};
use super::search::{Candidate, Pace, Search, fits};
use super::spread::Weights;
use super::{Backing, Plan, PlanError, PlanNote, PlanRequest, UnitPlan};
use crate::layout::Layout;
use crate::model::UnitId;
use crate::unit_set::UnitSet;
use crate::units::Units;

/// The parts of a balanced step's compute that a plan is made for when compute times are unknown. Balanced, compute takes
/// as long as the copies: hiding them is hardest then. With less compute a smaller ring would do, with more any will.
const UNKNOWN_COMPUTE: [f64; 2] = [0.5, 1.0];

/// Makes a plan; [`Plan::new`] documents it.
pub(super) fn build(layout: &Layout, units: &Units, request: &PlanRequest) -> Result<Plan, PlanError> {
    units.check(layout)?;
    check_request(units, request)?;
    let ground = Ground::new(layout, units, Sequence::Visits);
    let pages = pages(&ground, units, request)?;
    if pages >= ground.line_granules() {
        let all: Vec<u32> = ground.units.iter().map(|unit| unit.capacity).collect();
        let placement = Placement::new(&ground, &all, 0, Turns::Full);
        let notes = if layout.granules() > layout.base_granules() {
            vec![PlanNote::EverythingResident]
        } else {
            vec![]
        };
        return Ok(finish(&ground, units, &placement, 0, notes));
    }
    let pace = pace(layout, units, request);
    // What a smaller budget must not make resident may leave no ring that fits: then it counts for nothing.
    let within = request.within.as_deref().filter(|within| within.len() == layout.granules() as usize);
    let kept = within.and_then(|within| choose(layout, units, &pace, pages, Some(within)));
    let chosen = kept.or_else(|| choose(layout, units, &pace, pages, None));
    let (ground, candidate, sequence) = chosen.ok_or_else(|| PlanError::Inconsistent {
        what: format!("no ring fits in {pages} granules, although the largest unit does"),
    })?;
    let placement = Placement::new(&ground, &candidate.heads, candidate.ring, candidate.turns);
    let look_ahead = request.look_ahead.unwrap_or(u32::MAX);
    let (reach, blocked) = Pattern::new(&ground, &placement, &units.order, look_ahead).reach();
    let possible = reach.saturating_sub(1);
    let mut notes = Vec::new();
    if let Some(visit) = blocked {
        let unit = units.units[units.order[visit].0 as usize].name.clone();
        notes.push(PlanNote::OneSlot { unit, two_slots: two_slots(&ground, pages) });
    }
    if sequence == Sequence::Address {
        notes.push(PlanNote::AddressOrder);
    } else if ground.forced() > 0 {
        notes.push(PlanNote::BoundariesResident { granules: ground.forced() });
    }
    if let Some(asked) = request.look_ahead.filter(|&asked| asked > possible) {
        notes.push(PlanNote::LookAheadReduced { asked, possible });
    }
    Ok(finish(&ground, units, &placement, look_ahead.min(reach.max(1)), notes))
}

pub(super) fn check_request(units: &Units, request: &PlanRequest) -> Result<(), PlanError> {
    let rate = request.link_bytes_per_second;
    if !(rate.is_finite() && rate > 0.0) {
        return Err(PlanError::BadLinkRate { bytes_per_second: rate.to_string() });
    }
    match &request.compute {
        Some(times)
            if times.len() != units.order.len()
                || times.iter().any(|time| !(time.is_finite() && *time >= 0.0)) =>
        {
            Err(PlanError::BadComputeTimes { given: times.len(), visits: units.order.len() })
        }
        _ => Ok(()),
    }
}

/// Refuses a budget that holds no plan of the units; [`Plan::check_budget`] documents it.
pub(super) fn check_budget(layout: &Layout, units: &Units, budget: Bytes) -> Result<(), PlanError> {
    units.check(layout)?;
    let request = PlanRequest { budget: Some(budget), ..PlanRequest::default() };
    pages(&Ground::new(layout, units, Sequence::Visits), units, &request).map(|_| ())
}

/// How many granules the budget leaves for the line beside the base, at most all of it.
fn pages(ground: &Ground, units: &Units, request: &PlanRequest) -> Result<u32, PlanError> {
    let Some(budget) = request.budget else { return Ok(ground.line_granules()) };
    let base = u64::from(ground.base);
    let largest = units.units.iter().max_by_key(|unit| unit.span.end - unit.span.start);
    let largest_bytes = largest.map_or(0, |unit| unit.span.end - unit.span.start);
    let minimum = base + largest_bytes.div_ceil(ground.granule);
    let all = budget.0 / ground.granule;
    if all < minimum {
        return Err(PlanError::BudgetTooSmall {
            budget,
            minimum: Bytes(minimum * ground.granule),
            largest_unit: largest.map(|unit| unit.name.clone()).unwrap_or_default(),
            largest_unit_bytes: Bytes(largest_bytes),
            base: Bytes(base * ground.granule),
        });
    }
    Ok((all - base).min(u64::from(ground.line_granules())) as u32)
}

/// The cases of compute to plan for, each with seconds by visit: the given one, or what is assumed of unknown ones.
pub(super) fn compute_cases(layout: &Layout, units: &Units, request: &PlanRequest) -> Vec<Vec<f64>> {
    if let Some(compute) = &request.compute {
        return vec![compute.clone()];
    }
    let bytes = |unit: &UnitId| {
        let span = &units.units[unit.0 as usize].span;
        (span.end - span.start) as f64
    };
    let all: f64 = units.order.iter().map(bytes).sum::<f64>().max(1.0);
    // Compute follows bytes; balanced, it lasts as long as the copies that no plan can avoid.
    let line = Bytes(u64::from(layout.granules()) * layout.granule().0);
    let least_streamed = (line - request.budget.unwrap_or(line)).0 as f64;
    let second = least_streamed / request.link_bytes_per_second / all;
    let case = |part: f64| units.order.iter().map(|unit| bytes(unit) * second * part).collect();
    UNKNOWN_COMPUTE.map(case).to_vec()
}

/// What placements are timed with.
fn pace(layout: &Layout, units: &Units, request: &PlanRequest) -> Pace {
    let cases = compute_cases(layout, units, request);
    let look_ahead = request.look_ahead.unwrap_or(u32::MAX);
    Pace { cases, link_bytes_per_second: request.link_bytes_per_second, look_ahead }
}

/// The best placement in the step's own sequence, or in address order if that is better or the only one that fits. Nothing is
/// resident that is not `within`, if that is given. `None` if no ring fits.
fn choose(
    layout: &Layout,
    units: &Units,
    pace: &Pace,
    pages: u32,
    within: Option<&[Backing]>,
) -> Option<(Ground, Candidate, Sequence)> {
    let ground = |sequence| {
        let ground = Ground::new(layout, units, sequence);
        within.map_or(ground.clone(), |within| ground.within(within))
    };
    let best = |ground: &Ground| {
        let weights = weights(ground, units, pace);
        Search::new(ground, &units.order, pace, &weights, pages).best()
    };
    let visits = ground(Sequence::Visits);
    let by_visits = best(&visits);
    if visits.forced() > 0 || by_visits.is_none() {
        let other = ground(Sequence::Address);
        if let Some(by_address) = best(&other)
            && by_visits.as_ref().is_none_or(|by_visits| by_address.seconds < by_visits.seconds)
        {
            return Some((other, by_address, Sequence::Address));
        }
    }
    by_visits.map(|candidate| (visits, candidate, Sequence::Visits))
}

/// The ways to spread resident granules that are worth trying.
fn weights(ground: &Ground, units: &Units, pace: &Pace) -> Vec<Weights> {
    let mut weights = vec![Weights::Bytes];
    if let [compute] = &pace.cases[..] {
        let mut hidden = vec![0.0; ground.units.len()];
        for (unit, seconds) in units.order.iter().zip(compute) {
            hidden[unit.0 as usize] += seconds * pace.link_bytes_per_second;
        }
        weights.push(Weights::Hidden(hidden));
    }
    let mut copies = vec![0_u32; ground.units.len()];
    let mut before = units.order.last();
    for unit in &units.order {
        // A unit that follows itself is still there.
        copies[unit.0 as usize] += u32::from(before != Some(unit));
        before = Some(unit);
    }
    if copies.iter().any(|&count| count != copies[0]) {
        weights.push(Weights::Copies(copies));
    }
    weights
}

/// The smallest budget in which each unit takes at most half of the ring, if it is more than the `given` pages: with less,
/// fewer bytes copied were worth more than overlap.
fn two_slots(ground: &Ground, given: u32) -> Option<Bytes> {
    let line = ground.line_granules();
    // Fewest where the ring holds two largest units or less; a scan over ring sizes finds the minimum.
    let needed = |ring: u32| {
        let (mut low, mut high) = (ring, line.max(ring) + ring);
        while low < high {
            let middle = u32::midpoint(low, high);
            if fits(ground, middle, ring, 2) { high = middle } else { low = middle + 1 }
        }
        high
    };
    let largest =
        ground.units.iter().map(|unit| unit.bytes().div_ceil(ground.granule)).max().unwrap_or(0) as u32;
    let step = (2 * largest / 64).max(1) as usize;
    let pages = (1..=2 * largest).rev().step_by(step).map(needed).min()?;
    (pages > given).then(|| Bytes(u64::from(pages + ground.base) * ground.granule))
}

fn finish(
    ground: &Ground,
    units: &Units,
    placement: &Placement,
    look_ahead: u32,
    notes: Vec<PlanNote>,
) -> Plan {
    let unit = |(index, conflicts): (usize, UnitSet)| {
        let unit = &units.units[index];
        let first = placement.parts(UnitId(index as u32), ground.granule).next();
        let ring_start = first.map_or(0, |part| u64::from(part.page) * ground.granule + part.bytes.start);
        UnitPlan {
            block: unit.block,
            name: unit.name.clone(),
            span: unit.span.clone(),
            streamed: placement.streamed[index].clone(),
            ring_start,
            conflicts,
        }
    };
    Plan {
        granule: Bytes(ground.granule),
        ring_granules: placement.ring,
        own_granules: placement.backing.iter().filter(|backing| **backing == Backing::Own).count() as u32,
        base_granules: ground.base,
        units: conflicts(ground, placement).into_iter().enumerate().map(unit).collect(),
        backing: placement.backing.clone(),
        order: units.order.clone(),
        look_ahead,
        notes,
    }
}
