//! A process that may not use `io_uring`, as in many containers, and may not lock memory: everything is read all the same.
#![allow(clippy::unwrap_used, reason = "a failing test may say so by panicking")]
#![allow(unsafe_code, reason = "the filter is put in place as a container's runtime does it")]

use std::sync::Arc;

use checkpoint::io::{IoMode, OpenFile, ReadJob, ReadOptions, read};

/// Makes `io_uring_setup` fail with `EPERM` for this process from now on.
fn forbid_io_uring() {
    const SETUP: u32 = 425;
    let statement = |code: u32, k| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let mut filter = [
        // The number of the call is the first word of what a filter sees.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter { jf: 1, ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, SETUP) },
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned()),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: takes a flag only.
    let promised = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    let flags = libc::SECCOMP_FILTER_FLAG_TSYNC;
    // SAFETY: the program and what it points to live across the call.
    let filtered =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    assert_eq!((promised, filtered), (0, 0));
}

#[test]
fn a_process_that_may_not_use_io_uring_reads_without_it() {
    forbid_io_uring();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let bytes: Vec<u8> = (0..9_u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let file = Arc::new(OpenFile::open(&path).unwrap());
    for (mode, threads) in [(IoMode::Uring, 0), (IoMode::Auto, 2), (IoMode::Uring, 3)] {
        file.file().sync_all().unwrap();
        rustix::fs::fadvise(file.file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let mut target = vec![0; bytes.len() - 3];
        let mut jobs = [ReadJob { name: "x", file: &file, offset: 3, target: &mut target }];
        let report = read(&mut jobs, &ReadOptions { mode, threads, ..ReadOptions::default() }).unwrap();
        assert!(target == bytes[3..]);
        let choice = &report.files[0].choice;
        assert_ne!(choice.mode, IoMode::Uring);
        // Where direct reads are not offered either, or nothing leaves the page cache, that is the reason.
        assert!(choice.mode == IoMode::Buffered || choice.why.contains("not permitted"), "{choice:?}");
    }
}
