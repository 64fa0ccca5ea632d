//! What an untrusted header may ask for before it is refused.

/// Bounds on what a file may say of itself. A header is read piece by piece and refused at the first bound it passes, so
/// that a hostile one costs no more time and memory than the bounds allow.
///
/// The defaults leave room for the largest published models (some 150 000 tensors, headers of 20 MB) and keep what one
/// header takes in RAM below 64 MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of a header (safetensors) or of metadata and tensor table together (GGUF). 100 000 000, as the official
    /// safetensors library has it.
    pub max_header: u64,
    /// Header bytes that any file may have, whatever its data. 4 MiB.
    pub free_header: u64,
    /// Header bytes for each byte of data, beyond `free_header`. 4.
    pub max_header_ratio: u64,
    /// Tensors of one file. 200 000.
    pub max_tensors: usize,
    /// Dimensions of a tensor. 64, as PyTorch has it.
    pub max_rank: usize,
    /// Bytes of a tensor's name or of a metadata key. 1024.
    pub max_name: usize,
    /// Bytes of all metadata of one file, keys and values. 16 MiB.
    pub max_metadata: usize,
    /// Metadata entries of one file. 65 536.
    pub max_metadata_entries: usize,
    /// Bytes of RAM that what is kept of one header may take. 40 MiB.
    pub max_memory: usize,
    /// Bytes of an index of shards. 64 MiB.
    pub max_index: u64,
    /// Files of one model. 4096.
    pub max_files: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_header: 100_000_000,
            free_header: 4 << 20,
            max_header_ratio: 4,
            max_tensors: 200_000,
            max_rank: 64,
            max_name: 1024,
            max_metadata: 16 << 20,
            max_metadata_entries: 65_536,
            max_memory: 40 << 20,
            max_index: 64 << 20,
            max_files: 4096,
        }
    }
}
