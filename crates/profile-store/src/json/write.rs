//! The writer. Files are JSON in every reader's sense: a bad value, of which records have none, would be `null`.

use std::fmt::Write as _;

use super::Json;

/// Without white space, members by name and none left out, ASCII only but for what is bad.
pub(super) fn canonical(value: &Json) -> String {
    let mut out = String::new();
    compact(value, &mut out);
    out
}

fn compact(value: &Json, out: &mut String) {
    match value {
        Json::List(items) => {
            let open = |out: &mut String, index: usize| out.push(if index == 0 { '[' } else { ',' });
            for (index, item) in items.iter().enumerate() {
                open(out, index);
                compact(item, out);
            }
            out.push_str(if items.is_empty() { "[]" } else { "]" });
        }
        Json::Object(_) => {
            let mut members: Vec<_> = value.members().unwrap_or_default().iter().collect();
            members.sort_by(|a, b| a.0.cmp(&b.0));
            for (index, (name, member)) in members.iter().enumerate() {
                out.push(if index == 0 { '{' } else { ',' });
                quoted(name, true, out);
                out.push(':');
                compact(member, out);
            }
            out.push_str(if members.is_empty() { "{}" } else { "}" });
        }
        leaf => plain(leaf, true, out),
    }
}

/// The members by name, of repeated ones the last.
fn single(value: &Json) -> Vec<(&String, &Json)> {
    let members = value.members().unwrap_or_default();
    let last: std::collections::BTreeMap<_, _> = members.iter().map(|(name, value)| (name, value)).collect();
    last.into_iter().collect()
}

/// Indented by two, members by name, with a line feed at the end.
pub(super) fn pretty(value: &Json) -> String {
    let mut out = String::new();
    indented(value, 0, &mut out);
    out.push('\n');
    out
}

fn indented(value: &Json, depth: usize, out: &mut String) {
    let line = |out: &mut String, depth: usize| {
        out.push('\n');
        out.extend(std::iter::repeat_n("  ", depth));
    };
    match value {
        Json::List(items) if !items.is_empty() => {
            for (index, item) in items.iter().enumerate() {
                out.push(if index == 0 { '[' } else { ',' });
                line(out, depth + 1);
                indented(item, depth + 1, out);
            }
            line(out, depth);
            out.push(']');
        }
        Json::Object(members) if !members.is_empty() => {
            for (index, (name, member)) in single(value).into_iter().enumerate() {
                out.push(if index == 0 { '{' } else { ',' });
                line(out, depth + 1);
                quoted(name, false, out);
                out.push_str(": ");
                indented(member, depth + 1, out);
            }
            line(out, depth);
            out.push('}');
        }
        Json::List(_) => out.push_str("[]"),
        Json::Object(_) => out.push_str("{}"),
        leaf => plain(leaf, false, out),
    }
}

fn plain(value: &Json, ascii: bool, out: &mut String) {
    match value {
        Json::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Json::Number(text) => out.push_str(text),
        Json::Text(text) => quoted(text, ascii, out),
        // What is set aside is shown as it was spelled.
        Json::Bad { text, .. } if ascii => out.push_str(text),
        _ => out.push_str("null"),
    }
}

fn quoted(text: &str, ascii: bool, out: &mut String) {
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            letter if letter < ' ' || (ascii && letter > '~') => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            letter => out.push(letter),
        }
    }
    out.push('"');
}
