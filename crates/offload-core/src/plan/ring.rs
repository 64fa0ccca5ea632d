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
    /// Places units with the given heads over a ring of `ring` pages.
    ///
    /// The granules that stream take the pages in turn. Where the last turn would not fill the ring, all turns are made
    /// equally short instead (`even`), so that the loss is at most a page or two anywhere rather than all at the wrap
    /// from a step's last unit to the next step's first.
    pub(super) fn new(ground: &Ground, heads: &[u32], ring: u32, even: bool) -> Self {
        let mut backing = vec![Backing::Own; ground.granules as usize];
        let mut own = vec![false; ground.granules as usize];
        for (unit, &head) in ground.units.iter().zip(heads) {
            own[unit.first as usize..(unit.first + head) as usize].fill(true);
        }
        let streamed: Vec<Range<u64>> =
            ground.units.iter().map(|unit| streamed_part(&unit.span, ground.granule, &own)).collect();
        let count = own[ground.base as usize..].iter().filter(|own| !**own).count() as u32;
        let mut pages = Pages::new(count, ring, even);
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

/// What is left of a unit after its own head and the head of the unit behind it, which may hold its last bytes.
fn streamed_part(span: &Range<u64>, granule: u64, own: &[bool]) -> Range<u64> {
    let mut touched = granules(span, granule);
    while !touched.is_empty() && own[touched.start] {
        touched.start += 1;
    }
    while !touched.is_empty() && own[touched.end - 1] {
        touched.end -= 1;
    }
    if touched.is_empty() {
        return span.start..span.start;
    }
    span.start.max(touched.start as u64 * granule)..span.end.min(touched.end as u64 * granule)
}

/// Gives ring pages to streamed granules, turn by turn.
struct Pages {
    count: u64,
    turns: u64,
    turn: u64,
    ring: u64,
    given: u64,
    turn_start: u64,
    turn_end: u64,
}

impl Pages {
    fn new(count: u32, ring: u32, even: bool) -> Self {
        let (count, ring) = (u64::from(count), u64::from(ring.max(1)));
        let turns = if even { count.div_ceil(ring).max(1) } else { 0 };
        let mut pages = Self { count, turns, turn: 0, ring, given: 0, turn_start: 0, turn_end: 0 };
        pages.turn_end = pages.end_of_turn();
        pages
    }

    fn end_of_turn(&self) -> u64 {
        if self.turns == 0 { self.turn_start + self.ring } else { (self.turn + 1) * self.count / self.turns }
    }

    fn next_page(&mut self) -> u32 {
        if self.given == self.turn_end {
            self.turn += 1;
            self.turn_start = self.turn_end;
            self.turn_end = self.end_of_turn();
        }
        let page = self.given - self.turn_start;
        self.given += 1;
        page as u32
    }
}
