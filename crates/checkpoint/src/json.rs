//! A bounded reader of JSON from strangers: strict, one pass, a fixed buffer, no tree.
//!
//! The caller asks for what must come next and says how long it may be; nothing longer is ever held. Whatever this
//! reader accepts, `serde_json` accepts too, so that files read here are readable by libraries built on it.

use std::io::{self, Read};

/// How deep a value that nobody asked for may nest. `serde_json` stops at 128 levels from the document's top.
const DEPTH: usize = 64;
/// Characters of a number, or of a string in a value that nobody asked for.
const IGNORED_NUMBER: usize = 64;
const IGNORED_STRING: usize = 1 << 20;
/// Magnitude of a number in a value that nobody asked for; `serde_json` refuses what rounds to infinity.
const IGNORED_MAGNITUDE: f64 = 1e300;
/// Bytes of all values that nobody asked for.
const IGNORED: u64 = 4 << 20;
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
            ignored_left: IGNORED,
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

    /// Goes past the key of an object's member and its colon.
    pub(crate) fn key(&mut self, limit: usize, what: &'static str) -> Parsed<String> {
        let key = self.text(limit, what)?;
        self.expect(b':', "is no colon, which a key must be followed by")?;
        Ok(key)
    }

    /// As [`Scanner::key`]; the key stays where it was read to, up to the next string or number.
    pub(crate) fn key_in_place(&mut self, limit: usize, what: &'static str) -> Parsed<&str> {
        self.read_text(limit, what)?;
        self.expect(b':', "is no colon, which a key must be followed by")?;
        self.in_place()
    }

    /// A string of at most `limit` bytes.
    pub(crate) fn text(&mut self, limit: usize, what: &'static str) -> Parsed<String> {
        self.read_text(limit, what)?;
        let bytes = if self.scratch.len() < BUFFER { self.scratch.clone() } else { self.take_scratch() };
        // Checked when it was read.
        String::from_utf8(bytes).or_else(|_| self.fault("is not UTF-8"))
    }

    /// As [`Scanner::text`]; the string stays where it was read to, up to the next string or number.
    pub(crate) fn text_in_place(&mut self, limit: usize, what: &'static str) -> Parsed<&str> {
        self.read_text(limit, what)?;
        self.in_place()
    }

    /// Long strings are moved, not copied.
    fn take_scratch(&mut self) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.shrink_to_fit();
        bytes
    }

    fn in_place(&self) -> Parsed<&str> {
        str::from_utf8(&self.scratch).or_else(|_| self.fault("is not UTF-8"))
    }

    /// Reads a string into the scratch memory and checks it.
    fn read_text(&mut self, limit: usize, what: &'static str) -> Parsed<()> {
        self.expect(b'"', "is no string")?;
        let start = self.position();
        self.scratch.clear();
        loop {
            let Some(byte) = self.peek()? else { return self.fault("is the end, inside a string") };
            match byte {
                b'"' => break self.at += 1,
                b'\\' => {
                    self.at += 1;
                    let letter = self.escape()?;
                    self.scratch.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
                }
                0..0x20 => return self.fault("is a control character inside a string"),
                _ => {
                    let rest = &self.buffer[self.at..];
                    // One more than allowed is enough to refuse.
                    let rest = &rest[..rest.len().min(limit + 1)];
                    let stop = |b: &u8| matches!(*b, b'"' | b'\\' | 0..0x20);
                    let run = rest.iter().position(stop).unwrap_or(rest.len());
                    self.scratch.extend_from_slice(&rest[..run]);
                    self.at += run;
                }
            }
            if self.scratch.len() > limit {
                return self.limit(what, limit);
            }
        }
        match str::from_utf8(&self.scratch) {
            Ok(_) => Ok(()),
            Err(error) => Err(Fault::NotUtf8 { at: start + error.valid_up_to() as u64 }),
        }
    }

    fn escape(&mut self) -> Parsed<char> {
        let letter = self.peek()?;
        self.at += usize::from(letter.is_some());
        match letter {
            Some(plain @ (b'"' | b'\\' | b'/')) => Ok(char::from(plain)),
            Some(b'b') => Ok('\u{8}'),
            Some(b'f') => Ok('\u{c}'),
            Some(b'n') => Ok('\n'),
            Some(b'r') => Ok('\r'),
            Some(b't') => Ok('\t'),
            Some(b'u') => self.code_point(),
            _ => self.fault("ends an escape that JSON does not have"),
        }
    }

    fn code_point(&mut self) -> Parsed<char> {
        const LONE: &str = "ends half of a surrogate pair";
        let first = self.hex()?;
        let scalar = match first {
            0xD800..=0xDBFF => {
                for wanted in *b"\\u" {
                    if self.peek()? != Some(wanted) {
                        return self.fault(LONE);
                    }
                    self.at += 1;
                }
                let second = self.hex()?;
                if !(0xDC00..=0xDFFF).contains(&second) {
                    return self.fault(LONE);
                }
                0x1_0000 + ((first - 0xD800) << 10) + (second - 0xDC00)
            }
            other => other,
        };
        let reversed = "ends the second half of a surrogate pair, without its first";
        char::from_u32(scalar).map_or_else(|| self.fault(reversed), Ok)
    }

    fn hex(&mut self) -> Parsed<u32> {
        let mut value = 0;
        for _ in 0..4 {
            let digit = self.peek()?.and_then(|byte| char::from(byte).to_digit(16));
            let Some(digit) = digit else { return self.fault("is no hexadecimal digit") };
            value = value << 4 | digit;
            self.at += 1;
        }
        Ok(value)
    }

    /// The characters of a number, which must be one by JSON's grammar, up to the next string or number.
    pub(crate) fn number(&mut self) -> Parsed<&str> {
        self.scratch.clear();
        self.token()?;
        while let Some(byte @ (b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E')) = self.peek()? {
            if self.scratch.len() == IGNORED_NUMBER {
                return self.limit("characters in a number", IGNORED_NUMBER);
            }
            self.scratch.push(byte);
            self.at += 1;
        }
        let text = self.in_place()?;
        if is_number(text) { Ok(text) } else { self.fault("ends what is no number") }
    }

    /// Goes past a value of any kind, which must be well formed.
    pub(crate) fn skip(&mut self) -> Parsed<()> {
        let start = self.position();
        let end = start + self.ignored_left;
        self.skip_nested(DEPTH, end)?;
        self.ignored_left = end.saturating_sub(self.position());
        Ok(())
    }

    /// `end` is where values that nobody asked for become too many.
    fn skip_nested(&mut self, depth: usize, end: u64) -> Parsed<()> {
        if self.position() >= end {
            return self.limit("bytes in unknown fields", IGNORED as usize);
        }
        match self.kind()? {
            Kind::Text => self.read_text(IGNORED_STRING, "bytes in a string of an unknown field"),
            Kind::Number => match self.number()?.parse::<f64>() {
                Ok(value) if value.abs() <= IGNORED_MAGNITUDE => Ok(()),
                _ => self.fault("ends a number beyond 1e300"),
            },
            Kind::Word => self.word().map(drop),
            Kind::Object | Kind::List if depth == 0 => self.limit("levels of nesting", DEPTH),
            kind => {
                let (close, object) = if kind == Kind::Object { (b'}', true) } else { (b']', false) };
                self.at += 1;
                let mut first = true;
                while self.next_member(close, first)? {
                    first = false;
                    if object {
                        self.key_in_place(IGNORED_STRING, "bytes in a key of an unknown field")?;
                    }
                    self.skip_nested(depth - 1, end)?;
                }
                Ok(())
            }
        }
    }

    /// Goes past `true`, `false` or `null`, and says which.
    pub(crate) fn word(&mut self) -> Parsed<&'static str> {
        let word = match self.token()? {
            Some(b't') => "true",
            Some(b'f') => "false",
            _ => "null",
        };
        for wanted in word.bytes() {
            if self.peek()? != Some(wanted) {
                return self.fault("is no JSON value");
            }
            self.at += 1;
        }
        Ok(word)
    }
}

/// Whether JSON's grammar calls this a number.
fn is_number(text: &str) -> bool {
    fn digits(text: &str) -> Option<&str> {
        let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
        (rest.len() < text.len()).then_some(rest)
    }
    let unsigned = text.strip_prefix('-').unwrap_or(text);
    let Some(mut rest) = unsigned.strip_prefix('0').or_else(|| digits(unsigned)) else { return false };
    if let Some(fraction) = rest.strip_prefix('.') {
        let Some(after) = digits(fraction) else { return false };
        rest = after;
    }
    if let Some(exponent) = rest.strip_prefix(['e', 'E']) {
        let Some(after) = digits(exponent.strip_prefix(['+', '-']).unwrap_or(exponent)) else { return false };
        rest = after;
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests;
