//! Private mappings: what they show, what they know of writes, and that they go.
#![allow(clippy::unwrap_used, reason = "a failing test may say so by panicking")]
#![allow(unsafe_code, reason = "mapped memory is written to as an application would")]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use checkpoint::{CheckpointError, FileMap, OpenFile, file_span};

const PAGE: u64 = 4096;

fn contents(size: u64) -> Vec<u8> {
    (0..size).map(|i| (i * 31 % 251) as u8).collect()
}

fn mapped(folder: &Path, size: u64) -> (Arc<OpenFile>, Arc<FileMap>, Vec<u8>) {
    let path = folder.join("file");
    let bytes = contents(size);
    fs::write(&path, &bytes).unwrap();
    let file = Arc::new(OpenFile::open(&path).unwrap());
    let map = FileMap::private(&file).unwrap();
    (file, map, bytes)
}

fn write(map: &FileMap, at: u64, value: u8) {
    let target = map.pointer(at..at + 1).unwrap();
    // SAFETY: the address is in a writable mapping that this test alone uses.
    unsafe { target.write_volatile(value) };
}

fn peek(map: &FileMap, at: u64) -> u8 {
    let source = map.pointer(at..at + 1).unwrap();
    // SAFETY: the address is in a readable mapping that this test alone uses.
    unsafe { source.read_volatile() }
}

#[test]
fn a_mapping_shows_the_file_and_keeps_writes_to_itself() {
    let folder = tempfile::tempdir().unwrap();
    let (file, map, bytes) = mapped(folder.path(), 3 * PAGE + 17);
    assert_eq!(peek(&map, 3 * PAGE + 16), bytes[3 * PAGE as usize + 16]);
    write(&map, 5, 99);
    assert_eq!(peek(&map, 5), 99);
    assert_eq!(fs::read(file.path()).unwrap(), bytes);
    file.check_unchanged().unwrap();
    assert!(map.pointer(0..3 * PAGE + 18).is_none());
    assert_eq!(map.addresses().len() as u64, map.size());
}

#[test]
fn addresses_lead_back_to_the_file_until_the_mapping_goes() {
    let folder = tempfile::tempdir().unwrap();
    let (file, map, _) = mapped(folder.path(), 3 * PAGE + 17);
    let base = map.pointer(0..0).unwrap().as_ptr().cast_const();
    let span = file_span(base.wrapping_add(100), PAGE).unwrap();
    assert_eq!((span.offset(), span.size()), (100, PAGE));
    assert!(Arc::ptr_eq(span.file(), &file));
    assert!(file_span(base.wrapping_add(100), map.size() - 100).is_some());
    assert!(file_span(base.wrapping_add(100), map.size() - 99).is_none(), "past the end");
    assert!(file_span(base.wrapping_sub(1), 2).is_none(), "before the start");
    assert!(file_span(base, u64::MAX).is_none());
    let own = [0_u8; 10];
    assert!(file_span(own.as_ptr(), 10).is_none(), "not a mapping");
    drop(map);
    assert!(file_span(base, 1).is_some(), "the span keeps the mapping");
    drop(span);
    assert!(file_span(base, 1).is_none());
    assert_eq!(Arc::strong_count(&file), 1);
}

#[test]
fn several_mappings_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let (file, first, _) = mapped(folder.path(), 2 * PAGE);
    let second = FileMap::private(&file).unwrap();
    write(&first, 1, 200);
    let span = |map: &FileMap| file_span(map.pointer(0..0).unwrap().as_ptr(), map.size()).unwrap();
    assert!(!span(&first).is_unmodified());
    assert!(span(&second).is_unmodified());
    drop(first);
    assert!(Arc::ptr_eq(span(&second).map(), &second));
}

#[test]
fn pages_that_were_written_to_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let (_, map, _) = mapped(folder.path(), 16 * PAGE + 5);
    let base = map.pointer(0..0).unwrap().as_ptr().cast_const();
    let whole = file_span(base, map.size()).unwrap();
    assert_eq!(whole.modified(), []);
    for page in 0..16 {
        let _ = peek(&map, page * PAGE);
    }
    assert_eq!(whole.modified(), [], "reading changes nothing");
    write(&map, 3 * PAGE + 7, 1);
    write(&map, 4 * PAGE, 1);
    write(&map, 9 * PAGE - 1, 1);
    write(&map, 16 * PAGE + 4, 1);
    assert_eq!(whole.modified(), [3 * PAGE..5 * PAGE, 8 * PAGE..9 * PAGE, 16 * PAGE..16 * PAGE + 5]);
    let part = file_span(base.wrapping_add(4 * PAGE as usize + 50), 4 * PAGE).unwrap();
    assert_eq!(part.modified(), [0..PAGE - 50, 4 * PAGE - 50..4 * PAGE]);
    assert!(file_span(base.wrapping_add(5 * PAGE as usize), 3 * PAGE).unwrap().is_unmodified());
    let empty = file_span(base.wrapping_add(3 * PAGE as usize + 7), 0).unwrap();
    assert!(empty.is_unmodified() && empty.size() == 0);
}

