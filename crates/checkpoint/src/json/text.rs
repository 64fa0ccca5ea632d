//! Strings and keys: decoded, checked to be UTF-8, and bounded.

use std::io::Read;

use super::{BUFFER, Fault, Parsed, Scanner};

impl<R: Read> Scanner<R> {
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

    pub(super) fn in_place(&self) -> Parsed<&str> {
        str::from_utf8(&self.scratch).or_else(|_| self.fault("is not UTF-8"))
    }

    /// Reads a string into the scratch memory and checks it.
    pub(super) fn read_text(&mut self, limit: usize, what: &'static str) -> Parsed<()> {
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
}
