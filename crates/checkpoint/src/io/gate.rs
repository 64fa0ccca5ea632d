//! What stands between a read and what is believed of it. Nothing, in earnest; tests put faults there.
#![forbid(unsafe_code)]

use std::io::IoSliceMut;

use rustix::io::Errno;

/// The way a read goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// `pread`, through the page cache.
    Buffered,
    /// `pread` past the page cache.
    Direct,
    /// `io_uring`, past the page cache.
    Uring,
}

/// The result of one read as the system gave it.
pub(crate) type Outcome = Result<usize, Errno>;

/// Sees every outcome, and may give another: fewer bytes, or an error.
pub(crate) trait Gate: Sync {
    /// The outcome to go on with.
    fn pass(&self, route: Route, outcome: Outcome) -> Outcome;
}

/// Changes nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Open;

impl Gate for Open {
    fn pass(&self, _: Route, outcome: Outcome) -> Outcome {
        outcome
    }
}

/// What a gate makes of the outcome of a read into `target`. Bytes that the gate takes back are overwritten, so that
/// nobody gets away with using them.
pub(crate) fn pass(gate: &dyn Gate, route: Route, target: &mut [u8], outcome: Outcome) -> Outcome {
    pass_vectored(gate, route, &mut [IoSliceMut::new(target)], outcome)
}

/// The same for a read into several targets.
pub(crate) fn pass_vectored(
    gate: &dyn Gate,
    route: Route,
    targets: &mut [IoSliceMut<'_>],
    outcome: Outcome,
) -> Outcome {
    let seen = gate.pass(route, outcome);
    if seen == outcome {
        return seen;
    }
    let (mut had, mut left) = (outcome.unwrap_or(0), seen.unwrap_or(0));
    for target in targets {
        let size = target.len().min(had);
        if left < size {
            target[left..size].fill(0xEE);
        }
        had -= size;
        left = left.saturating_sub(size);
    }
    seen
}
