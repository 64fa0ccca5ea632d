//! A bounded reader of JSON from strangers: strict, one pass, a fixed buffer, no tree.
//!
//! The caller asks for what must come next and says how long it may be; nothing longer is ever held. Whatever this
//! reader accepts, `serde_json` accepts too, so that files read here are readable by libraries built on it.

mod text;
mod values;

use std::io::{self, Read};

const BUFFER: usize = 64 << 10;

/// Why a document was not read further.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The bytes could not be read.
    Io(io::Error),
    /// It is no JSON, or not the JSON that was asked for.
    Syntax {
        /// The byte of the document.
        at: u64,
        /// What was wrong, as the end of a sentence.
        what: &'static str,
    },
    /// A string is not UTF-8.
    NotUtf8 {
        /// The byte of the document.
        at: u64,
    },
    /// Something is longer than allowed.
    Limit {
        /// The byte of the document.
        at: u64,
        /// What of, in the plural.
        what: &'static str,
        /// How many are allowed.
        limit: u64,
    },
}

pub(crate) type Parsed<T> = Result<T, Fault>;

/// What kind of value comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Object,
    List,
    Text,
    Number,
    /// `true`, `false` or `null`.
    Word,
}

impl Kind {
    /// As a word of a sentence.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Object => "an object",
            Self::List => "a list",
            Self::Text => "text",
            Self::Number => "a number",
            Self::Word => "true, false or null",
        }
    }
}

/// Reads one document of a known length.
#[derive(Debug)]
pub(crate) struct Scanner<R> {
    reader: R,
    buffer: Vec<u8>,
    /// The next byte of the buffer to look at.
    at: usize,
    /// Bytes of the document before the buffer.
    before: u64,
    /// Bytes of the document that are not in the buffer yet.
    unread: u64,
    /// The string or number read last; kept for its memory.
    scratch: Vec<u8>,
    /// Bytes that values nobody asked for may still have.
    ignored_left: u64,
}

impl<R: Read> Scanner<R> {
    /// A document that is the next `length` bytes of `reader`.
    pub(crate) fn new(reader: R, length: u64) -> Self {
        Self {
            reader,
            buffer: Vec::new(),
            at: 0,
            before: 0,
            unread: length,
            scratch: Vec::new(),
            ignored_left: values::IGNORED,
        }
    }

    /// How many bytes of the document were read.
    pub(crate) fn position(&self) -> u64 {
        self.before + self.at as u64
    }

    /// The next byte, without going past it.
    #[inline]
    fn peek(&mut self) -> Parsed<Option<u8>> {
        match self.buffer.get(self.at) {
            Some(byte) => Ok(Some(*byte)),
            None => self.fill(),
        }
    }

    #[cold]
    fn fill(&mut self) -> Parsed<Option<u8>> {
        self.before += self.buffer.len() as u64;
        self.at = 0;
        let length = usize::try_from(self.unread).map_or(BUFFER, |unread| unread.min(BUFFER));
        self.buffer.resize(length, 0);
        if let Err(error) = self.reader.read_exact(&mut self.buffer) {
            self.buffer.clear();
            return Err(Fault::Io(error));
        }
        self.unread -= length as u64;
        Ok(self.buffer.first().copied())
    }

    /// An error at the next byte.
    pub(crate) fn fault<T>(&self, what: &'static str) -> Parsed<T> {
        Err(Fault::Syntax { at: self.position(), what })
    }

    /// A refusal at the next byte.
    pub(crate) fn limit<T>(&self, what: &'static str, limit: usize) -> Parsed<T> {
        Err(Fault::Limit { at: self.position(), what, limit: limit as u64 })
    }

    /// The next byte that is no white space, without going past it.
    pub(crate) fn token(&mut self) -> Parsed<Option<u8>> {
        let is_space = |byte: &u8| matches!(*byte, b' ' | b'\n' | b'\t' | b'\r');
        loop {
            if let Some(spaces) = self.buffer[self.at..].iter().position(|byte| !is_space(byte)) {
                self.at += spaces;
                return Ok(Some(self.buffer[self.at]));
            }
            self.at = self.buffer.len();
            if self.fill()?.is_none() {
                return Ok(None);
            }
        }
    }

    /// Goes past `byte` if it is the next token.
    pub(crate) fn take(&mut self, byte: u8) -> Parsed<bool> {
        let found = self.token()? == Some(byte);
        self.at += usize::from(found);
        Ok(found)
    }

    /// Goes past `byte`, which must be the next token.
    pub(crate) fn expect(&mut self, byte: u8, what: &'static str) -> Parsed<()> {
        if self.take(byte)? {
            return Ok(());
        }
        match self.peek()? {
            None => self.fault("is missing: the text ends there, unfinished"),
            Some(0x80..) => self.fault("is not ASCII, and stands outside of strings"),
            Some(_) => self.fault(what),
        }
    }

    /// What comes next.
    pub(crate) fn kind(&mut self) -> Parsed<Kind> {
        match self.token()? {
            Some(b'{') => Ok(Kind::Object),
            Some(b'[') => Ok(Kind::List),
            Some(b'"') => Ok(Kind::Text),
            Some(b'-' | b'0'..=b'9') => Ok(Kind::Number),
            Some(b't' | b'f' | b'n') => Ok(Kind::Word),
            Some(0x80..) => self.fault("is not ASCII, and stands outside of strings"),
            Some(_) => self.fault("is no JSON value"),
            None => self.fault("is missing: the text ends there, unfinished"),
        }
    }

    /// Goes on to the next member of an object or list that closes with `close`. `first` says that none was read yet.
    pub(crate) fn next_member(&mut self, close: u8, first: bool) -> Parsed<bool> {
        if self.take(close)? {
            return Ok(false);
        }
        if !first {
            self.expect(b',', "is neither a comma nor the end of the list or object")?;
            if self.token()? == Some(close) {
                return self.fault("follows a comma with nothing after it");
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
