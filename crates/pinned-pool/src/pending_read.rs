//! Device bytes on their way to the host, and the memory they arrive in.

use std::mem::ManuallyDrop;

use gpu_driver::Bytes;

use crate::error::Result;
use crate::event::Event;
use crate::system;

/// Host memory in pages of its own. A small allocation may share a page with memory that someone registered, and the
/// driver refuses a copy whose host side is registered in part.
#[derive(Debug, Default)]
pub(crate) struct ReadBuffer {
    memory: Vec<u8>,
    start: usize,
    size: usize,
}

impl ReadBuffer {
    pub(crate) fn new(size: Bytes) -> Self {
        let (size, page) = (size.as_usize(), system::page_size() as usize);
        let memory = vec![0; size.next_multiple_of(page) + page];
        let start = memory.as_ptr().align_offset(page);
        Self { memory, start, size }
    }

    /// Where the bytes go. The memory does not move while this lives.
    pub(crate) fn target(&mut self) -> *mut u8 {
        self.memory[self.start..].as_mut_ptr()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.size]
    }
}

/// A copy from the device in flight, made by [`TransferStream::begin_read`](crate::TransferStream::begin_read).
///
/// Dropping it never blocks: if the copy has not run, its buffer is leaked with an error in the log.
#[derive(Debug)]
pub struct PendingRead {
    done: Event,
    buffer: ManuallyDrop<ReadBuffer>,
}

impl PendingRead {
    /// `done` was recorded behind the copy that writes `buffer`.
    pub(crate) fn new(done: Event, buffer: ReadBuffer) -> Self {
        Self { done, buffer: ManuallyDrop::new(buffer) }
    }

    /// Blocks until the bytes have arrived.
    ///
    /// # Errors
    /// If the driver reports a failure; the bytes are lost then.
    pub fn finish(self) -> Result<Vec<u8>> {
        self.done.synchronize()?;
        Ok(self.buffer.bytes().to_vec())
    }
}

impl Drop for PendingRead {
    fn drop(&mut self) {
        if matches!(self.done.is_reached(), Ok(true)) {
            drop(std::mem::take(&mut *self.buffer));
        } else {
            tracing::error!(bytes = self.buffer.size, "a read was dropped before it had run: leaked");
        }
    }
}
