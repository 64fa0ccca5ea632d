//! A copy worked out once and submitted many times: the steady step builds no lists and allocates nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_driver::{Bytes, HostToDevice};
use vmm_alloc::{AddressSpace, VmmError};

use crate::error::Result;
use crate::registered::KeepAlive;
use crate::source::HostRun;

/// No epoch of a range: nothing was checked yet.
const UNCHECKED: u64 = u64::MAX;

/// Host runs with the device addresses they go to, and everything that must live while they are copied.
#[derive(Debug)]
pub struct PreparedCopy {
    space: Arc<AddressSpace>,
    copies: Box<[HostToDevice]>,
    bytes: Bytes,
    /// The space's epoch at which all targets were last found mapped and open.
    checked: AtomicU64,
    /// Never read: the sources live as long as this.
    _keep: Box<[KeepAlive]>,
}

impl PreparedCopy {
    /// Works out the copy of `runs` into `space`, each to its own offset. The targets need not be mapped yet.
    ///
    /// # Errors
    /// If a run reaches beyond the range.
    pub fn new(space: &Arc<AddressSpace>, runs: &[HostRun]) -> Result<Arc<Self>> {
        let runs: Vec<&HostRun> = runs.iter().filter(|run| run.bytes.size() > Bytes::ZERO).collect();
        for run in &runs {
            let (offset, end) = (run.offset, run.offset.saturating_add(run.bytes.size().0));
            if end > space.size().0 {
                return Err(VmmError::OutOfBounds { offset, end, size: space.size() }.into());
            }
        }
        let copies = runs.iter().map(|run| HostToDevice {
            target: space.address().offset(Bytes(run.offset)),
            source: run.bytes.address(),
            size: run.bytes.size(),
        });
        Ok(Arc::new(Self {
            space: Arc::clone(space),
            copies: copies.collect(),
            bytes: runs.iter().map(|run| run.bytes.size()).sum(),
            checked: AtomicU64::new(UNCHECKED),
            _keep: runs.iter().map(|run| Arc::clone(run.bytes.keep())).collect(),
        }))
    }

    /// How many bytes are copied.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// In how many pieces they are copied, all submitted by one driver call.
    pub fn pieces(&self) -> usize {
        self.copies.len()
    }

    /// The range the copy goes to.
    pub fn space(&self) -> &Arc<AddressSpace> {
        &self.space
    }

    pub(crate) fn copies(&self) -> &[HostToDevice] {
        &self.copies
    }

    /// Checks that every target is mapped and open; costs two loads while the range's epoch stands still.
    pub(crate) fn check(&self) -> Result<()> {
        let epoch = self.space.epoch();
        if self.checked.load(Ordering::Acquire) == epoch {
            return Ok(());
        }
        for copy in &self.copies {
            self.space.writable(copy.target.0 - self.space.address().0, copy.size)?;
        }
        self.checked.store(epoch, Ordering::Release);
        Ok(())
    }
}
