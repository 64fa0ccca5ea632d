//! Buffers at aligned addresses, for reads that may not go where they are wanted.
#![forbid(unsafe_code)]

use super::chunks::WINDOW;

/// What a buffer's address is a multiple of; no device asks for more.
pub(crate) const ALIGN: usize = 4096;
/// A window, and what aligning both of its ends adds.
const SIZE: usize = WINDOW as usize + 2 * ALIGN;

/// Memory for one read, at an aligned address.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    /// A buffer that holds any chunk.
    pub(crate) fn new() -> Self {
        let bytes = vec![0; SIZE + ALIGN];
        let start = bytes.as_ptr().addr().wrapping_neg() % ALIGN;
        Self { bytes, start }
    }

    /// Its first `size` bytes, at most a window and its alignment.
    pub(crate) fn first(&mut self, size: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + size]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_long_enough() {
        let mut buffer = Buffer::new();
        let bytes = buffer.first(SIZE);
        assert_eq!(bytes.as_ptr().addr() % ALIGN, 0);
    }
}
