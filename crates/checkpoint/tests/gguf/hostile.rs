//! One bad file for each thing that can be wrong, and what is said of it.

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::Limits;
use checkpoint::gguf::{MemorySource, read_header};

use crate::build::{Bytes, read, read_within, refusal};

const F32: u32 = 0;
const Q8_0: u32 = 8;
const MANY: u64 = 1 << 60;

/// A file of two tensors, four floats each, right in every way.
fn good() -> Bytes {
    let table = Bytes::file(2, 1).entry_text("general.architecture", "test");
    table.tensor("a", &[4], F32, 0).tensor("b", &[2, 2], F32, 32).pad(32).zeros(64)
}

/// A file of one tensor with so many bytes of data.
fn one(dims: &[u64], kind: u32, offset: u64, data: usize) -> Bytes {
    Bytes::file(1, 0).tensor("w", dims, kind, offset).pad(32).zeros(data)
}

/// A file, and what must be said of it.
type Case = (Bytes, &'static str);

fn check(cases: Vec<Case>) {
    for (file, said) in cases {
        assert!(refusal(&file.0).contains(said), "{said}: {}", refusal(&file.0));
    }
}

/// The fuzzer's first inputs are these files; `write_the_fuzzers_inputs` writes them.
fn inputs() -> Vec<(String, Vec<u8>)> {
    let groups = [("counts", counts()), ("values", values()), ("tensors", tensors())];
    let numbered = |(group, cases): (&'static str, Vec<Case>)| {
        cases.into_iter().enumerate().map(move |(index, (file, _))| (format!("{group}-{index:02}"), file.0))
    };
    let good = std::iter::once(("good".to_owned(), good().0));
    good.chain(groups.into_iter().flat_map(numbered)).collect()
}

fn fuzz_corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/gguf_header")
}

#[test]
fn the_fuzzer_starts_from_these_files() {
    for (name, bytes) in inputs() {
        assert_eq!(
            fs::read(fuzz_corpus().join(&name)).ok(),
            Some(bytes),
            "{name}: run the ignored test below"
        );
    }
}

#[test]
#[ignore = "writes into the repository: cargo test -p checkpoint --test gguf -- --ignored"]
fn write_the_fuzzers_inputs() {
    for (name, bytes) in inputs() {
        fs::write(fuzz_corpus().join(name), bytes).unwrap();
    }
}

#[test]
fn the_good_file_is_good() {
    assert_eq!(read(&good().0).unwrap().0.tensors.len(), 2);
}

