//! The choice of the ring: how many pages it has and how the resident rest is spread, by trying placements.
//!
//! A page more in the ring is a page less of resident weights, so that a larger ring copies more; a smaller one makes
//! copies wait for compute. Neither has a closed form for unlike units, but a placement is timed in microseconds.

use super::estimate::Pattern;
use super::ground::Ground;
use super::ring::{Placement, Turns};
use super::spread::{Spread, Weights, heads, least_own, whole};
use crate::model::UnitId;
use crate::simulate::COPY_LATENCY;

/// What a placement is timed with.
#[derive(Debug, Clone)]
pub(super) struct Pace {
    /// The cases of compute to plan for, each with seconds by visit. The mean of their times decides.
    pub(super) cases: Vec<Vec<f64>>,
    pub(super) link_bytes_per_second: f64,
    /// The most streamed visits copied ahead.
    pub(super) look_ahead: u32,
}

/// A placement with its time.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) heads: Vec<u32>,
    pub(super) ring: u32,
    pub(super) turns: Turns,
    pub(super) seconds: f64,
}

/// How a placement is made, apart from its ring's size.
#[derive(Debug, Clone, Copy)]
struct Style {
    weights: usize,
    /// Each unit streams at most a turn of the ring divided by this.
    slots: u64,
    turns: Turns,
    /// Whether only some units stream, each as much as it may.
    sparse: bool,
}

/// A better time than this part below the best so far is worth a larger ring.
const WORTH: f64 = 0.0005;

/// Copies of at most so many latencies are small.
const SMALL_COPIES: f64 = 20.0;

/// About how many visits and granules may be timed in one search: keeps planning 2,000 units below 10 ms.
const EFFORT: u64 = 60_000;

/// The search over placements of one model.
pub(super) struct Search<'a> {
    pub(super) ground: &'a Ground,
    pub(super) order: &'a [UnitId],
    pub(super) pace: &'a Pace,
    pub(super) weights: &'a [Weights],
    /// Pages for the ring and for resident granules outside the base.
    pub(super) pages: u32,
    /// The mean over the cases of a step's compute.
    compute: f64,
    /// Whether a step visits every unit, so that it copies every granule that streams.
    once: bool,
}

/// The best placement so far, and how it was made.
type Best = Option<(u32, Style, Candidate)>;

impl<'a> Search<'a> {
    pub(super) fn new(
        ground: &'a Ground,
        order: &'a [UnitId],
        pace: &'a Pace,
        weights: &'a [Weights],
        pages: u32,
    ) -> Self {
        let compute = pace.cases.iter().flatten().sum::<f64>() / pace.cases.len() as f64;
        let mut visited = vec![false; ground.units.len()];
        for unit in order {
            visited[unit.0 as usize] = true;
        }
        let once = visited.iter().all(|visited| *visited);
        Self { ground, order, pace, weights, pages, compute, once }
    }

    /// The best placement found, or none if not even one unit at a time fits.
    pub(super) fn best(&self) -> Option<Candidate> {
        let smallest = self.smallest_ring()?;
        let styles = self.styles();
        let work =
            (self.order.len() + self.ground.granules as usize / 16) as u64 * self.pace.cases.len() as u64;
        let tries = (EFFORT / work.max(1)).clamp(8, 240) as u32;
        // First a coarse look at all sizes and styles, then a finer one around the best.
        let count = (tries / 2 / styles.len() as u32).max(4);
        let mut coarse = sizes(smallest, self.pages, count);
        coarse.iter_mut().skip(1).for_each(|ring| *ring = self.rounded(*ring));
        coarse.dedup();
        let mut best = None;
        for &ring in &coarse {
            for &style in &styles {
                // Even turns may leave a page unused, or be too short for a unit that takes the whole ring.
                if !self.consider(ring, style, &mut best) {
                    self.consider(ring, Style { turns: Turns::Full, ..style }, &mut best);
                }
            }
        }
        let (ring, style) = best.as_ref().map(|(ring, style, _)| (*ring, *style))?;
        let place = coarse.iter().position(|&size| size == ring).unwrap_or(0);
        let low = coarse[place.saturating_sub(1)];
        let high = coarse[(place + 1).min(coarse.len() - 1)];
        let mut fine: Vec<u32> =
            sizes(low, high, tries / 4).into_iter().flat_map(|ring| [ring, self.rounded(ring)]).collect();
        fine.sort_unstable();
        fine.dedup();
        for ring in fine {
            for turns in [Turns::Full, Turns::Even] {
                self.consider(ring, Style { turns, ..style }, &mut best);
            }
        }
        best.map(|(_, _, candidate)| candidate)
    }

    /// The size from `ring` on at which the streamed granules fill the last turn best. A ring of `n` pages has `n` more
    /// granules stream than the budget lacks, so that a whole number of turns goes round if `n` divides what it lacks.
    fn rounded(&self, ring: u32) -> u32 {
        let lacking = self.ground.line_granules() - self.pages;
        let turns = (lacking / ring).max(1);
        lacking.div_ceil(turns).max(ring).min(self.pages)
    }

