//! Writes GGUF files as they are described, right or wrong: shares nothing with the reader.

use std::path::Path;

use checkpoint::gguf::{GgufHeader, MemorySource, read_header};
use checkpoint::{CheckpointError, FileHeader, Limits};

/// Bytes being put together.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Bytes {
    /// The fixed fields of a file of version 3.
    pub(crate) fn file(tensors: u64, entries: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(3).u64(tensors).u64(entries)
    }

    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u32(self, number: u32) -> Self {
        self.raw(&number.to_le_bytes())
    }

    pub(crate) fn u64(self, number: u64) -> Self {
        self.raw(&number.to_le_bytes())
    }

    pub(crate) fn text(self, text: &str) -> Self {
        self.u64(text.len() as u64).raw(text.as_bytes())
    }

    /// A key and a 32-bit value.
    pub(crate) fn entry_u32(self, key: &str, value: u32) -> Self {
        self.text(key).u32(4).u32(value)
    }

    /// A key and text.
    pub(crate) fn entry_text(self, key: &str, value: &str) -> Self {
        self.text(key).u32(8).text(value)
    }

    /// A key and a list of 64-bit integers with sign.
    pub(crate) fn entry_list(self, key: &str, values: &[i64]) -> Self {
        let list = self.text(key).u32(9).u32(11).u64(values.len() as u64);
        values.iter().fold(list, |list, value| list.raw(&value.to_le_bytes()))
    }

    /// A tensor's entry; dimensions fastest first.
    pub(crate) fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let head = self.text(name).u32(dims.len() as u32);
        dims.iter().fold(head, |head, dim| head.u64(*dim)).u32(kind).u64(offset)
    }

    /// Zeros up to a multiple.
    pub(crate) fn pad(mut self, alignment: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(alignment), 0);
        self
    }

    /// Zeros.
    pub(crate) fn zeros(mut self, count: usize) -> Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }
}

/// Reads a header strictly, within the default limits.
pub(crate) fn read(bytes: &[u8]) -> Result<(FileHeader, GgufHeader), CheckpointError> {
    read_within(bytes, &Limits::default())
}

/// Reads a header strictly.
pub(crate) fn read_within(
    bytes: &[u8],
    limits: &Limits,
) -> Result<(FileHeader, GgufHeader), CheckpointError> {
    read_header(&MemorySource::new(Path::new("m.gguf"), bytes), 0, limits, false)
}

/// What is said of a file, without its name.
pub(crate) fn refusal(bytes: &[u8]) -> String {
    let error = read(bytes).expect_err("refused").to_string();
    error.strip_prefix("cannot read m.gguf as GGUF: ").unwrap_or(&error).to_owned()
}

/// The checksum that zlib calls crc32.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    let table: Vec<u32> = (0..256_u32)
        .map(|byte| {
            (0..8).fold(byte, |crc, _| if crc & 1 == 1 { 0xEDB8_8320 ^ (crc >> 1) } else { crc >> 1 })
        })
        .collect();
    !bytes.iter().fold(!0, |crc: u32, byte| table[((crc ^ u32::from(*byte)) & 0xFF) as usize] ^ (crc >> 8))
}
