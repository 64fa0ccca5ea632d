//! How long a step takes under a placement, in microseconds of planning time: the search tries dozens of placements.
//!
//! The same rules as the schedule's, which [`simulate`](crate::simulate) runs itself: copies go in visit order, each after
//! the last use of every unit whose ring bytes it takes; compute of a visit waits for its copy. A test holds the two to
//! one another.

use std::ops::Range;

use super::ground::Ground;
use super::ring::{Pages, Placement, Turns, granules, streamed_parts};
use crate::model::UnitId;
use crate::simulate::COPY_LATENCY;

/// A visit's copy, in a step that repeats.
#[derive(Debug, Clone, Copy, Default)]
struct Copy {
    /// Bytes copied; zero if the unit is resident or still present.
    bytes: u64,
    /// How many visits back the latest use lies that the copy must wait for; zero if there is none.
    wait: usize,
    /// How many visits back the look-ahead lets the copy be issued.
    ahead: usize,
    /// Streamed visits of this step up to this one.
    streamed: u32,
}

/// What a step copies, and what each copy waits for.
#[derive(Debug, Clone)]
pub(super) struct Pattern {
    copies: Vec<Copy>,
}

fn span_bytes(bytes: &Range<u64>) -> u64 {
    bytes.end - bytes.start
}

/// How many steps are run at most to reach the steady state, the last of which is measured. The ring is the only memory from one
/// step to the next and holds less than a step, so it has filled, or never will, after a few.
const STEPS: usize = 6;

impl Pattern {
    /// Follows the order over the ring twice, so that what the step before left is known.
    pub(super) fn new(ground: &Ground, placement: &Placement, order: &[UnitId], look_ahead: u32) -> Self {
        let mut occupants: Vec<Vec<(UnitId, u64, u64)>> = vec![Vec::new(); placement.ring as usize];
        let mut present = vec![false; ground.units.len()];
        let mut last_visit = vec![0_usize; ground.units.len()];
        let mut copies = vec![Copy::default(); order.len()];
        for now in 0..2 * order.len() {
            let index = now % order.len();
            let unit = order[index];
            let id = unit.0 as usize;
            let mut latest = None;
            let mut bytes = 0;
            if !present[id] && !placement.streamed[id].is_empty() {
                for part in placement.parts(unit, ground.granule) {
                    let (from, to) = (part.bytes.start, part.bytes.end);
                    bytes += to - from;
                    let page = &mut occupants[part.page as usize];
                    page.retain(|&(other, start, end)| {
                        let meets = start < to && from < end;
                        if meets && other != unit {
                            present[other.0 as usize] = false;
                            latest = latest.max(Some(last_visit[other.0 as usize]));
                        }
                        !meets
                    });
                    page.push((unit, from, to));
                }
                present[id] = true;
            }
            last_visit[id] = now;
            copies[index] = Copy { bytes, wait: latest.map_or(0, |latest| now - latest), ..Copy::default() };
        }
        let mut pattern = Self { copies };
        pattern.limit(order.iter().map(|unit| !placement.streamed[unit.0 as usize].is_empty()), look_ahead);
        pattern
    }

