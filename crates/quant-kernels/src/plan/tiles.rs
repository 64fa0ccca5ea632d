//! Matrices that are decoded in tiles, of which only the wanted rows are written.

use super::Job;
use super::run::countable;
use crate::error::Result;

/// The tiles that hold a job's rows, and what kernels count in them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) rows: u64,
    pub(super) columns: u64,
    /// The first row that is wanted, and the one behind the last.
    pub(super) first: u64,
    pub(super) end: u64,
    /// The first row of tiles.
    pub(super) top: u64,
    pub(super) tiles: u64,
}

impl Grid {
    /// Tiles of so many rows, so many beside each other. None if no element is wanted.
    pub(super) fn of(job: &Job<'_>, height: u64, across: u64) -> Result<Option<Self>> {
        let (rows, columns) = (job.weight.rows()?, job.weight.columns());
        if job.first == job.end {
            return Ok(None);
        }
        countable(job, rows, "it has too many rows")?;
        countable(job, columns, "its rows are too long")?;
        let (first, end) = (job.first / columns, job.end / columns);
        let top = first / height;
        let tiles = (end.div_ceil(height) - top) * across;
        countable(job, tiles, "it has too many tiles")?;
        Ok(Some(Self { rows, columns, first, end, top, tiles }))
    }
}
