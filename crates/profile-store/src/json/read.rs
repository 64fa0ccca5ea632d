//! The lenient reader: bounded in depth, without recursion on anything but values, and never a panic.

use super::Json;

/// How deep values may lie in each other.
const DEPTH: usize = 64;

/// Why a text is no JSON at all, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong.
    pub reason: String,
    /// At which byte.
    pub at: usize,
}

/// Reads a whole text: JSON, with the three words for numbers that are none (`NaN`, `Infinity`, `-Infinity`) besides.
pub(super) fn parse(bytes: &[u8]) -> Result<Json, Refusal> {
    let refuse = |reason: &str, at| Err(Refusal { reason: reason.into(), at });
    if bytes.is_empty() {
        return refuse("it is empty", 0);
    }
    if bytes.iter().all(|&byte| byte == 0) {
        return refuse("it is all zero bytes, as after a power failure", 0);
    }
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return refuse("it is UTF-16, not UTF-8", 0);
    }
    let bytes = bytes.strip_prefix(&[0xef, 0xbb, 0xbf]).unwrap_or(bytes);
    let text = std::str::from_utf8(bytes)
        .map_err(|error| Refusal { reason: "it is not UTF-8".into(), at: error.valid_up_to() })?;
    let mut reader = Reader { text, at: 0 };
    let value = reader.value(0)?;
    reader.space();
    if reader.at < text.len() {
        return reader.refuse("something follows the value");
    }
    Ok(value)
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn refuse<T>(&self, reason: &str) -> Result<T, Refusal> {
        Err(Refusal { reason: reason.into(), at: self.at })
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    /// Takes `word` if it is next.
    fn takes(&mut self, word: &str) -> bool {
        let found = self.text.as_bytes().get(self.at..).is_some_and(|rest| rest.starts_with(word.as_bytes()));
        if found {
            self.at += word.len();
        }
        found
    }

    fn value(&mut self, depth: usize) -> Result<Json, Refusal> {
        if depth > DEPTH {
            return self.refuse("values lie too deep in each other");
        }
        self.space();
        let words = [("null", Json::Null), ("true", Json::Bool(true)), ("false", Json::Bool(false))];
        for (word, value) in words {
            if self.takes(word) {
                return Ok(value);
            }
        }
        for word in ["NaN", "Infinity", "-Infinity"] {
            if self.takes(word) {
                return Ok(Json::Bad { reason: format!("{word} is no number"), text: word.into() });
            }
        }
        match self.peek() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.list(depth),
            Some(b'"') => Ok(match self.string()? {
                (text, None) => Json::Text(text),
                (text, Some(reason)) => Json::Bad { reason, text },
            }),
            Some(b'-' | b'0'..=b'9') => self.number(),
            None => self.refuse("it ends too early"),
            Some(_) => self.refuse("a value should be here"),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json, Refusal> {
        self.at += 1;
        let mut members = Vec::new();
        self.space();
        if self.takes("}") {
            return Ok(Json::Object(members));
        }
        loop {
            self.space();
            if self.peek() != Some(b'"') {
                return self.refuse("a name in quotes should be here");
            }
            let (name, bad) = self.string()?;
            self.space();
            if !self.takes(":") {
                return self.refuse("a colon should be here");
            }
            let value = self.value(depth + 1)?;
            // A name that cannot be spelled makes its value unusable, and nothing else.
            members.push(match bad {
                Some(reason) => (name.clone(), Json::Bad { reason, text: name }),
                None => (name, value),
            });
            self.space();
            if self.takes("}") {
                return Ok(Json::Object(members));
            }
            if !self.takes(",") {
                return self.refuse("a comma or the end of an object should be here");
            }
        }
    }

    fn list(&mut self, depth: usize) -> Result<Json, Refusal> {
        self.at += 1;
        let mut items = Vec::new();
        self.space();
        if self.takes("]") {
            return Ok(Json::List(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.space();
            if self.takes("]") {
                return Ok(Json::List(items));
            }
            if !self.takes(",") {
                return self.refuse("a comma or the end of an array should be here");
            }
        }
    }

    fn digits(&mut self) -> Result<(), Refusal> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start { self.refuse("a digit should be here") } else { Ok(()) }
    }

    fn number(&mut self) -> Result<Json, Refusal> {
        let start = self.at;
        self.takes("-");
        if !self.takes("0") {
            self.digits()?;
        }
        if self.takes(".") {
            self.digits()?;
        }
        if self.takes("e") || self.takes("E") {
            if !self.takes("+") {
                self.takes("-");
            }
            self.digits()?;
        }
        Ok(Json::Number(self.text.get(start..self.at).unwrap_or_default().to_owned()))
    }

    /// A text, and what is wrong with it if it has half a surrogate pair.
    fn string(&mut self) -> Result<(String, Option<String>), Refusal> {
        self.at += 1;
        let mut text = String::new();
        let mut bad = None;
        loop {
            let start = self.at;
            while !matches!(self.peek(), None | Some(b'"' | b'\\' | 0..=0x1f)) {
                self.at += 1;
            }
            text.push_str(self.text.get(start..self.at).unwrap_or_default());
            match self.peek() {
                None => return self.refuse("it ends within a text"),
                Some(b'"') => {
                    self.at += 1;
                    return Ok((text, bad));
                }
                Some(b'\\') => match self.escape()? {
                    Ok(letter) => text.push(letter),
                    Err(half) => {
                        bad = Some(format!("a text has half a surrogate pair, {half:04x}"));
                        text.push(char::REPLACEMENT_CHARACTER);
                    }
                },
                Some(_) => return self.refuse("a text has a control character in it"),
            }
        }
    }

    /// A character after a backslash; the inner error is half a surrogate pair.
    fn escape(&mut self) -> Result<Result<char, u32>, Refusal> {
        self.at += 1;
        let letter = self.peek();
        self.at += 1;
        Ok(Ok(match letter {
            Some(plain @ (b'"' | b'\\' | b'/')) => char::from(plain),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                let first = self.hex()?;
                if (0xd800..0xdc00).contains(&first) && self.takes("\\u") {
                    let second = self.hex()?;
                    let joined = 0x10000 + ((first - 0xd800) << 10) + (second.wrapping_sub(0xdc00) & 0x3ff);
                    if (0xdc00..0xe000).contains(&second) {
                        return Ok(char::from_u32(joined).ok_or(first));
                    }
                }
                return Ok(char::from_u32(first).ok_or(first));
            }
            _ => return self.refuse("a backslash with nothing that it could mean"),
        }))
    }

    fn hex(&mut self) -> Result<u32, Refusal> {
        let digits = self.text.get(self.at..self.at + 4).filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()));
        let Some(value) = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()) else {
            return self.refuse("four hexadecimal digits should be here");
        };
        self.at += 4;
        Ok(value)
    }
}
