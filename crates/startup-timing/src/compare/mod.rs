//! Several runs of one start: how long each phase takes, how much that varies, and whether two sets of runs differ. Pure.

mod diff;
mod runs;
mod student;

pub use diff::{Comparison, Difference, diff};
pub use runs::{Distribution, RunSet, stats};
