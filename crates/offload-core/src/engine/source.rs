//! Where a model's bytes are in host memory or in files.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::ops::Range;

use gpu_driver::{Bytes, DeviceOrdinal};
use pinned_pool::{HostStore, LineRun};

use super::error::{EngineError, Result};
use crate::layout::Layout;
use crate::model::TensorId;

/// Host bytes that are copied to one place, and the device whose link reads them.
#[derive(Debug, Clone)]
pub struct SourcePart {
    /// The bytes, what keeps them alive, and where on the address line they go.
    pub run: LineRun,
    /// The device that reads them.
    pub reader: DeviceOrdinal,
}

/// Host memory and files with all the bytes of a model.
pub trait Source: Debug + Send + Sync {
    /// Where the bytes `line` of the address line come from, in ascending order. What lies between tensors may be left
    /// out.
    fn parts(&self, line: &Range<u64>) -> Vec<SourcePart>;
}

/// A store whose bytes are all read by one device.
#[derive(Debug)]
pub struct StoreSource {
    /// The bytes.
    pub store: HostStore,
    /// The device.
    pub reader: DeviceOrdinal,
}

impl Source for StoreSource {
    fn parts(&self, line: &Range<u64>) -> Vec<SourcePart> {
        let part = |run| SourcePart { run, reader: self.reader };
        self.store.line_runs(line.clone()).into_iter().map(part).collect()
    }
}

/// Refuses a source that lacks bytes of a tensor: they would be read as whatever the page held before.
pub(super) fn check_source(source: &dyn Source, layout: &Layout) -> Result<()> {
    let line = 0..u64::from(layout.granules()) * layout.granule().0;
    let mut stretches: Vec<Range<u64>> = Vec::new();
    for part in source.parts(&line) {
        let (start, Bytes(size)) = (part.run.offset(), part.run.size());
        match stretches.last_mut() {
            Some(last) if last.end == start => last.end += size,
            _ => stretches.push(start..start + size),
        }
    }
    for tensor in (0..layout.tensors() as u32).map(TensorId) {
        let (start, bytes) = (layout.offset(tensor), layout.bytes(tensor));
        let after = stretches.partition_point(|stretch| stretch.start <= start);
        let covered = after.checked_sub(1).is_some_and(|index| stretches[index].end >= start + bytes.0);
        if bytes > Bytes::ZERO && !covered {
            return Err(EngineError::NoSource { tensor, bytes });
        }
    }
    Ok(())
}