    fn styles(&self) -> Vec<Style> {
        let mut styles = Vec::new();
        for weights in 0..self.weights.len() {
            styles.extend([2, 1].map(|slots| Style { weights, slots, turns: Turns::Even, sparse: false }));
        }
        // Where a unit's part is so small that starting its copy costs much of it, fewer copies are worth a try.
        let lacking = f64::from(self.ground.line_granules() - self.pages) * self.ground.granule as f64;
        let seconds = lacking / self.pace.link_bytes_per_second / self.order.len().max(1) as f64;
        if seconds < SMALL_COPIES * COPY_LATENCY {
            styles.extend([2, 1].map(|slots| Style { weights: 0, slots, turns: Turns::Full, sparse: true }));
        }
        styles
    }

    /// Tries a placement, unless none over such a ring can be better; whether there may be one.
    fn consider(&self, ring: u32, style: Style, best: &mut Best) -> bool {
        let (limit, floor) = match best {
            Some((size, _, best)) => {
                let worth = if ring > *size { 1.0 - WORTH } else { 1.0 };
                (best.seconds * worth, self.floor(ring))
            }
            None => (f64::INFINITY, 0.0),
        };
        if floor >= limit {
            return true;
        }
        let Some(candidate) = self.candidate(ring, style) else { return false };
        if candidate.seconds < limit {
            *best = Some((ring, style, candidate));
        }
        true
    }

    /// No placement over a ring of this size is faster: all that does not fit must be copied, and all compute be done.
    fn floor(&self, ring: u32) -> f64 {
        let lacking = self.ground.line_granules() - self.pages;
        // In a ring of more pages than are lacking some belong to one granule each, which then stays.
        let streamed = u64::from(lacking + ring.min(lacking)) * self.ground.granule;
        let copies = if self.once { streamed as f64 / self.pace.link_bytes_per_second } else { 0.0 };
        self.compute.max(copies)
    }

    fn candidate(&self, ring: u32, style: Style) -> Option<Candidate> {
        let own = self.pages.checked_sub(ring)?;
        let streamed = self.ground.line_granules() - own;
        let turn = style.turns.shortest(streamed, ring)?;
        let cap = turn * self.ground.granule / style.slots;
        let least_copy = if style.sparse { cap } else { 0 };
        let spread = Spread { own, cap, least_copy, weights: &self.weights[style.weights] };
        let heads = heads(self.ground, &spread)?;
        let turning = (ring, style.turns);
        let look_ahead = self.pace.look_ahead;
        let pattern = Pattern::in_sequence(self.ground, &heads, turning, self.order, look_ahead)
            .unwrap_or_else(|| {
                let placement = Placement::new(self.ground, &heads, ring, style.turns);
                Pattern::new(self.ground, &placement, self.order, look_ahead)
            });
        let time = |compute: &Vec<f64>| pattern.step_seconds(compute, self.pace.link_bytes_per_second);
        let seconds = self.pace.cases.iter().map(time).sum::<f64>() / self.pace.cases.len() as f64;
        Some(Candidate { heads, ring, turns: style.turns, seconds })
    }

    /// The smallest ring in which every unit fits beside what the others must then keep.
    fn smallest_ring(&self) -> Option<u32> {
        let fits = |ring: u32| fits(self.ground, self.pages, ring, 1);
        // The pages needed fall with the ring as long as several units exceed it, and rise with it from there on: at the
        // largest unit's size they are the fewest.
        let largest =
            self.ground.units.iter().map(|unit| unit.bytes().div_ceil(self.ground.granule)).max()?;
        let (mut low, mut high) = (1, (largest as u32).min(self.pages));
        if !fits(high) {
            return None;
        }
        while low < high {
            let middle = u32::midpoint(low, high);
            if fits(middle) { high = middle } else { low = middle + 1 }
        }
        Some(high)
    }
}

/// Whether a ring of this size, with units of at most its part of `slots`, leaves enough pages for what must be resident.
pub(super) fn fits(ground: &Ground, pages: u32, ring: u32, slots: u64) -> bool {
    pages.checked_sub(ring).is_some_and(|own| {
        least_own(ground, u64::from(ring) * ground.granule / slots)
            .is_some_and(|least| least <= u64::from(own))
    })
}

/// At most `count` sizes from `low` to `high`, each about the same part larger than the one before.
fn sizes(low: u32, high: u32, count: u32) -> Vec<u32> {
    let (from, to) = (f64::from(low.max(1)), f64::from(high.max(low).max(1)));
    let steps = count.max(2) - 1;
    let size = |step: u32| whole(from * (to / from).powf(f64::from(step) / f64::from(steps))) as u32;
    let mut sizes: Vec<u32> = (0..=steps).map(size).collect();
    sizes.dedup();
    sizes
}