    /// The same for an order that visits every unit once, in the sequence, without placing anything: positions in the ring
    /// count on from turn to turn, and a copy waits for the latest unit that starts less than a ring's size before its
    /// end. Where the last turn is short, a copy may seem to wait for a later unit than it must; a copy before it waits for
    /// that one in truth. `None` if the order is another, or so little streams that units stay present between steps.
    pub(super) fn in_sequence(
        ground: &Ground,
        heads: &[u32],
        turning: (u32, Turns),
        order: &[UnitId],
        look_ahead: u32,
    ) -> Option<Self> {
        let (ring, turns) = turning;
        let count = ground.line_granules() - heads.iter().sum::<u32>();
        if ground.sequence != order || count < 4 * ring {
            return None;
        }
        let granule = ground.granule;
        let size = u64::from(ring) * granule;
        let streamed = streamed_parts(ground, heads);
        let mut pages = Pages::new(count, ring, turns);
        let mut last_granule = None;
        let mut copied: Vec<(usize, Range<u64>)> = Vec::with_capacity(order.len());
        for (visit, unit) in ground.sequence.iter().enumerate() {
            let bytes = &streamed[unit.0 as usize];
            let touched = granules(bytes, granule);
            if touched.is_empty() {
                continue;
            }
            let mut position = |more: usize, byte: u64| {
                let page = pages.advance(more as u64)?;
                Some(pages.turn() * size + page * granule + byte)
            };
            let start = position(usize::from(last_granule != Some(touched.start)), bytes.start % granule)?;
            let end = position(touched.len() - 1, (bytes.end - 1) % granule)? + 1;
            last_granule = Some(touched.end - 1);
            copied.push((visit, start..end));
        }
        let around = (pages.turn() + 1) * size;
        let mut copies = vec![Copy::default(); order.len()];
        // Copies of the step before come first. The latest that starts less than a turn before this one's end only moves on.
        let place = |number: usize| {
            let (visit, span) = &copied[number % copied.len()];
            if number < copied.len() {
                (*visit, span.start)
            } else {
                (visit + order.len(), span.start + around)
            }
        };
        let mut latest = 0;
        for (number, (visit, span)) in copied.iter().enumerate() {
            let reach = span.end + around - size;
            while latest + 1 < number + copied.len() && place(latest + 1).1 < reach {
                latest += 1;
            }
            let wait = visit + order.len() - place(latest).0;
            copies[*visit] =
                Copy { bytes: span_bytes(&streamed[order[*visit].0 as usize]), wait, ..Copy::default() };
        }
        let mut pattern = Self { copies };
        pattern.limit(order.iter().map(|unit| !streamed[unit.0 as usize].is_empty()), look_ahead);
        Some(pattern)
    }

    /// Sets from which visit on each copy may be issued.
    fn limit(&mut self, streamed: impl Iterator<Item = bool>, look_ahead: u32) {
        let visits = self.copies.len();
        let mut places = Vec::with_capacity(visits);
        for (index, streamed) in streamed.enumerate() {
            if streamed {
                places.push(index);
            }
            self.copies[index].streamed = places.len() as u32;
        }
        let look_ahead = look_ahead as usize;
        for (place, &index) in places.iter().enumerate() {
            self.copies[index].ahead = if look_ahead <= place {
                index - places[place - look_ahead]
            } else if look_ahead <= place + places.len() {
                index + visits - places[place + places.len() - look_ahead]
            } else {
                index + visits
            };
        }
    }

    /// The seconds a step takes in the steady state, `compute` being the seconds of each visit.
    pub(super) fn step_seconds(&self, compute: &[f64], link_bytes_per_second: f64) -> f64 {
        let visits = self.copies.len();
        // Behind the first, the end of each visit's compute: a visit is entered when the one before it has ended.
        let mut ends = vec![0.0_f64; visits * STEPS + 1];
        let seconds_per_byte = link_bytes_per_second.recip();
        let (mut link, mut took) = (0.0_f64, 0.0_f64);
        for step in 0..STEPS {
            for (index, (copy, compute)) in self.copies.iter().zip(compute).enumerate() {
                let now = step * visits + index;
                let mut start = ends[now];
                if copy.bytes > 0 {
                    let issued = ends[now.saturating_sub(copy.ahead)];
                    let free = if copy.wait == 0 { 0.0 } else { ends[(now + 1).saturating_sub(copy.wait)] };
                    let seconds = COPY_LATENCY + copy.bytes as f64 * seconds_per_byte;
                    link = link.max(issued).max(free) + seconds;
                    start = start.max(link);
                }
                ends[now + 1] = start + compute;
            }
            let before = took;
            took = ends[(step + 1) * visits] - ends[step * visits];
            if step > 0 && (took - before).abs() <= 1e-9 * took {
                break;
            }
        }
        took
    }

    /// How many streamed visits after a use, itself counted, its bytes are taken by another copy: the most anywhere in
    /// the step, and the first visit whose copy cannot run during the streamed visit before it.
    pub(super) fn reach(&self) -> (u32, Option<usize>) {
        let visits = self.copies.len();
        let total = self.copies.last().map_or(0, |copy| copy.streamed);
        let (mut most, mut blocked) = (0, None);
        for (index, copy) in self.copies.iter().enumerate().filter(|(_, copy)| copy.bytes > 0) {
            let reach = match copy.wait {
                0 => total,
                wait if wait <= index => copy.streamed - self.copies[index - wait].streamed,
                wait => total + copy.streamed - self.copies[visits + index - wait].streamed,
            };
            most = most.max(reach);
            if reach <= 1 && copy.wait > 0 && blocked.is_none() {
                blocked = Some(index);
            }
        }
        (most, blocked)
    }
}
