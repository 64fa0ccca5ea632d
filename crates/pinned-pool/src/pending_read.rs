//! Device bytes on their way to the host, for whoever has other things to submit meanwhile.

use std::mem::ManuallyDrop;

use crate::error::Result;
use crate::event::Event;

/// A copy from the device in flight, made by [`TransferStream::begin_read`](crate::TransferStream::begin_read).
///
/// Dropping it never blocks: if the copy has not run, its buffer is leaked with an error in the log.
#[derive(Debug)]
pub struct PendingRead {
    done: Event,
    buffer: ManuallyDrop<Vec<u8>>,
}

impl PendingRead {
    /// `done` was recorded behind the copy that writes `buffer`.
    pub(crate) fn new(done: Event, buffer: Vec<u8>) -> Self {
        Self { done, buffer: ManuallyDrop::new(buffer) }
    }

    /// Blocks until the bytes have arrived.
    ///
    /// # Errors
    /// If the driver reports a failure; the bytes are lost then.
    pub fn finish(mut self) -> Result<Vec<u8>> {
        self.done.synchronize()?;
        Ok(std::mem::take(&mut *self.buffer))
    }
}

impl Drop for PendingRead {
    fn drop(&mut self) {
        if matches!(self.done.is_reached(), Ok(true)) {
            drop(std::mem::take(&mut *self.buffer));
        } else {
            tracing::error!(bytes = self.buffer.len(), "a read was dropped before it had run: leaked");
        }
    }
}
