//! The scanner against strings, numbers and values, right and wrong, and against `serde_json`.
#![allow(clippy::unwrap_used, reason = "tests")]

use super::values::DEPTH;
use super::*;

fn scanner(text: &[u8]) -> Scanner<&[u8]> {
    Scanner::new(text, text.len() as u64)
}

/// Goes past one value and says what follows it.
fn skip(text: &[u8]) -> Parsed<Option<u8>> {
    let mut scanner = scanner(text);
    scanner.skip()?;
    scanner.token()
}

#[test]
fn strings_are_decoded_and_bounded() {
    let text = |text: &str, limit| scanner(text.as_bytes()).text(limit, "bytes");
    assert_eq!(
        text(r#""a\"\\\/\b\f\n\r\t\u0061\u00e9\ud83d\ude00é""#, 99).unwrap(),
        "a\"\\/\u{8}\u{c}\n\r\taé😀é"
    );
    assert_eq!(text("\"1234\"", 4).unwrap(), "1234");
    assert!(matches!(text("\"12345\"", 4), Err(Fault::Limit { limit: 4, .. })));
    for broken in
        ["\"a", "\"a\n\"", "\"\\x\"", "\"\\u12g4\"", "\"\\ud83d\"", "\"\\ud83d\\u0061\"", "\"\\ude00\"", "a"]
    {
        assert!(matches!(text(broken, 99), Err(Fault::Syntax { .. })), "{broken}");
    }
    assert!(matches!(scanner(b"\"ab\xFFc\"").text(9, ""), Err(Fault::NotUtf8 { at: 3 })));
}

#[test]
fn a_string_may_lie_across_the_buffers_end() {
    for shift in 0..8 {
        let long = "é".repeat(BUFFER / 2 + 3);
        let text = format!("{}\"{long}\"", " ".repeat(BUFFER - 4 + shift));
        assert_eq!(scanner(text.as_bytes()).text(3 * BUFFER, "bytes").unwrap(), long);
    }
}

#[test]
fn numbers_follow_the_grammar() {
    for good in ["0", "-0", "10", "0.5", "-1.25e+3", "1E9", "0e0"] {
        assert_eq!(scanner(good.as_bytes()).number().unwrap(), good);
    }
    for broken in ["", "-", "01", "1.", ".5", "1e", "1e+", "+1", "0x1", "1.5.2", "--1", "1-"] {
        let mut scanner = scanner(broken.as_bytes());
        let outcome = scanner.number();
        assert!(!matches!(&outcome, Ok(text) if *text == broken), "{broken}: {outcome:?}");
    }
    assert!(matches!(scanner(&[b'9'; 65]).number(), Err(Fault::Limit { limit: 64, .. })));
}

#[test]
fn values_nobody_asked_for_are_checked_all_the_same() {
    for good in [r#"{"a":[1,{"b":null}],"a":true} "#, "[]", "{}", "false", "1e300", "\"\"", "[[1] , [2]]"] {
        assert_eq!(skip(good.as_bytes()).unwrap(), None, "{good}");
    }
    for broken in
        ["[1,]", "[,1]", "{,}", "{\"a\"}", "{\"a\":}", "{a:1}", "[1 2]", "nul", "nulll", "1e301", "]", ""]
    {
        let outcome = skip(broken.as_bytes());
        assert!(!matches!(outcome, Ok(None)), "{broken}: {outcome:?}");
    }
    let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    assert!(skip(deep(DEPTH).as_bytes()).is_ok());
    assert!(matches!(skip(deep(DEPTH + 1).as_bytes()), Err(Fault::Limit { .. })));
    // The whole of a long nest is never read.
    let nest = vec![b'['; 4 * BUFFER];
    let mut long = scanner(&nest);
    assert!(long.skip().is_err() && long.position() < BUFFER as u64);
}

#[test]
fn a_document_shorter_than_promised_is_an_error_of_reading() {
    let mut scanner = Scanner::new(&b"[1"[..], 10);
    assert!(matches!(scanner.skip(), Err(Fault::Io(_))));
}

/// What goes past the scanner goes past `serde_json`.
#[test]
fn nothing_is_accepted_that_serde_json_refuses() {
    use proptest::prelude::*;
    const PIECES: &[&str] = &[
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"a\"",
        "\"\\u00e9\"",
        "\"\\ud800\"",
        "1",
        "-0",
        "1e5",
        "9e999",
        "null",
        "true",
        " ",
        "\n",
        "\u{0}",
        "é",
        "\"\\n\"",
        "\"",
        "0",
        ".5",
        "-",
    ];
    let text = prop::collection::vec(prop::sample::select(PIECES), 0..12).prop_map(|p| p.concat());
    proptest!(ProptestConfig::with_cases(4000), |(text in text)| {
        if matches!(skip(text.as_bytes()), Ok(None)) {
            prop_assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{text}");
        }
    });
}
