//! Headers made to take time and memory: each is refused with little of either. Memory is counted by the allocator, time
//! by the bytes that were read and the allocations that were made, so that the result does not depend on the machine.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "common/counting.rs"]
mod counting;

use std::io::{self, Read, Write as _};
use std::path::Path;

use checkpoint::safetensors::{HeaderProblem, read_header};
use checkpoint::{CheckpointError, FileHeader, IndexProblem, Limits, Result, read_index};
use counting::taken;

const MIB: isize = 1 << 20;
/// What a refusal may take.
const MEMORY: isize = 64 * MIB;
/// Close to the longest header that is read at all.
const LONG: usize = 99_000_000;

/// Writes the entry of a number.
type Entry<'a> = &'a dyn Fn(usize, &mut Vec<u8>);

/// A document of a stated length, made while it is read: a start, as many entries as fit, spaces, an end.
struct Made<'a> {
    length: usize,
    end: &'a str,
    entry: Entry<'a>,
    number: usize,
    ready: Vec<u8>,
    given: usize,
    written: usize,
}

impl<'a> Made<'a> {
    fn new(length: usize, start: &str, entry: Entry<'a>, end: &'a str) -> Self {
        let written = start.len();
        Self { length, end, entry, number: 0, ready: start.as_bytes().to_vec(), given: 0, written }
    }

    fn refill(&mut self) {
        self.ready.clear();
        self.given = 0;
        let room = self.length - self.end.len() - self.written;
        if room > 0 {
            (self.entry)(self.number, &mut self.ready);
            self.number += 1;
            if self.ready.is_empty() || self.ready.len() > room {
                self.ready.clear();
                self.ready.resize(room.min(1 << 16), b' ');
            }
        } else if self.written < self.length {
            self.ready.extend(self.end.as_bytes());
        }
        self.written += self.ready.len();
    }
}

impl Read for Made<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        if self.given == self.ready.len() {
            self.refill();
        }
        let read = (&self.ready[self.given..]).read(target)?;
        self.given += read;
        Ok(read)
    }
}

/// Counts what is read.
struct Counted<R>(R, usize);

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(target)?;
        self.1 += read;
        Ok(read)
    }
}

/// What reading took.
#[derive(Debug)]
struct Cost {
    peak: isize,
    allocations: usize,
    read: usize,
}

fn measure<T>(source: impl Read, act: impl FnOnce(&mut dyn Read) -> T) -> (T, Cost) {
    let mut source = Counted(source, 0);
    let (outcome, taken) = taken(|| act(&mut source));
    (outcome, Cost { peak: taken.peak, allocations: taken.allocations, read: source.1 })
}

/// Reads a header of `LONG` bytes in a file with `data` bytes of data.
fn header(start: &str, entry: Entry<'_>, end: &str, data: u64) -> (Result<FileHeader>, Cost) {
    let length = (LONG as u64).to_le_bytes();
    let made = (&length[..]).chain(Made::new(LONG, start, entry, end));
    let size = 8 + LONG as u64 + data;
    measure(made, |source| read_header(source, size, Path::new("bomb"), &Limits::default(), false))
}

#[track_caller]
fn refused(outcome: (Result<FileHeader>, Cost)) -> (HeaderProblem, Cost) {
    let (outcome, cost) = outcome;
    assert!(cost.peak < MEMORY, "{cost:?}");
    match outcome {
        Err(CheckpointError::Header { problem, .. }) => (*problem, cost),
        Err(other) => panic!("{other:?}"),
        Ok(header) => panic!("{} tensors were accepted", header.tensors.len()),
    }
}

fn nothing(_: usize, _: &mut Vec<u8>) {}

/// Data in proportion to the longest header.
const ENOUGH: u64 = LONG as u64;

