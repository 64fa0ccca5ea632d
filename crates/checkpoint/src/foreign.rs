//! What a file is that is none of the formats read here, as far as its first bytes tell.

use std::fmt;

/// How many bytes are looked at.
pub(crate) const LOOK: u64 = 256;

/// What a file is instead of a model file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Foreign {
    /// The text that git-lfs leaves in place of a file that was not fetched.
    LfsPointer {
        /// The size of the file it stands for, if the pointer says it.
        size: Option<u64>,
    },
    /// A web page, or another XML document.
    Page,
    /// A ZIP archive, as `torch.save` writes.
    Zip,
    /// A pickle, as `torch.save` wrote before PyTorch 1.6.
    Pickle,
    /// A GGUF file.
    Gguf,
    /// JSON: an index of shards or an error message of a server.
    Json,
    /// Some other text.
    Text,
}

impl Foreign {
    /// What the file that begins so is, if that can be told.
    pub(crate) fn of(start: &[u8]) -> Option<Self> {
        let start = start.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(start);
        let text = start.trim_ascii_start();
        let is = |magic: &[u8]| start.starts_with(magic);
        Some(match () {
            () if is(b"version https://git-lfs") => Self::LfsPointer { size: pointer_size(start) },
            () if is(b"PK\x03\x04") => Self::Zip,
            () if is(b"GGUF") => Self::Gguf,
            () if is_pickle(start) => Self::Pickle,
            () if text.starts_with(b"<") && is_text(start) => Self::Page,
            () if text.starts_with(b"{") && is_text(start) => Self::Json,
            // Fewer letters than the header's length has bytes could be that length.
            () if start.len() >= 8 && is_text(start) => Self::Text,
            () => return None,
        })
    }
}

/// Whether bytes begin a pickle of protocol 2 to 5. A header's length may have the same first bytes; JSON follows it then.
fn is_pickle(start: &[u8]) -> bool {
    let json = matches!(start.get(8), Some(b'{' | b' ' | b'\t' | b'\n' | b'\r'));
    matches!(start, [0x80, 2..=5, ..]) && !json
}

/// Whether bytes are text, or a piece of it.
fn is_text(bytes: &[u8]) -> bool {
    let whole = match std::str::from_utf8(bytes) {
        Ok(_) => true,
        // Cut inside a letter.
        Err(error) => error.error_len().is_none(),
    };
    whole && bytes.iter().all(|byte| *byte >= 0x20 || matches!(byte, b'\t' | b'\n' | b'\r'))
}

fn pointer_size(pointer: &[u8]) -> Option<u64> {
    let lines = std::str::from_utf8(pointer).ok()?.lines();
    lines.filter_map(|line| line.strip_prefix("size ")).find_map(|size| size.trim().parse().ok())
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LfsPointer { size } => {
                f.write_str("a Git LFS pointer, which stands for a file that was not fetched")?;
                if let Some(size) = size {
                    write!(f, " (of {size} bytes)")?;
                }
                f.write_str("; fetch the file itself, for example with `git lfs pull`")
            }
            Self::Page => {
                f.write_str("a web page or XML, not a model; what was downloaded is a server's answer")
            }
            Self::Zip => f.write_str("a ZIP archive, as torch.save writes; read it as a PyTorch file"),
            Self::Pickle => f.write_str("a Python pickle; read it as a PyTorch file"),
            Self::Gguf => f.write_str("a GGUF file; read it as such"),
            Self::Json => {
                f.write_str("JSON: an index of shards under a wrong name, or a server's error message")
            }
            Self::Text => f.write_str("text, not a model"),
        }
    }
}
