//! From a request to a plan: validation, the choice of the ring, and the notes.

use gpu_driver::Bytes;

use super::conflicts::conflicts;
use super::ground::{Ground, Sequence};
use super::ring::Placement;
use super::spread::{Weights, heads};
use super::{Backing, Plan, PlanError, PlanNote, PlanRequest, UnitPlan};
use crate::layout::Layout;
use crate::units::Units;

pub(super) fn build(layout: &Layout, units: &Units, request: &PlanRequest) -> Result<Plan, PlanError> {
    units.check_order()?;
    let ground = Ground::new(layout, units, Sequence::Visits);
    let line = ground.line_granules();
    let pages = match request.budget {
        None => line,
        Some(budget) => {
            let all = budget.0 / ground.granule;
            let base = u64::from(ground.base);
            let most = ground.units.iter().map(|u| u.bytes().div_ceil(ground.granule)).max().unwrap_or(0);
            if all < base + most {
                let largest = units.units.iter().max_by_key(|u| u.span.end - u.span.start);
                return Err(PlanError::BudgetTooSmall {
                    budget,
                    minimum: Bytes((base + most) * ground.granule),
                    largest_unit: largest.map(|u| u.name.clone()).unwrap_or_default(),
                    largest_unit_bytes: Bytes(largest.map_or(0, |u| u.span.end - u.span.start)),
                    base: Bytes(base * ground.granule),
                });
            }
            (all - base).min(u64::from(line)) as u32
        }
    };
    if pages >= line {
        let all: Vec<u32> = ground.units.iter().map(|u| u.capacity).collect();
        let placement = Placement::new(&ground, &all, 0, false);
        return Ok(finish(&ground, units, &placement, 0, vec![PlanNote::EverythingResident]));
    }
    for ground in [ground, Ground::new(layout, units, Sequence::Address)] {
        for slots in [2, 1] {
            for ring in 1..=pages {
                let cap = u64::from(ring) * ground.granule / slots;
                if let Some(heads) = heads(&ground, pages - ring, cap, &Weights::Bytes) {
                    let placement = Placement::new(&ground, &heads, ring, false);
                    let mut notes = Vec::new();
                    if slots == 1 {
                        notes.push(PlanNote::OneSlot { unit: String::new(), two_slots: Bytes(0) });
                    }
                    return Ok(finish(&ground, units, &placement, slots as u32 - 1, notes));
                }
            }
        }
    }
    Err(PlanError::Inconsistent { what: format!("no ring fits in {pages} granules") })
}

fn finish(
    ground: &Ground,
    units: &Units,
    placement: &Placement,
    look_ahead: u32,
    notes: Vec<PlanNote>,
) -> Plan {
    let conflicts = conflicts(ground, placement);
    let unit_plans = units.units.iter().zip(conflicts).enumerate().map(|(index, (unit, conflicts))| {
        let streamed = placement.streamed[index].clone();
        let ring_start = placement
            .parts(crate::model::UnitId(index as u32), ground.granule)
            .next()
            .map_or(0, |part| u64::from(part.page) * ground.granule + part.bytes.start);
        UnitPlan {
            block: unit.block,
            name: unit.name.clone(),
            span: unit.span.clone(),
            streamed,
            ring_start,
            conflicts,
        }
    });
    Plan {
        granule: Bytes(ground.granule),
        backing: placement.backing.clone(),
        ring_granules: placement.ring,
        own_granules: placement.backing.iter().filter(|b| **b == Backing::Own).count() as u32,
        base_granules: ground.base,
        units: unit_plans.collect(),
        order: units.order.clone(),
        look_ahead,
        notes,
    }
}
