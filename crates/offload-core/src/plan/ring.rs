//! Where streamed bytes lie: which interval of a unit streams, and which ring page each of its granules shares.

use std::ops::Range;

use super::Backing;
use super::ground::Ground;
use crate::model::UnitId;

/// A split of the line in resident and streamed granules, with a ring page for each streamed one.
#[derive(Debug, Clone)]
pub(super) struct Placement {
    /// Pages of the ring.
    pub(super) ring: u32,
    /// By granule of the line.
    pub(super) backing: Vec<Backing>,
    /// By unit: what streams.
    pub(super) streamed: Vec<Range<u64>>,
}

impl Placement {
    /// Places units with the given heads over a ring of `ring` pages. No unit may stream more than the shortest turn.
    pub(super) fn new(ground: &Ground, heads: &[u32], ring: u32, turns: Turns) -> Self {
        let mut backing = vec![Backing::Own; ground.granules as usize];
        let streamed = streamed_parts(ground, heads);
        let count = ground.line_granules() - heads.iter().sum::<u32>();
        let mut pages = Pages::new(count, ring, turns);
        let mut last = None;
        for &unit in &ground.sequence {
            for granule in granules(&streamed[unit.0 as usize], ground.granule) {
                if last != Some(granule) {
                    backing[granule] = Backing::Ring(pages.next_page());
                    last = Some(granule);
                }
            }
        }
        Self { ring, backing, streamed }
    }

    /// The parts of ring pages a unit streams into, in the order of its bytes.
    pub(super) fn parts(&self, unit: UnitId, granule: u64) -> impl Iterator<Item = PagePart> + '_ {
        let streamed = self.streamed[unit.0 as usize].clone();
        granules(&streamed, granule).filter_map(move |index| match self.backing[index] {
            Backing::Own => None,
            Backing::Ring(page) => {
                let start = index as u64 * granule;
                let from = streamed.start.max(start) - start;
                let to = streamed.end.min(start + granule) - start;
                Some(PagePart { page, bytes: from..to })
            }
        })
    }
}

/// How streamed granules go round the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turns {
    /// Every turn takes all pages. If the last one does not, the first units of a step wait for units that lie only so many
    /// pages back.
    Full,
    /// All turns take nearly the same number of pages, so that what the last one lacks is a page or two of each.
    Even,
}

impl Turns {
    /// The pages of the shortest turn, the last of full ones not counted, when `count` granules stream; `None` if pages of
    /// the ring would never be used.
    pub(super) fn shortest(self, count: u32, ring: u32) -> Option<u64> {
        match self {
            Self::Full => (ring <= count).then_some(u64::from(ring)),
            Self::Even => {
                let turns = count.div_ceil(ring.max(1)).max(1);
                (count.div_ceil(turns) == ring).then_some(u64::from(count / turns))
            }
        }
    }
}

/// Bytes of a ring page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PagePart {
    pub(super) page: u32,
    pub(super) bytes: Range<u64>,
}

/// The granules that hold bytes of an interval of the line.
pub(super) fn granules(bytes: &Range<u64>, granule: u64) -> Range<usize> {
    if bytes.is_empty() {
        0..0
    } else {
        (bytes.start / granule) as usize..bytes.end.div_ceil(granule) as usize
    }
}

/// What is left of each unit after its own head and the head of the unit behind it, which may hold its last bytes.
pub(super) fn streamed_parts(ground: &Ground, heads: &[u32]) -> Vec<Range<u64>> {
    let granule = ground.granule;
    let mut parts = vec![0..0; heads.len()];
    let mut head_behind = None;
    for (index, (unit, &head)) in ground.units.iter().zip(heads).enumerate().rev() {
        let mut start = unit.span.start;
        if head > 0 {
            start = start.max(u64::from(unit.first + head) * granule);
        }
        let shared = head_behind.filter(|&behind| behind == unit.span.end / granule);
        let end = shared.map_or(unit.span.end, |behind| behind * granule);
        parts[index] = if start < end { start..end } else { unit.span.start..unit.span.start };
        if unit.capacity > 0 {
            head_behind = (head > 0).then_some(u64::from(unit.first));
        }
    }
    parts
}

/// Gives ring pages to streamed granules, turn by turn.
pub(super) struct Pages {
    count: u64,
    /// How many turns there are if they are even.
    turns: Option<u64>,
    ring: u64,
    turn: u64,
    given: u64,
    turn_start: u64,
    turn_end: u64,
}

impl Pages {
    pub(super) fn new(count: u32, ring: u32, turns: Turns) -> Self {
        let (count, ring) = (u64::from(count), u64::from(ring));
        let turns = match turns {
            Turns::Full => None,
            Turns::Even => Some(count.div_ceil(ring.max(1)).max(1)),
        };
        let mut pages = Self { count, turns, ring, turn: 0, given: 0, turn_start: 0, turn_end: 0 };
        pages.turn_end = pages.end_of_turn();
        pages
    }

    fn end_of_turn(&self) -> u64 {
        match self.turns {
            None => self.turn_start + self.ring,
            Some(turns) => (self.turn + 1) * self.count / turns,
        }
    }

    pub(super) fn next_page(&mut self) -> u32 {
        if self.given == self.turn_end {
            self.turn += 1;
            self.turn_start = self.turn_end;
            self.turn_end = self.end_of_turn();
        }
        let page = self.given - self.turn_start;
        self.given += 1;
        page as u32
    }

    /// Gives several in one go; the last one.
    pub(super) fn advance(&mut self, pages: u64) -> Option<u64> {
        self.given += pages;
        while self.given > self.turn_end {
            self.turn += 1;
            self.turn_start = self.turn_end;
            self.turn_end = self.end_of_turn();
        }
        self.given.checked_sub(self.turn_start + 1)
    }

    /// The turn that the last page was given in.
    pub(super) fn turn(&self) -> u64 {
        self.turn
    }
}
