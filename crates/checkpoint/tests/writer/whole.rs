//! A file is there whole or not at all: what was there before stays until the end, and nothing is left of a failure.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use checkpoint::{
    Cancel, CheckpointError, FileMap, OpenFile, TensorOut, TensorSpec, WriteOptions, Writer, write,
};
use safetensors::{Dtype, SafeTensors};

use crate::names;

const NAME: &str = "model.safetensors";

fn specs(tensors: &[(&str, u64)]) -> Vec<TensorSpec> {
    let spec = |(name, bytes): &(&str, u64)| TensorSpec {
        name: (*name).to_owned(),
        dtype: Dtype::U8,
        shape: vec![*bytes],
    };
    tensors.iter().map(spec).collect()
}

fn write_one(path: &Path, fill: u8, size: usize) -> Result<(), CheckpointError> {
    let bytes = vec![fill; size];
    let tensor = TensorOut { name: "w", dtype: Dtype::U8, shape: &[size as u64], bytes: &bytes };
    write(path, &[tensor], &WriteOptions::default())
}

fn read_one(path: &Path) -> Vec<u8> {
    let bytes = fs::read(path).unwrap();
    SafeTensors::deserialize(&bytes).unwrap().tensor("w").unwrap().data().to_vec()
}

#[test]
fn tensors_come_in_any_order_and_in_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(NAME);
    let mut writer =
        Writer::create(&path, specs(&[("b", 3), ("a", 5), ("c", 0)]), &WriteOptions::default()).unwrap();
    assert_eq!(writer.order(), [1, 0, 2], "by name");
    assert_eq!((writer.size(), writer.bytes(1), writer.bytes(3)), (4096 + 8, Some(5), None));
    writer.write(0, &[10, 11]).unwrap();
    writer.write(1, &[]).unwrap();
    writer.write(1, &[20]).unwrap();
    writer.write(0, &[12]).unwrap();
    writer.write(1, &[21, 22, 23, 24]).unwrap();
    assert_eq!(names(folder.path()).len(), 1);
    assert!(!path.exists(), "not before the end");
    writer.finish().unwrap();
    assert_eq!(names(folder.path()), [NAME]);
    let bytes = fs::read(&path).unwrap();
    let found = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(found.tensor("b").unwrap().data(), [10, 11, 12]);
    assert_eq!(found.tensor("a").unwrap().data(), [20, 21, 22, 23, 24]);
}

#[test]
fn what_was_there_stays_until_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(NAME);
    write_one(&path, 1, 10_000).unwrap();
    let old = Arc::new(OpenFile::open(&path).unwrap());
    let map = FileMap::private(&old).unwrap();

    let mut writer = Writer::create(&path, specs(&[("w", 7)]), &WriteOptions::default()).unwrap();
    writer.write(0, &[2; 7]).unwrap();
    assert_eq!(read_one(&path), vec![1; 10_000]);
    drop(writer);
    assert_eq!(read_one(&path), vec![1; 10_000]);
    assert_eq!(names(folder.path()), [NAME]);

    write_one(&path, 3, 20_000).unwrap();
    assert_eq!(read_one(&path), vec![3; 20_000]);
    // Whoever opened or mapped the old file still has it.
    let mut bytes = [0; 100];
    old.read_exact_at(5000, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 100]);
    drop(map);
}

#[test]
fn missing_bytes_leave_what_was_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(NAME);
    write_one(&path, 1, 10).unwrap();
    let mut writer = Writer::create(&path, specs(&[("v", 7), ("w", 7)]), &WriteOptions::default()).unwrap();
    writer.write(0, &[2; 7]).unwrap();
    writer.write(1, &[2; 6]).unwrap();
    let said = writer.finish().unwrap_err().to_string();
    assert!(said.contains("tensor \"w\" has 7 bytes, and only 6 were given before the end"), "{said}");
    assert_eq!(read_one(&path), [1; 10]);
    assert_eq!(names(folder.path()), [NAME]);
}

