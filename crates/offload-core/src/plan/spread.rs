//! How many granules each unit keeps: the resident granules spread over the units so that the link's load is even.

use super::ground::Ground;

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

/// What is asked of a spread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spread<'a> {
    /// Granules resident in all, the base region not counted.
    pub(super) own: u32,
    /// The most bytes a unit streams.
    pub(super) cap: u64,
    /// A unit streams nothing until its share and what the units before it were spared come to this many bytes: fewer,
    /// larger copies.
    pub(super) least_copy: u64,
    pub(super) weights: &'a Weights,
}

/// The heads of all units, by unit, in granules. `None` if there are none of that many granules that leave each unit at
/// most `cap` bytes to stream.
pub(super) fn heads(ground: &Ground, spread: &Spread) -> Option<Vec<u32>> {
    let least = least_heads(ground, spread.cap);
    let fits = ground.units.iter().zip(&least).all(|(unit, &least)| least <= unit.most);
    let fewest: u64 = least.iter().map(|&head| u64::from(head)).sum();
    let most: u64 = ground.units.iter().map(|unit| u64::from(unit.most)).sum();
    if !fits || fewest > u64::from(spread.own) || most < u64::from(spread.own) {
        return None;
    }
    let wanted = wanted(ground, spread);
    let granule = ground.granule as f64;
    let mut heads = least.clone();
    // Rounding errors are carried to the next unit of the sequence, so that neighbours make up for one another.
    let (mut bytes, mut due, mut given) = (0.0_f64, 0.0_f64, 0_u64);
    for &unit in &ground.sequence {
        let index = unit.0 as usize;
        let facts = &ground.units[index];
        bytes += facts.bytes() as f64;
        due += wanted[index];
        let resident = whole(bytes / granule).saturating_sub(given);
        let copied = due - (bytes - facts.bytes() as f64 - given as f64 * granule);
        let head = if copied < spread.least_copy.min(facts.bytes()) as f64 {
            u64::from(facts.most).min(resident)
        } else {
            whole((bytes - due) / granule).saturating_sub(given)
        };
        let head = head.clamp(u64::from(least[index]), u64::from(facts.most));
        given += head;
        heads[index] = head as u32;
    }
    settle(ground, &least, &mut heads, i64::from(spread.own) - given.cast_signed());
    Some(heads)
}

/// The fewest resident granules with which every unit streams at most `cap` bytes; `None` if none are enough.
pub(super) fn least_own(ground: &Ground, cap: u64) -> Option<u64> {
    let least = least_heads(ground, cap);
    let fits = ground.units.iter().zip(&least).all(|(unit, &least)| least <= unit.most);
    fits.then(|| least.iter().map(|&head| u64::from(head)).sum())
}

/// The nearest whole number that is not negative.
#[expect(clippy::cast_sign_loss, reason = "the cast saturates at zero, which is what is wanted")]
pub(super) fn whole(number: f64) -> u64 {
    number.round() as u64
}

/// The smallest heads with which every unit streams at most `cap` bytes, by unit.
fn least_heads(ground: &Ground, cap: u64) -> Vec<u32> {
    let granule = ground.granule;
    let mut least = vec![0; ground.units.len()];
    // From the back: where the unit behind must have a head, its first granule holds the last bytes of this one.
    let mut head_behind = None;
    for (index, unit) in ground.units.iter().enumerate().rev() {
        let shared = head_behind.filter(|&behind| behind == unit.span.end / granule);
        let end = shared.map_or(unit.span.end, |behind| behind * granule);
        let needed = if end.saturating_sub(unit.span.start) <= cap {
            0
        } else {
            ((end - cap).div_ceil(granule) as u32).saturating_sub(unit.first)
        };
        least[index] = needed.max(unit.forced);
        if unit.capacity > 0 {
            head_behind = (least[index] > 0).then_some(u64::from(unit.first));
        }
    }
    least
}

/// Gives out what rounding left over, or takes back what it gave too much, a granule a unit and round. Units that stream
/// nothing come last, so that they need no copy.
fn settle(ground: &Ground, least: &[u32], heads: &mut [u32], mut left: i64) {
    let mut spare_whole = true;
    while left != 0 {
        let before = left;
        for &unit in &ground.sequence {
            let index = unit.0 as usize;
            let (capacity, most) = (ground.units[index].capacity, ground.units[index].most);
            if left > 0 && heads[index] < most {
                heads[index] += 1;
                left -= 1;
            } else if left < 0 && heads[index] > least[index] && !(spare_whole && heads[index] == capacity) {
                heads[index] -= 1;
                left += 1;
            }
        }
        if left == before && !std::mem::take(&mut spare_whole) {
            return; // cannot happen: the caller has checked both sums
        }
    }
}

/// The bytes each unit should stream, by unit, before rounding to granules.
fn wanted(ground: &Ground, spread: &Spread) -> Vec<f64> {
    let streamed = f64::from(ground.line_granules() - spread.own) * ground.granule as f64;
    let cap = spread.cap;
    match spread.weights {
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
    let excess = |x: f64| units.clone().map(|index| share(index, x)).sum::<f64>() - streamed;
    let ((mut low, mut short), (mut high, mut over)) = ((0.0, -streamed), (highest, excess(highest)));
    let mut last_was_low = None;
    // False position, with the weight of an end that stays halved; what is left over is settled by granules.
    for _ in 0..24 {
        if over <= 0.0 {
            break;
        }
        let middle = ((low * over - high * short) / (over - short)).clamp(low, high);
        let off = excess(middle);
        if off.abs() < 0.5 * ground.granule as f64 {
            high = middle;
            break;
        }
        let is_low = off < 0.0;
        let weight = if last_was_low == Some(is_low) { 0.5 } else { 1.0 };
        if is_low {
            (low, short, over) = (middle, off, over * weight);
        } else {
            (high, over, short) = (middle, off, short * weight);
        }
        last_was_low = Some(is_low);
    }
    units.map(|index| share(index, high)).collect()
}