#[test]
fn other_formats_are_named() {
    for (bytes, said) in [
        (&b""[..], "it is empty"),
        (b"GG", "it starts with `GG`, and a GGUF file starts with `GGUF`"),
        (b"\x08\0\0\0\0\0\0\0{}      ", "it starts with `\\x08\\x00\\x00\\x00`, and a GGUF file"),
        (b"tjgg\x03\0\0\0\0\0\0\0", "it starts with `tjgg`, of a format older than GGUF"),
        (b"lmgg\0\0\0\0", "it starts with `lmgg`, of a format older than GGUF"),
        (b"<!DOCTYPE html><html></html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "a Git LFS pointer"),
        (b"PK\x03\x04\0\0\0\0", "a ZIP archive"),
    ] {
        assert!(refusal(bytes).contains(said), "{said}: {}", refusal(bytes));
    }
}

#[test]
fn versions_that_are_not_read_are_named() {
    let version = |bytes: [u8; 4]| {
        let mut file = good().0;
        file[4..8].copy_from_slice(&bytes);
        refusal(&file)
    };
    assert!(version([0, 0, 0, 3]).starts_with("it is big-endian (version 3), and only little-endian"));
    assert!(version([1, 0, 0, 0]).starts_with("it is of GGUF version 1, and versions 2 and 3 are read"));
    assert!(version([4, 0, 0, 0]).starts_with("it is of GGUF version 4,"));
    assert!(version([0; 4]).starts_with("it is of GGUF version 0,"));
}

/// Every length of a cut file is refused, and the message says where the cut is.
#[test]
fn cut_files_say_where_they_were_cut() {
    let file = good().0;
    for length in 0..file.len() - 16 {
        let said = refusal(&file[..length]);
        let wanted = match length {
            0 => "it is empty",
            1..4 => "a GGUF file starts with `GGUF`",
            4..24 => "it was cut inside the fixed fields at its start",
            24..52 => "it was cut inside key 0 of its metadata",
            52..68 => "it was cut inside the value of \"general.architecture\"",
            68..77 => "it was cut inside entry 0 of its tensor table",
            77..101 => "it was cut inside the table's entry for tensor \"a\"",
            101..110 => "it was cut inside entry 1 of its tensor table",
            110..142 => "it was cut inside the table's entry for tensor \"b\"",
            142..176 => "it was cut: it has",
            _ => "is the first that does not fit",
        };
        let counted = "bytes that follow have room for";
        assert!(
            said.contains(wanted) || (24..142).contains(&length) && said.contains(counted),
            "{length}: {said}"
        );
    }
    let said = refusal(&file[..file.len() - 17]);
    let wanted = "tensor \"b\" is bytes 192 to 208; it is the first that does not fit";
    assert!(said.contains(wanted), "{said}");
    let (header, _) = read(&file[..file.len() - 16]).expect("the last padding may be missing");
    assert_eq!(header.trailing, 0);
}

#[test]
fn bytes_after_the_end_are_refused_and_may_be_allowed() {
    for extra in [1, 4, 4096] {
        let file = good().zeros(extra).0;
        let said = refusal(&file);
        assert!(said.starts_with(&format!("{extra} bytes follow its last tensor")), "{said}");
        let source = MemorySource::new(Path::new("m.gguf"), &file);
        let (header, _) = read_header(&source, 0, &Limits::default(), true).unwrap();
        assert_eq!(header.trailing, extra as u64);
    }
}

/// Counts and lengths that the file cannot hold.
fn counts() -> Vec<Case> {
    let key = || Bytes::file(0, 1).text("k");
    let list = |kind: u32| key().u32(9).u32(kind);
    vec![
        (
            Bytes::file(MANY, 0),
            "it says that it has 1152921504606846976 tensors; the 0 bytes that follow have room for 0",
        ),
        (Bytes::file(0, MANY), "1152921504606846976 metadata entries; the 0 bytes"),
        (Bytes::file(2, 0).zeros(47), "2 tensors; the 47 bytes that follow have room for 1 at most"),
        (
            Bytes::file(0, 1).u64(MANY).zeros(5),
            "it was cut inside key 0 of its metadata: 1152921504606846976 bytes are due",
        ),
        (
            key().u32(8).u64(u64::MAX),
            "it was cut inside the value of \"k\": 18446744073709551615 bytes are due",
        ),
        (list(4).u64(MANY), "1152921504606846976 elements in \"k\"; the 0 bytes"),
        (list(12).u64(u64::MAX / 8 + 2), "elements in \"k\""),
        (list(8).u64(3).zeros(16), "3 elements in \"k\"; the 16 bytes that follow have room for 2"),
        (list(8).u64(2).u64(100).zeros(16), "it was cut inside the value of \"k\": 100 bytes are due"),
        (list(9).u64(1).u32(9).u64(MANY), "elements in \"k\""),
        (Bytes::file(1, 0).u64(MANY).zeros(40), "it was cut inside entry 0 of its tensor table"),
    ]
}

#[test]
fn counts_and_lengths_beyond_the_file_are_refused_before_anything_is_made_of_them() {
    check(counts());
}

#[test]
fn more_than_the_limits_allow_is_refused() {
    let mut limits = Limits::default();
    (limits.max_tensors, limits.max_rank, limits.max_name) = (1, 3, 24);
    (limits.max_metadata, limits.max_metadata_entries) = (40, 2);
    let said = |file: Bytes, limits: &Limits| read_within(&file.0, limits).unwrap_err().to_string();
    assert!(said(good(), &limits).contains("its tensor table has 2 entries, more than the 1 allowed"));
    let entries = Bytes::file(0, 3).entry_u32("a", 0).entry_u32("b", 0).entry_u32("c", 0);
    assert!(said(entries, &limits).contains("its metadata has 3 entries, more than the 2 allowed"));
    let rank = one(&[1; 4], F32, 0, 4);
    assert!(said(rank, &limits).contains("tensor \"w\" has 4 dimensions, more than the 3 allowed"));
    let name = Bytes::file(1, 0).tensor(&"n".repeat(25), &[1], F32, 0);
    assert!(
        said(name, &limits).contains("entry 0 of its tensor table has 25 bytes of text, more than the 24")
    );
    let key = Bytes::file(0, 1).entry_u32(&"k".repeat(25), 0);
    assert!(
        said(key, &limits).contains("key 0 of its metadata has 25 bytes of text, more than the 24 allowed")
    );
    let text = Bytes::file(0, 1).entry_text("k", &"x".repeat(41));
    assert!(
        said(text, &limits).contains("the value of \"k\" has 41 bytes of text, more than the 40 allowed")
    );
    let texts = Bytes::file(0, 2).entry_text("a", &"x".repeat(20)).entry_text("b", &"x".repeat(19));
    assert!(said(texts, &limits).contains("its metadata has 41 bytes, more than the 40 allowed"));
    limits = Limits::default();
    limits.max_header = 80;
    assert!(said(good(), &limits).contains("its header has"), "{}", said(good(), &limits));
    limits = Limits::default();
    limits.max_memory = 500;
    assert!(said(good(), &limits).contains("bytes in RAM, more than the"), "{}", said(good(), &limits));
}

/// Metadata that the format does not have.
fn values() -> Vec<Case> {
    let key = || Bytes::file(0, 1).text("k");
    vec![
        (key().u32(13).zeros(8), "the value of \"k\" is of the unknown type 13"),
        (key().u32(u32::MAX).zeros(8), "the value of \"k\" is of the unknown type 4294967295"),
        (key().u32(9).u32(13).u64(0), "the value of \"k\" is of the unknown type 13"),
        (key().u32(7).raw(&[2]), "the value of \"k\" is a Boolean stored as 2"),
        (key().u32(9).u32(7).u64(2).raw(&[1, 9]), "the value of \"k\" is a Boolean stored as 9"),
        (Bytes::file(0, 1).u64(2).raw(b"\xFF\xFE").u32(7).raw(&[1]), "key 0 of its metadata is not UTF-8"),
        (
            Bytes::file(0, 2).entry_u32("k\n", 1).entry_u32("k\n", 1),
            "its metadata has the key \"k\\n\" twice",
        ),
        (
            key().u32(9).u32(9).u64(1).u32(9).u64(1).u32(9).u64(1).u32(9).u64(0),
            "has 5 levels of lists, more than the 4",
        ),
    ]
}

#[test]
fn values_that_are_none_are_refused() {
    check(values());
}

#[test]
fn alignments_that_are_none_are_refused() {
    const KEY: &str = "general.alignment";
    for (file, found) in [
        (Bytes::file(0, 1).entry_u32(KEY, 0), "0 (U32)"),
        (Bytes::file(0, 1).entry_u32(KEY, 48), "48 (U32)"),
        (Bytes::file(0, 1).entry_text(KEY, "32"), "text"),
        (Bytes::file(0, 1).text(KEY).u32(10).u64(32), "32 (U64)"),
        (Bytes::file(0, 1).entry_list(KEY, &[32]), "a list of 1 I64"),
    ] {
        let wanted =
            format!("the value of \"general.alignment\" is {found}, where a power of two (U32) is due");
        assert_eq!(refusal(&file.0), wanted);
    }
    // The largest there is: the data would start 2 GiB into the file.
    let far = Bytes::file(1, 1).entry_u32(KEY, 1 << 31).tensor("w", &[4], F32, 0).zeros(64);
    assert!(
        refusal(&far.0).contains("tensor \"w\" is bytes 2147483648 to 2147483664"),
        "{}",
        refusal(&far.0)
    );
}

/// Tensors that no file can have.
fn tensors() -> Vec<Case> {
    let two = |second: u64| {
        Bytes::file(2, 0).tensor("a", &[16], F32, 0).tensor("b", &[16], F32, second).pad(32).zeros(128)
    };
    vec![
        (one(&[4], 43, 0, 16), "tensor \"w\" is of the unknown type 43"),
        (one(&[4], 4, 0, 16), "tensor \"w\" is of the unknown type 4 (once Q4_2)"),
        (
            one(&[33], Q8_0, 0, 68),
            "tensor \"w\" has rows of 33 elements, no whole number of Q8_0 blocks of 32",
        ),
        (one(&[], Q8_0, 0, 68), "tensor \"w\" has rows of 1 elements"),
        (
            one(&[1 << 32, 1 << 32], F32, 0, 16),
            "tensor \"w\" of type F32 and dimensions [4294967296, 4294967296]",
        ),
        (one(&[0, u64::MAX], F32, 0, 16), "has more than 2^63 - 1 bytes"),
        (one(&[u64::MAX - 31, 2], Q8_0, 0, 16), "has more than 2^63 - 1 bytes"),
        (
            one(&[4], F32, 8, 64),
            "tensor \"w\" starts at data byte 8, no multiple of the file's alignment of 32",
        ),
        (one(&[4], F32, 64, 64), "tensor \"w\" is bytes 128 to 144"),
        (one(&[4], F32, u64::MAX - 31, 64), "is the first that does not fit"),
        (one(&[1 << 61], 24, 0, 64), "it was cut: it has 128 bytes"),
        (one(&[0], F32, 1 << 40, 64), "is the first that does not fit"),
        (two(32), "tensors \"a\" and \"b\" overlap: the one ends at byte 160, the other starts at 128"),
        (two(0), "overlap"),
        (
            Bytes::file(2, 0).tensor("a", &[1], F32, 0).tensor("a", &[1], F32, 32).pad(32).zeros(64),
            "it has two tensors named \"a\"",
        ),
        (Bytes::file(1, 0).u64(1).raw(b"\xFF").zeros(24), "entry 0 of its tensor table is not UTF-8"),
    ]
}

#[test]
fn tensors_that_cannot_be_are_refused() {
    check(tensors());
}

#[test]
fn true_shapes_that_are_none_are_refused() {
    const KEY: &str = "comfy.gguf.orig_shape.w";
    let shape = |value: &dyn Fn(Bytes) -> Bytes| {
        refusal(&value(Bytes::file(1, 1)).tensor("w", &[64, 6144], F32, 0).pad(32).zeros(64 * 6144 * 4).0)
    };
    let said = shape(&|file| file.entry_list(KEY, &[6144, 65]));
    let wanted =
        "its metadata gives tensor \"w\" the shape [6144, 65], but 393216 elements are stored, as [6144, 64]";
    assert_eq!(said, wanted);
    assert!(shape(&|file| file.entry_list(KEY, &[i64::MAX, 4, 4])).contains("but 393216 elements"));
    assert!(shape(&|file| file.entry_list(KEY, &[])).contains("the shape [], but"));
    for said in [
        shape(&|file| file.entry_list(KEY, &[-64, -6144])),
        shape(&|file| file.entry_list(KEY, &[1; 65])),
        shape(&|file| file.entry_u32(KEY, 6144)),
        shape(&|file| file.entry_text(KEY, "[6144, 64]")),
    ] {
        assert!(said.starts_with("the value of \"comfy.gguf.orig_shape.w\" is "), "{said}");
        assert!(said.ends_with("where a list of integers from 0 on is due"), "{said}");
    }
}

#[test]
fn splits_that_are_none_are_refused() {
    let both = Bytes::file(0, 2).entry_u32("split.no", 3).entry_u32("split.count", 3);
    assert_eq!(refusal(&both.0), "it says that it is part 3 of 3, counted from 0");
    let number = Bytes::file(0, 1).entry_u32("split.no", 1);
    assert_eq!(refusal(&number.0), "it says that it is part 1 of a split model, but has no `split.count`");
    let count = Bytes::file(0, 1).entry_u32("split.count", 2);
    assert_eq!(refusal(&count.0), "it says that it is one of 2 parts, but has no `split.no`");
    let single = Bytes::file(0, 2).entry_u32("split.no", 0).entry_u32("split.count", 0);
    assert_eq!(read(&single.0).unwrap().1.split(), None);
    let text = Bytes::file(0, 1).entry_text("split.count", "3");
    assert!(refusal(&text.0).contains("the value of \"split.count\" is text"));
}