#[test]
fn a_header_out_of_proportion_is_not_even_read() {
    let entry = |n: usize, out: &mut Vec<u8>| {
        let comma = if n == 0 { "" } else { "," };
        write!(out, r#"{comma}"t{n}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#).unwrap();
    };
    let (problem, cost) = refused(header("{", &entry, "}", 0));
    assert!(matches!(problem, HeaderProblem::OutOfProportion { data: 0, .. }), "{problem}");
    assert!(cost.read <= 8 && cost.peak < MIB / 64, "{cost:?}");
}

#[test]
fn tensors_without_end_are_refused_at_the_limit() {
    for offsets in ["0,1", "0,0"] {
        let entry = |n: usize, out: &mut Vec<u8>| {
            let comma = if n == 0 { "" } else { "," };
            write!(out, r#"{comma}"t{n}":{{"dtype":"U8","shape":[1],"data_offsets":[{offsets}]}}"#).unwrap();
        };
        let (problem, cost) = refused(header("{", &entry, "}", ENOUGH));
        assert!(matches!(problem, HeaderProblem::Limit { what: "tensors", limit: 200_000, .. }), "{problem}");
        assert!(cost.read < 20_000_000 && cost.allocations < 1_500_000, "{cost:?}");
    }
}

#[test]
fn the_same_tensor_again_and_again_is_refused() {
    let entry = |n: usize, out: &mut Vec<u8>| {
        let comma = if n == 0 { "" } else { "," };
        write!(out, r#"{comma}"":{{"dtype":"U8","shape":[],"data_offsets":[0,1]}}"#).unwrap();
    };
    let (problem, cost) = refused(header("{", &entry, "}", ENOUGH));
    assert!(matches!(problem, HeaderProblem::Limit { what: "tensors", .. }), "{problem}");
    assert!(cost.read < 20_000_000, "{cost:?}");
}

#[test]
fn a_shape_without_end_is_refused_at_the_limit() {
    let entry = |n: usize, out: &mut Vec<u8>| out.extend_from_slice(if n == 0 { b"1" } else { b",1" });
    let start = r#"{"a":{"dtype":"U8","shape":["#;
    let (problem, cost) = refused(header(start, &entry, r#"],"data_offsets":[0,1]}}"#, ENOUGH));
    assert!(matches!(problem, HeaderProblem::Rank { limit: 64, .. }), "{problem}");
    assert!(cost.read < 100_000 && cost.peak < MIB, "{cost:?}");
}

#[test]
fn long_names_and_many_dimensions_are_refused_at_the_limit_of_memory() {
    let name = "n".repeat(1000);
    let shape = vec!["1"; 64].join(",");
    let long_names = |n: usize, out: &mut Vec<u8>| {
        let comma = if n == 0 { "" } else { "," };
        write!(out, r#"{comma}"{name}{n}":{{"dtype":"U8","shape":[],"data_offsets":[0,1]}}"#).unwrap();
    };
    let many_dimensions = |n: usize, out: &mut Vec<u8>| {
        let comma = if n == 0 { "" } else { "," };
        write!(out, r#"{comma}"{n}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}"#).unwrap();
    };
    for entry in [&long_names as Entry<'_>, &many_dimensions] {
        let (problem, cost) = refused(header("{", entry, "}", ENOUGH));
        assert!(
            matches!(problem, HeaderProblem::Limit { what: "bytes of RAM for what it says", .. }),
            "{problem}"
        );
        assert!(cost.read < 60_000_000, "{cost:?}");
    }
}

#[test]
fn one_long_string_is_refused_wherever_it_stands() {
    let letters = |_: usize, out: &mut Vec<u8>| out.resize(4096, b'a');
    let tensor = r#""t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]"#;
    let places = [
        r#"{""#.to_owned(),
        r#"{"__metadata__":{""#.to_owned(),
        r#"{"__metadata__":{"a":""#.to_owned(),
        r#"{"t":{""#.to_owned(),
        r#"{"t":{"dtype":""#.to_owned(),
        format!(r#"{{{tensor},"x":""#),
        format!(r#"{{{tensor},"x":{{""#),
    ];
    for start in places {
        let (problem, cost) = refused(header(&start, &letters, r#"":1}"#, ENOUGH));
        assert!(matches!(problem, HeaderProblem::Limit { .. }), "{start}: {problem}");
        assert!(cost.read < 20_000_000, "{start}: {cost:?}");
    }
}

#[test]
fn metadata_without_end_is_refused_at_the_limit() {
    let entry = |n: usize, out: &mut Vec<u8>| {
        let comma = if n == 0 { "" } else { "," };
        write!(out, r#"{comma}"{n}":"""#).unwrap();
    };
    let (problem, cost) = refused(header(r#"{"__metadata__":{"#, &entry, "}}", ENOUGH));
    assert!(matches!(problem, HeaderProblem::Limit { what: "metadata entries", .. }), "{problem}");
    assert!(cost.read < 2_000_000 && cost.allocations < 400_000, "{cost:?}");
}

#[test]
fn nesting_and_long_numbers_are_refused_at_once() {
    let start = r#"{"t":{"x":"#;
    let cases: [Entry<'_>; 3] =
        [&|_, out| out.push(b'['), &|_, out| out.extend_from_slice(b"{\"a\":"), &|_, out| out.push(b'9')];
    for entry in cases {
        let (problem, cost) = refused(header(start, entry, "}}", ENOUGH));
        assert!(matches!(problem, HeaderProblem::Limit { .. }), "{problem}");
        assert!(cost.read < 100_000 && cost.peak < MIB, "{cost:?}");
    }
}

#[test]
fn what_is_passed_over_takes_no_memory() {
    // Spaces are read to the end and kept nowhere, values of unknown fields up to a limit.
    let (problem, cost) = refused(header(" ", &nothing, " ", ENOUGH));
    assert!(matches!(problem, HeaderProblem::Syntax { .. }), "{problem}");
    assert!(cost.peak < MIB, "{cost:?}");
    let entry = |n: usize, out: &mut Vec<u8>| {
        out.extend_from_slice(if n == 0 { b"1" } else { b",1" });
        out.extend_from_slice(&b",1".repeat(4000));
    };
    let (problem, cost) = refused(header(r#"{"t":{"x":["#, &entry, "]}}", ENOUGH));
    assert!(matches!(problem, HeaderProblem::Limit { what: "bytes in unknown fields", .. }), "{problem}");
    assert!(cost.peak < MIB && cost.read < 5_000_000, "{cost:?}");
    let entry = |n: usize, out: &mut Vec<u8>| {
        let comma = if n == 0 { "" } else { "," };
        write!(out, r#"{comma}"t{n}":{{"x":[[],{{}},"",0],"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#)
            .unwrap();
    };
    let (problem, _) = refused(header("{", &entry, "}", ENOUGH));
    assert!(matches!(problem, HeaderProblem::Limit { .. }), "{problem}");
}

#[test]
fn a_length_beyond_the_limit_costs_nothing() {
    for length in [100_000_001_u64, u64::MAX, 1 << 63, i64::MAX as u64] {
        let length = length.to_le_bytes();
        let source = (&length[..]).chain(io::repeat(b' '));
        let (outcome, cost) = measure(source, |source| {
            read_header(source, u64::MAX, Path::new("bomb"), &Limits::default(), false)
        });
        assert!(matches!(outcome, Err(CheckpointError::Header { .. })), "{outcome:?}");
        assert!(cost.read <= 256 && cost.peak < MIB / 64, "{cost:?}");
    }
}

#[test]
fn the_largest_header_that_is_accepted_stays_within_the_memory_too() {
    let entry = |n: usize, out: &mut Vec<u8>| {
        let comma = if n == 0 { "" } else { "," };
        let (at, end) = (4 * n, 4 * n + 4);
        if n < 150_000 {
            let name = format!("model.layers.{}.mlp.experts.{}.gate_proj.weight_scale", n / 384, n % 384);
            write!(out, r#"{comma}"{name}":{{"dtype":"F32","shape":[1,1],"data_offsets":[{at},{end}]}}"#)
                .unwrap();
        }
    };
    let length = 30_000_000;
    let source = Made::new(length, "{", &entry, "}");
    let length = (length as u64).to_le_bytes();
    let size = 8 + u64::from_le_bytes(length) + 600_000;
    let mut limits = Limits::default();
    limits.max_header_ratio = 100;
    let source = (&length[..]).chain(source);
    let (outcome, cost) =
        measure(source, |source| read_header(source, size, Path::new("large"), &limits, false));
    assert_eq!(outcome.unwrap().tensors.len(), 150_000);
    assert!(cost.peak < MEMORY, "{cost:?}");
}

#[test]
fn indexes_are_bounded_as_headers_are() {
    let read = |start: &str, entry: Entry<'_>, end: &str| {
        let length = 60_000_000;
        let made = Made::new(length, start, entry, end);
        let (outcome, cost) =
            measure(made, |source| read_index(source, length as u64, Path::new("bomb"), &Limits::default()));
        assert!(cost.peak < MEMORY, "{cost:?}");
        match outcome {
            Err(CheckpointError::Index { problem, .. }) => *problem,
            other => panic!("{other:?}"),
        }
    };
    let tensors = |n: usize, out: &mut Vec<u8>| {
        let comma = if n == 0 { "" } else { "," };
        write!(out, r#"{comma}"{n}":"a""#).unwrap();
    };
    let files = |n: usize, out: &mut Vec<u8>| {
        let comma = if n == 0 { "" } else { "," };
        write!(out, r#"{comma}"{n}":"f{n}""#).unwrap();
    };
    let start = r#"{"weight_map":{"#;
    assert!(matches!(
        read(start, &tensors, "}}"),
        IndexProblem::Limit { what: "bytes of RAM for what it says", .. }
    ));
    assert!(matches!(read(start, &files, "}}"), IndexProblem::Limit { what: "files", .. }));
    assert!(matches!(read(r#"{"x":"#, &|_, out| out.push(b'['), "}"), IndexProblem::Limit { .. }));
    let letters = |_: usize, out: &mut Vec<u8>| out.resize(4096, b'a');
    for start in ["{\"", r#"{"weight_map":{""#, r#"{"weight_map":{"a":""#, r#"{"x":""#] {
        assert!(matches!(read(start, &letters, r#"":1}"#), IndexProblem::Limit { .. }), "{start}");
    }
    let limits = Limits::default();
    let large = read_index(io::empty(), limits.max_index + 1, Path::new("bomb"), &limits);
    assert!(matches!(large, Err(CheckpointError::Index { .. })));
}
