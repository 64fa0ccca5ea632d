//! How many granules each unit keeps: the resident granules spread over the units so that the link's load is even.

use super::ground::{Ground, GroundUnit};

/// What the streamed bytes of units should be proportional to.
#[derive(Debug, Clone)]
pub(super) enum Weights {
    /// Each unit streams the same part of its bytes: right when compute follows bytes, or is unknown.
    Bytes,
    /// Each unit streams what the link moves during its compute, plus or minus the same time for all: the most even
    /// load. By unit: the bytes the link moves during its compute.
    Hidden(Vec<f64>),
    /// Units copied most often in a step are kept first. By unit: copies a step.
    Copies(Vec<u32>),
}

/// The heads of all units, by unit, in granules: `own` of them in all, each unit streaming at most `cap` bytes. `None`
/// if no heads do that.
pub(super) fn heads(ground: &Ground, own: u32, cap: u64, weights: &Weights) -> Option<Vec<u32>> {
    let least: Vec<u32> = ground.units.iter().map(|unit| least_head(unit, cap, ground.granule)).collect();
    let fits = ground.units.iter().zip(&least).all(|(unit, &least)| least <= unit.capacity);
    let sum = |heads: &[u32]| heads.iter().map(|&head| u64::from(head)).sum::<u64>();
    let most: u64 = ground.units.iter().map(|unit| u64::from(unit.capacity)).sum();
    if !fits || sum(&least) > u64::from(own) || most < u64::from(own) {
        return None;
    }
    let wanted = wanted(ground, own, cap, weights);
    let granule = ground.granule as f64;
    let mut heads = least.clone();
    // Rounding errors are carried to the next unit of the sequence, so that neighbours make up for one another.
    let (mut due, mut given) = (0.0_f64, 0_i64);
    for &unit in &ground.sequence {
        let index = unit.0 as usize;
        let facts = &ground.units[index];
        due += (facts.bytes() as f64 - wanted[index]) / granule;
        let head = (due.round() as i64 - given).clamp(i64::from(least[index]), i64::from(facts.capacity));
        given += head;
        heads[index] = head as u32;
    }
    settle(ground, &least, &mut heads, i64::from(own) - given);
    Some(heads)
}

/// The smallest head with which a unit streams at most `cap` bytes.
fn least_head(unit: &GroundUnit, cap: u64, granule: u64) -> u32 {
    let needed = if unit.bytes() <= cap {
        0
    } else {
        ((unit.span.end - cap).div_ceil(granule) as u32).saturating_sub(unit.first)
    };
    needed.max(unit.forced)
}

/// Gives out what rounding left over, or takes back what it gave too much, a granule a unit and round.
fn settle(ground: &Ground, least: &[u32], heads: &mut [u32], mut left: i64) {
    while left != 0 {
        let before = left;
        for &unit in &ground.sequence {
            let index = unit.0 as usize;
            if left > 0 && heads[index] < ground.units[index].capacity {
                heads[index] += 1;
                left -= 1;
            } else if left < 0 && heads[index] > least[index] {
                heads[index] -= 1;
                left += 1;
            }
        }
        if left == before {
            return; // cannot happen: the caller has checked both sums
        }
    }
}

/// The bytes each unit should stream, by unit, before rounding to granules.
fn wanted(ground: &Ground, own: u32, cap: u64, weights: &Weights) -> Vec<f64> {
    let streamed = f64::from(ground.line_granules() - own) * ground.granule as f64;
    match weights {
        Weights::Bytes => {
            level(ground, cap, streamed, |unit, level| ground.units[unit].bytes() as f64 * level, 1.0)
        }
        Weights::Hidden(hidden) => {
            let most = hidden.iter().copied().fold(0.0, f64::max);
            let span = ground.units.iter().map(|unit| unit.bytes() as f64).fold(most, f64::max);
            // From streaming nothing at all to streaming everything.
            level(ground, cap, streamed, |unit, level| hidden[unit] + (2.0 * level - 1.0) * span, 1.0)
        }
        Weights::Copies(copies) => {
            let most = copies.iter().copied().max().unwrap_or(1);
            // Every class streams in full before the next more frequent one streams at all.
            level(
                ground,
                cap,
                streamed,
                |unit, level| ground.units[unit].bytes() as f64 * (level - f64::from(copies[unit])),
                f64::from(most) + 1.0,
            )
        }
    }
}

/// Each unit's `share(unit, x)`, kept between nothing and all it can stream, for the `x` between zero and `highest` at
/// which the sum is `streamed`. The share must not fall as `x` grows.
fn level(
    ground: &Ground,
    cap: u64,
    streamed: f64,
    share: impl Fn(usize, f64) -> f64,
    highest: f64,
) -> Vec<f64> {
    let share =
        |index: usize, x: f64| share(index, x).clamp(0.0, ground.units[index].bytes().min(cap) as f64);
    let units = 0..ground.units.len();
    let (mut low, mut high) = (0.0, highest);
    // 40 halvings: below a byte for units of up to a terabyte.
    for _ in 0..40 {
        let middle = f64::midpoint(low, high);
        let sum: f64 = units.clone().map(|index| share(index, middle)).sum();
        if sum < streamed { low = middle } else { high = middle }
    }
    units.map(|index| share(index, high)).collect()
}
