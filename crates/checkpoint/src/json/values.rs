//! Numbers and words, and values that nobody asked for: gone past, but well formed and bounded all the same.

use std::io::Read;

use super::{Kind, Parsed, Scanner};

/// How deep a value that nobody asked for may nest. `serde_json` stops at 128 levels from the document's top.
pub(super) const DEPTH: usize = 64;
/// Characters of a number, or of a string in a value that nobody asked for.
const IGNORED_NUMBER: usize = 64;
const IGNORED_STRING: usize = 1 << 20;
/// Magnitude of a number in a value that nobody asked for; `serde_json` refuses what rounds to infinity.
const IGNORED_MAGNITUDE: f64 = 1e300;
/// Bytes of all values that nobody asked for.
pub(super) const IGNORED: u64 = 4 << 20;

impl<R: Read> Scanner<R> {
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
