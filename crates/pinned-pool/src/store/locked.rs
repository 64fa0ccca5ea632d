//! The registrations of a store, and runs cut at their borders: a copy whose source is registered only in part, or lies in
//! two registrations even if they touch, is refused by the driver (`INVALID_VALUE`, seen on driver 580).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use gpu_driver::Bytes;

use crate::registered::{KeepAlive, Registered};
use crate::source::{HostRun, LineRun};

/// Registrations by address; no two overlap.
#[derive(Debug, Default)]
pub(super) struct Locked(BTreeMap<u64, Arc<Registered>>);

impl Locked {
    pub(super) fn insert(&mut self, registered: Arc<Registered>) {
        self.0.insert(registered.address() as u64, registered);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.0.values().map(|registered| registered.size()).sum()
    }

    /// The parts of `pages` that are not registered.
    pub(super) fn missing(&self, pages: Range<u64>) -> Vec<Range<u64>> {
        let cuts = self.cut(pages);
        cuts.into_iter().filter(|(_, registered)| registered.is_none()).map(|(range, _)| range).collect()
    }

    /// Whether all of `range` is registered.
    pub(super) fn covers(&self, range: Range<u64>) -> bool {
        self.missing(range).is_empty()
    }

    /// Whether one registration holds all of `range`, so that the driver copies it in one piece.
    pub(super) fn holds_whole(&self, range: Range<u64>) -> bool {
        matches!(&self.cut(range)[..], [(_, Some(_))])
    }

    /// Appends `run` to `runs`, cut so that each piece lies in one registration, which it then holds, or in none.
    pub(super) fn split(&self, run: &HostRun, runs: &mut Vec<LineRun>) {
        let whole = run.bytes.range();
        for (piece, registered) in self.cut(whole.clone()) {
            let keep: KeepAlive = match registered {
                Some(registered) => Arc::new((Arc::clone(registered), Arc::clone(run.bytes.keep()))),
                None => Arc::clone(run.bytes.keep()),
            };
            let skip = piece.start - whole.start;
            let (offset, size) = (run.offset + skip, Bytes(piece.end - piece.start));
            let bytes = run.bytes.part(skip, size, keep);
            runs.push(match registered {
                Some(_) => LineRun::Locked(HostRun::new(offset, bytes)),
                None => LineRun::Staged { offset, bytes: bytes.into() },
            });
        }
    }

    /// `range` in pieces of one registration or none each.
    fn cut(&self, range: Range<u64>) -> Vec<(Range<u64>, Option<&Arc<Registered>>)> {
        let mut pieces = Vec::new();
        let mut at = range.start;
        let before = self.0.range(..=range.start).next_back().map_or(range.start, |(&start, _)| start);
        for (&start, registered) in self.0.range(before..range.end.max(before)) {
            let end = (start + registered.size().0).min(range.end);
            if end <= at {
                continue;
            }
            if start > at {
                pieces.push((at..start, None));
                at = start;
            }
            pieces.push((at..end, Some(registered)));
            at = end;
        }
        if at < range.end {
            pieces.push((at..range.end, None));
        }
        pieces
    }
}