/// Cancelled at each of its looks at the flag, the writer leaves nothing.
#[test]
fn a_cancelled_write_leaves_what_was_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(NAME);
    write_one(&path, 1, 10).unwrap();
    let pieces = 4;
    let bytes = vec![2; pieces * (4 << 20)];
    let tensor = TensorOut { name: "w", dtype: Dtype::U8, shape: &[bytes.len() as u64], bytes: &bytes };
    for stop in 0..=pieces {
        let cancel = Cancel::new();
        if stop == 0 {
            cancel.cancel();
        }
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (flag, calls) = (cancel.clone(), Arc::clone(&seen));
        let progress = move |written| {
            let mut calls = calls.lock().unwrap();
            calls.push(written);
            if calls.len() == stop {
                flag.cancel();
            }
        };
        let options = WriteOptions {
            cancel: Some(cancel),
            progress: Some(Arc::new(progress)),
            ..WriteOptions::default()
        };
        let error = write(&path, &[tensor], &options).unwrap_err();
        assert!(matches!(error, CheckpointError::Cancelled), "{stop}: {error}");
        assert_eq!(seen.lock().unwrap().len(), stop, "nothing is written after the flag is set");
        assert_eq!(read_one(&path), [1; 10], "{stop}");
        assert_eq!(names(folder.path()), [NAME], "{stop}");
    }
}

#[test]
fn progress_rises_to_the_files_size() {
    let folder = tempfile::tempdir().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let calls = Arc::clone(&seen);
    let progress = move |written: u64| calls.lock().unwrap().push(written);
    let options = WriteOptions { progress: Some(Arc::new(progress)), ..WriteOptions::default() };
    let bytes = vec![1; (9 << 20) + 5];
    let tensor = |name| TensorOut { name, dtype: Dtype::U8, shape: &[(9 << 20) + 5], bytes: &bytes };
    let path = folder.path().join(NAME);
    write(&path, &[tensor("a"), tensor("b")], &options).unwrap();
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 6, "two tensors of three pieces");
    assert!(seen.is_sorted());
    assert_eq!(*seen.last().unwrap(), fs::metadata(&path).unwrap().len());
}

#[test]
fn a_file_too_large_for_the_disk_is_refused_before_it_is_begun() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(NAME);
    write_one(&path, 1, 10).unwrap();
    let error = Writer::create(&path, specs(&[("w", 1 << 50)]), &WriteOptions::default()).unwrap_err();
    let CheckpointError::NoRoom { needed, free, .. } = &error else { panic!("{error}") };
    assert_eq!(*needed, (1 << 50) + 4096);
    assert!(free.unwrap() < *needed);
    assert!(error.to_string().starts_with("no room for the 1125899906846720 bytes of"), "{error}");
    assert_eq!(read_one(&path), [1; 10]);
    assert_eq!(names(folder.path()), [NAME]);
}

#[test]
fn the_old_files_mode_is_kept_and_a_link_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(NAME);
    write_one(&path, 1, 10).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    write_one(&path, 2, 10).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    let link = folder.path().join("link.safetensors");
    symlink(NAME, &link).unwrap();
    write_one(&link, 3, 10).unwrap();
    assert_eq!((read_one(&link), read_one(&path)), (vec![3; 10], vec![2; 10]));
    assert!(!fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[test]
fn places_that_are_none_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = write_one(folder.path(), 1, 10).unwrap_err();
    assert!(matches!(error, CheckpointError::NotAFile { .. }), "{error}");
    let error = write_one(&folder.path().join("none").join(NAME), 1, 10).unwrap_err();
    assert!(matches!(error, CheckpointError::Io { .. }), "{error}");
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn writers_of_one_file_at_a_time_leave_one_of_theirs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(NAME);
    thread::scope(|scope| {
        for fill in 0..4 {
            let path = &path;
            scope.spawn(move || (0..4).for_each(|_| write_one(path, fill, 100_000).unwrap()));
        }
    });
    let found = read_one(&path);
    assert!(found.len() == 100_000 && found.iter().all(|byte| *byte == found[0]));
    assert_eq!(names(folder.path()), [NAME]);
}
