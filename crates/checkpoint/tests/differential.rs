//! Random and damaged files against the official library, by the same rules as the fuzz target.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use proptest::prelude::*;

#[path = "../fuzz/targets/safetensors_header.rs"]
mod target;

const TYPES: [(&str, u64); 8] = [
    ("F4", 4),
    ("F6_E2M3", 6),
    ("BOOL", 8),
    ("F8_E8M0", 8),
    ("BF16", 16),
    ("F32", 32),
    ("C64", 64),
    ("U64", 64),
];

/// A file that is right, but for its entries' order and spacing, from tensors of a type and a shape.
fn file(tensors: Vec<(usize, Vec<u64>, String)>, order: &[usize], spaces: usize, metadata: bool) -> Vec<u8> {
    let mut end = 0;
    let mut entries: Vec<_> = tensors
        .into_iter()
        .map(|(kind, shape, name)| {
            let (dtype, bits) = TYPES[kind];
            let start = end;
            // Rounded down where a type below a byte does not fill one: wrong, and both must say so.
            end += shape.iter().product::<u64>() * bits / 8;
            common::entry(&name, dtype, &shape, start, end)
        })
        .collect();
    for (at, to) in order.iter().enumerate() {
        if at < entries.len() {
            let to = to % entries.len();
            entries.swap(at, to);
        }
    }
    if metadata {
        entries.push(r#""__metadata__":{"format":"pt"}"#.to_owned());
    }
    let gap = " ".repeat(spaces);
    let header = format!("{gap}{{{gap}{}}}{gap}", entries.join(&format!("{gap},{gap}")));
    common::file(header, &vec![7; end as usize])
}

fn files() -> impl Strategy<Value = Vec<u8>> {
    let shape = prop::collection::vec(0_u64..5, 0..4);
    let tensor = (0..TYPES.len(), shape, "[a-c]{1,2}");
    let tensors = prop::collection::vec(tensor, 0..6);
    let order = prop::collection::vec(any::<usize>(), 6);
    (tensors, order, 0_usize..3, any::<bool>()).prop_map(|(t, o, s, m)| file(t, &o, s, m))
}

/// What is put where something else was.
const PIECES: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "0",
    "1",
    "-1",
    "1.0",
    "1e3",
    "-0",
    "00",
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854775808",
    "null",
    "true",
    "\"dtype\"",
    "\"shape\"",
    "\"data_offsets\"",
    "\"__metadata__\"",
    "\"F32\"",
    "\"F4\"",
    "{\"F32\":null}",
    "[\"F32\",[1],[0,4]]",
    "\"\\u0061\"",
    "\"\\ud800\"",
    " ",
    "\n",
    "\0",
    "\u{feff}",
    "é",
    ",\"x\":1e400",
    ",\"x\":1e308",
    ",\"x\":[[]]",
    ",\"x\":\"\\udc00\"",
    ",\"x\":\"\u{1}\"",
];

/// One piece of damage, to the header or to the file.
#[derive(Debug, Clone)]
enum Damage {
    Replace(usize, usize, usize),
    Byte(usize, u8),
    Cut(usize),
    Grow(usize),
    Length(i64),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        8 => (any::<usize>(), 0_usize..6, 0..PIECES.len()).prop_map(|(at, take, piece)| Damage::Replace(at, take, piece)),
        4 => (any::<usize>(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        1 => any::<usize>().prop_map(Damage::Cut),
        1 => (1_usize..9).prop_map(Damage::Grow),
        1 => (-9_i64..9).prop_map(Damage::Length),
    ]
}

fn apply(mut file: Vec<u8>, damage: &Damage) -> Vec<u8> {
    let length = file.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)) as usize;
    let header = file.get(8..).and_then(|rest| rest.get(..length)).map(<[u8]>::to_vec);
    match (damage, header) {
        (Damage::Replace(at, take, piece), Some(mut header)) => {
            let at = at % (header.len() + 1);
            let end = (at + take).min(header.len());
            header.splice(at..end, PIECES[*piece].bytes());
            common::file(header, &file[8 + length..])
        }
        (Damage::Byte(at, byte), _) => {
            let at = at % file.len().max(1);
            file.iter_mut().skip(at).take(1).for_each(|old| *old = *byte);
            file
        }
        (Damage::Cut(at), _) => {
            file.truncate(at % (file.len() + 1));
            file
        }
        (Damage::Grow(count), _) => {
            file.extend(vec![0; *count]);
            file
        }
        (Damage::Length(by), _) => {
            let wrong = (length as u64).wrapping_add_signed(*by).to_le_bytes();
            file.iter_mut().zip(wrong).for_each(|(old, new)| *old = new);
            file
        }
        (Damage::Replace(..), None) => file,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6000))]

    #[test]
    fn files_of_tensors_that_follow_one_another(file in files()) {
        target::run(&file);
    }

    #[test]
    fn damaged_files(file in files(), damages in prop::collection::vec(damage(), 1..4)) {
        target::run(&damages.iter().fold(file, apply));
    }

    #[test]
    fn any_pieces_as_a_header(pieces in prop::collection::vec(prop::sample::select(PIECES), 0..14), data in 0_usize..9) {
        target::run(&common::file(format!("{{{}}}", pieces.concat()), &vec![0; data]));
    }
}

/// Files that only one of the two reads, so that the list of differences is known to be seen.
#[test]
fn the_differences_are_real() {
    let entry = |name| common::entry(name, "U8", &[1], 0, 1);
    let twice = format!("{{{},{}}}", entry("a"), entry("a"));
    let ranks = format!("{{{}}}", common::entry("a", "U8", &[1; 65], 0, 1));
    let only_theirs = [
        common::file(twice, &[0]),
        common::file(ranks, &[0]),
        common::file(r#"{"__metadata__":{"a":"1","a":"2"}}"#, &[]),
        common::file(r#"{"a":["U8",[1],[0,1]]}"#, &[0]),
        common::file(r#"{"a":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}}"#, &[0]),
        common::file(r#"{"a":{"dtype":"U8","shape":[0,18446744073709551615],"data_offsets":[0,0]}}"#, &[]),
        common::file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1e301}}"#, &[0]),
        common::file(format!("{{{}}}", entry(&"n".repeat(2000))), &[0]),
    ];
    for file in only_theirs {
        assert!(safetensors::SafeTensors::read_metadata(&file).is_ok(), "{}", String::from_utf8_lossy(&file));
        assert!(common::read(&file).is_err());
        target::run(&file);
    }
}