#[test]
fn a_write_of_the_same_value_counts_as_a_write() {
    let folder = tempfile::tempdir().unwrap();
    let (_, map, bytes) = mapped(folder.path(), PAGE);
    write(&map, 0, bytes[0]);
    let span = file_span(map.pointer(0..0).unwrap().as_ptr(), PAGE).unwrap();
    assert!(!span.is_unmodified());
}

#[test]
fn bytes_are_read_as_the_process_sees_them() {
    let folder = tempfile::tempdir().unwrap();
    let (_, map, mut bytes) = mapped(folder.path(), 8 * PAGE + 3);
    for at in [0, 2 * PAGE + 1, 3 * PAGE, 8 * PAGE + 2] {
        write(&map, at, 255);
        bytes[at as usize] = 255;
    }
    let span = file_span(map.pointer(0..0).unwrap().as_ptr(), map.size()).unwrap();
    for (at, size) in [(0, 8 * PAGE + 3), (1, 5), (2 * PAGE, 2 * PAGE), (8 * PAGE, 3), (PAGE - 1, 2), (7, 0)]
    {
        let mut target = vec![0; size as usize];
        span.read("tensor a", at, &mut target).unwrap();
        assert_eq!(target, bytes[at as usize..(at + size) as usize], "{at} {size}");
    }
    let outside = span.read("tensor a", 8 * PAGE, &mut [0; 4]).unwrap_err();
    assert!(matches!(outside, CheckpointError::OutsideFile { .. }), "{outside}");
}

#[test]
fn a_file_that_is_cut_is_an_error_and_not_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let (file, map, _) = mapped(folder.path(), 8 * PAGE);
    write(&map, 6 * PAGE, 1);
    let span = file_span(map.pointer(0..0).unwrap().as_ptr(), map.size()).unwrap();
    fs::File::options().write(true).open(file.path()).unwrap().set_len(2 * PAGE).unwrap();
    let error = span.read("tensor a", PAGE, &mut vec![0; 4 * PAGE as usize]).unwrap_err();
    assert!(error.to_string().contains("tensor a"), "{error}");
    let error = span.read("tensor b", 6 * PAGE, &mut [0; 1]).unwrap_err();
    assert!(error.to_string().contains("tensor b"), "{error}");
    span.read("tensor c", 0, &mut vec![0; 2 * PAGE as usize]).unwrap();
    assert!(matches!(file.check_unchanged(), Err(CheckpointError::Changed { .. })));
    assert!(matches!(FileMap::private(&file), Err(CheckpointError::Changed { .. })));
}

#[test]
fn a_file_of_no_bytes_has_no_addresses() {
    let folder = tempfile::tempdir().unwrap();
    let (_, map, _) = mapped(folder.path(), 0);
    assert!(map.addresses().is_empty());
    assert!(map.pointer(0..0).is_some() && map.pointer(0..1).is_none());
    assert!(file_span(map.pointer(0..0).unwrap().as_ptr(), 1).is_none());
}

#[test]
fn a_child_tells_its_own_pages_from_the_parents() {
    let folder = tempfile::tempdir().unwrap();
    let (_, map, _) = mapped(folder.path(), 4 * PAGE);
    write(&map, 0, 1);
    let span = file_span(map.pointer(0..0).unwrap().as_ptr(), map.size()).unwrap();
    // SAFETY: the child only reads files, takes free locks and leaves without running anything else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        write(&map, 2 * PAGE, 1);
        let right = span.modified() == [0..PAGE, 2 * PAGE..3 * PAGE];
        // SAFETY: leaves at once.
        unsafe { libc::_exit(i32::from(!right)) };
    }
    let mut status = -1;
    // SAFETY: the child is ours and the status lives across the call.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    assert_eq!(span.modified(), [Some(0..PAGE)].map(Option::unwrap), "a child's writes are its own");
}

#[test]
fn what_is_not_a_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(OpenFile::open(folder.path()), Err(CheckpointError::NotAFile { .. })));
    assert!(matches!(OpenFile::open("/dev/null"), Err(CheckpointError::NotAFile { .. })));
    let missing = OpenFile::open(folder.path().join("none")).unwrap_err().to_string();
    assert!(missing.starts_with("cannot open ") && missing.contains("none"), "{missing}");
}
