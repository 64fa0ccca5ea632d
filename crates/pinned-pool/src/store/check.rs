//! What is refused of a group before anything of it is touched.
#![forbid(unsafe_code)]

use gpu_driver::Bytes;

use super::Places;
use crate::error::{HostError, Result};
use crate::source::SourceTensor;

/// Every tensor on the line, once, and no two overlapping.
pub(super) fn check(group: &[SourceTensor], places: &Places, line: Bytes) -> Result<()> {
    let mut spans: Vec<(u64, u64, u32)> = Vec::with_capacity(group.len());
    for source in group {
        let (id, offset) = (source.id, source.offset);
        let end = offset.saturating_add(source.bytes.size().0);
        if end > line.0 {
            return Err(HostError::OutsideLine { id, offset, end, line });
        }
        if places.offsets.contains_key(&id) {
            return Err(HostError::PlacedTwice { id });
        }
        if offset < end {
            spans.push((offset, end, id));
            // No two placed tensors overlap, so only the last one that begins before `end` can reach here.
            if let Some((at, place)) = places.last_before(end)
                && at + place.bytes.size().0 > offset
            {
                return Err(HostError::Overlap { first: place.id, second: id });
            }
        }
    }
    let mut ids: Vec<u32> = group.iter().map(|source| source.id).collect();
    ids.sort_unstable();
    if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(HostError::PlacedTwice { id: pair[0] });
    }
    spans.sort_unstable();
    match spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(HostError::Overlap { first: pair[0].2, second: pair[1].2 }),
        None => Ok(()),
    }
}
