//! Which units share ring bytes.

use super::ground::Ground;
use super::ring::Placement;
use crate::model::UnitId;

/// For each unit the others that share ring bytes with it, in ascending order.
///
/// A page that a unit takes whole conflicts with everyone in it, which is one pass over a bit set; only the two pages at
/// its ends need a look at bytes. A ring of one slot has a quadratic number of conflicts, so this matters.
pub(super) fn conflicts(ground: &Ground, placement: &Placement) -> Vec<Vec<UnitId>> {
    let units = ground.units.len();
    let words = units.div_ceil(64);
    let ring = placement.ring as usize;
    let mut present = vec![0_u64; ring * words];
    let mut occupants = vec![Vec::new(); ring];
    let ids = || (0..units as u32).map(UnitId);
    for unit in ids() {
        for part in placement.parts(unit, ground.granule) {
            let page = part.page as usize;
            present[page * words + unit.0 as usize / 64] |= 1 << (unit.0 % 64);
            occupants[page].push((unit, part.bytes));
        }
    }
    let mut found = vec![0_u64; words];
    let mut all = Vec::with_capacity(units);
    for unit in ids() {
        found.fill(0);
        for part in placement.parts(unit, ground.granule) {
            let page = part.page as usize;
            if part.bytes == (0..ground.granule) {
                let row = &present[page * words..(page + 1) * words];
                found.iter_mut().zip(row).for_each(|(found, present)| *found |= present);
                continue;
            }
            for (other, bytes) in &occupants[page] {
                if bytes.start < part.bytes.end && part.bytes.start < bytes.end {
                    found[other.0 as usize / 64] |= 1 << (other.0 % 64);
                }
            }
        }
        if !placement.streamed[unit.0 as usize].is_empty() {
            found[unit.0 as usize / 64] &= !(1 << (unit.0 % 64));
        }
        all.push(members(&found));
    }
    all
}

fn members(bits: &[u64]) -> Vec<UnitId> {
    let mut members = Vec::with_capacity(bits.iter().map(|word| word.count_ones() as usize).sum());
    for (index, &word) in bits.iter().enumerate() {
        let mut rest = word;
        while rest != 0 {
            members.push(UnitId(index as u32 * 64 + rest.trailing_zeros()));
            rest &= rest - 1;
        }
    }
    members
}
