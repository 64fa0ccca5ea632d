//! Which tensors may stay where they are, and the page ranges to register for them.
#![forbid(unsafe_code)]

use std::ops::Range;

use gpu_driver::Bytes;

use crate::maps::{HostMaps, MemoryKind};
use crate::ranges::Ranges;
use crate::source::SourceTensor;
use crate::system;

/// Tensors that share one unbroken run of pages.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) pages: Range<u64>,
    /// Positions in the group.
    pub(super) members: Vec<usize>,
}

/// The runs of at least `shortest` bytes that tensors of the group form in anonymous memory. Tensors that share a page, or
/// whose pages touch, are one run, so that no page is registered twice.
pub(super) fn candidates(group: &[SourceTensor], maps: &HostMaps, shortest: Bytes) -> Vec<Candidate> {
    let pages: Vec<Option<Range<u64>>> = group.iter().map(|source| anonymous_pages(source, maps)).collect();
    let mut merged = Ranges::default();
    for range in pages.iter().flatten() {
        merged.insert(range.clone());
    }
    let long = merged.iter().filter(|run| run.end - run.start >= shortest.0);
    let mut candidates: Vec<Candidate> = long.map(|pages| Candidate { pages, members: Vec::new() }).collect();
    for (index, range) in pages.iter().enumerate() {
        let Some(range) = range else { continue };
        let home = candidates.iter_mut().find(|candidate| candidate.pages.contains(&range.start));
        if let Some(candidate) = home {
            candidate.members.push(index);
        }
    }
    candidates
}

/// The whole pages a tensor touches, if all of them are anonymous memory.
fn anonymous_pages(source: &SourceTensor, maps: &HostMaps) -> Option<Range<u64>> {
    let bytes = source.bytes.range();
    if bytes.is_empty() {
        return None;
    }
    let page = system::page_size();
    let pages = bytes.start / page * page..bytes.end.checked_next_multiple_of(page)?;
    (maps.kind(pages.clone()) == MemoryKind::Anonymous).then_some(pages)
}
