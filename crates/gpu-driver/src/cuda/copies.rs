//! Copies to the device: one by one, or as a batch where the driver has that and takes it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{
    CUmemLocation, CUmemLocationType_enum as LocationType, CUmemcpyAttributes,
    CUmemcpySrcAccessOrder_enum as AccessOrder,
};

use super::api::{Api, INVALID_VALUE, MemcpyBatch, NOT_SUPPORTED, SUCCESS};
use crate::error::Result;
use crate::types::{Bytes, HostToDevice, StreamHandle};

/// Streams up to this handle are the legacy and per-thread default streams, which take no batches.
const LAST_SPECIAL_STREAM: u64 = 2;
/// The most copies in one call: batches of tens of thousands crashed or hung drivers of the 580 series, and a few
/// hundred already make the cost of the call disappear.
const BATCH: usize = 256;
/// Batches refused where single copies went through, before batches are given up.
const REFUSALS: u32 = 3;

/// How copies are submitted on one device.
#[derive(Debug, Default)]
pub(super) struct Copies {
    refused: AtomicU32,
}

impl Copies {
    /// Submits `copies`, in a current context.
    ///
    /// # Safety
    /// The contract of [`Driver::copy_to_device`](crate::Driver::copy_to_device).
    pub(super) unsafe fn submit(
        &self,
        api: &Api,
        copies: &[HostToDevice],
        stream: StreamHandle,
        capturing: impl FnOnce() -> Result<bool>,
    ) -> Result<()> {
        let batch = api.memcpy_batch.filter(|_| self.takes_batches(copies, stream));
        // A refused call would end somebody's capture, so that one is not tried.
        let Some(batch) = batch.filter(|_| matches!(capturing(), Ok(false))) else {
            // SAFETY: the caller keeps the contract of the copies.
            return unsafe { submit_each(api, copies, stream) };
        };
        // SAFETY: as above.
        let code = unsafe { submit_batches(batch, copies, stream) };
        if code != INVALID_VALUE && code != NOT_SUPPORTED {
            return api.check("cuMemcpyBatchAsync", code, || describe(copies));
        }
        // Whatever part of the batch was submitted is submitted again: the same bytes to the same place.
        // SAFETY: as above.
        unsafe { submit_each(api, copies, stream) }?;
        let refused = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::warn!(code, refused, "a batch of copies was refused; they went one by one");
        Ok(())
    }

    fn takes_batches(&self, copies: &[HostToDevice], stream: StreamHandle) -> bool {
        let several = copies.iter().filter(|copy| copy.size != Bytes::ZERO).nth(1).is_some();
        several && stream.0 > LAST_SPECIAL_STREAM && self.refused.load(Ordering::Relaxed) < REFUSALS
    }
}

fn describe(copies: &[HostToDevice]) -> String {
    let total: Bytes = copies.iter().map(|copy| copy.size).sum();
    format!(": {} copies of {total} in all", copies.len())
}

/// One call for many copies; stops at the first that is refused.
///
/// # Safety
/// As [`Copies::submit`].
unsafe fn submit_batches(batch: MemcpyBatch, copies: &[HostToDevice], stream: StreamHandle) -> u32 {
    let mut real = copies.iter().filter(|copy| copy.size != Bytes::ZERO).peekable();
    // Location hints are for managed memory only.
    let nowhere = CUmemLocation { type_: LocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
    let mut attributes = CUmemcpyAttributes {
        srcAccessOrder: AccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        srcLocHint: nowhere,
        dstLocHint: nowhere,
        flags: 0,
    };
    // One attribute from copy 0 on. As long as the batch, since its length is read in two ways by implementers.
    let mut first_uses = [0_usize; BATCH];
    while real.peek().is_some() {
        let (mut targets, mut sources, mut sizes) = ([0_u64; BATCH], [0_u64; BATCH], [0_usize; BATCH]);
        let mut count = 0;
        for copy in real.by_ref().take(BATCH) {
            targets[count] = copy.target.0;
            sources[count] = copy.source.expose_provenance() as u64;
            sizes[count] = copy.size.as_usize();
            count += 1;
        }
        let mut failed = usize::MAX;
        // SAFETY: the arrays hold `count` entries and outlive the call, which keeps none of them; the caller
        // vouches for the memory.
        let code = unsafe {
            batch(
                targets.as_mut_ptr(),
                sources.as_mut_ptr(),
                sizes.as_mut_ptr(),
                count,
                &raw mut attributes,
                first_uses.as_mut_ptr(),
                1,
                &raw mut failed,
                stream.0,
            )
        };
        if code != SUCCESS {
            return code;
        }
    }
    SUCCESS
}

/// One call a copy.
///
/// # Safety
/// As [`Copies::submit`].
unsafe fn submit_each(api: &Api, copies: &[HostToDevice], stream: StreamHandle) -> Result<()> {
    for (index, copy) in copies.iter().enumerate().filter(|(_, copy)| copy.size != Bytes::ZERO) {
        // SAFETY: the caller vouches for target, source and size.
        let code = unsafe {
            (api.copy_to_device)(copy.target.0, copy.source.cast::<c_void>(), copy.size.as_usize(), stream.0)
        };
        if code != SUCCESS {
            return api.check("cuMemcpyHtoDAsync", code, || {
                format!(
                    ": copy {index} of {}, {} from {:?} to {:?}",
                    copies.len(),
                    copy.size,
                    copy.source,
                    copy.target
                )
            });
        }
    }
    Ok(())
}
