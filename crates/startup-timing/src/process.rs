//! What the system counts for this process: bytes by way of reading, page faults, memory. Read from `/proc`; what is not there
//! is not known, and never 0.
//!
//! | way of reading | `io.rchar` | `io.read_bytes` | `faults.major` | `memory.file` |
//! |---|---|---|---|---|
//! | `pread`, not cached | yes | yes | | |
//! | `pread`, cached | yes | | | |
//! | around the page cache | yes | yes | | |
//! | through a mapping, not cached | | yes | few, the system reads ahead | yes |
//! | through a mapping, cached | | | | yes |
//!
//! All of it is of the whole process: two phases that run at once on two threads both have what either of them read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use crate::phase::{Amounts, Levels};

/// One reading of the counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sample {
    /// Bytes of all read calls, cached or not; not those read through mappings.
    pub rchar: Option<i64>,
    /// Bytes that came from a device.
    pub read_bytes: Option<i64>,
    /// Page faults that needed no device.
    pub minor_faults: Option<i64>,
    /// Page faults that waited for one.
    pub major_faults: Option<i64>,
    /// Bytes of memory of the process's own.
    pub anonymous: Option<i64>,
    /// Bytes of mapped files in memory, which the system may take back.
    pub file: Option<i64>,
    /// The most memory that was ever in use.
    pub peak: Option<i64>,
}

impl Sample {
    /// Reads them now: 10 to 40 µs.
    pub fn take() -> Self {
        let mut buffer = [0; 4096];
        let mut sample = Self::default();
        sample.of_io(read(&IO, "/proc/self/io", &mut buffer));
        sample.of_stat(read(&STAT, "/proc/self/stat", &mut buffer));
        sample.of_status(read(&STATUS, "/proc/self/status", &mut buffer));
        sample
    }

    fn of_io(&mut self, text: &str) {
        self.rchar = field(text, "rchar:");
        self.read_bytes = field(text, "read_bytes:");
    }

    fn of_stat(&mut self, text: &str) {
        // The command's name, in parentheses, may hold anything.
        let fields = text.rsplit_once(')').map_or("", |(_, rest)| rest);
        let number = |place: usize| fields.split_whitespace().nth(place)?.parse().ok();
        self.minor_faults = number(7);
        self.major_faults = number(9);
    }

    fn of_status(&mut self, text: &str) {
        let bytes = |name| field(text, name)?.checked_mul(1024);
        self.anonymous = bytes("RssAnon:");
        self.file = bytes("RssFile:");
        self.peak = bytes("VmHWM:");
    }

    /// What happened between two readings.
    pub fn amounts(&self, end: &Self) -> Amounts {
        let between = |from: Option<i64>, to: Option<i64>| to?.checked_sub(from?);
        [
            ("io.rchar", between(self.rchar, end.rchar)),
            ("io.read_bytes", between(self.read_bytes, end.read_bytes)),
            ("faults.minor", between(self.minor_faults, end.minor_faults)),
            ("faults.major", between(self.major_faults, end.major_faults)),
        ]
        .into_iter()
        .map(|(name, amount)| (name.to_owned(), amount))
        .collect()
    }

    /// What was there at two readings.
    pub fn levels(&self, end: &Self) -> Levels {
        [
            ("memory.anonymous", (self.anonymous, end.anonymous)),
            ("memory.file", (self.file, end.file)),
            ("memory.peak", (self.peak, end.peak)),
        ]
        .into_iter()
        .map(|(name, level)| (name.to_owned(), level))
        .collect()
    }
}

fn field(text: &str, name: &str) -> Option<i64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// A file of `/proc` and the process it is of, kept open: opening costs more than reading.
type Kept = OnceLock<Option<(File, u32)>>;
static IO: Kept = OnceLock::new();
static STAT: Kept = OnceLock::new();
static STATUS: Kept = OnceLock::new();

/// The file's text; empty if it cannot be read. A forked child has its parent's open files, so it opens its own each time.
fn read<'a>(kept: &Kept, path: &str, buffer: &'a mut [u8]) -> &'a str {
    let process = std::process::id();
    let fresh;
    let file = match kept.get_or_init(|| File::open(path).ok().map(|file| (file, process))) {
        Some((file, of)) if *of == process => Some(file),
        Some(_) => {
            fresh = File::open(path).ok();
            fresh.as_ref()
        }
        None => None,
    };
    let length = file.and_then(|file| file.read_at(buffer, 0).ok()).unwrap_or(0);
    let text = buffer.get(..length).unwrap_or_default();
    std::str::from_utf8(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn what_is_not_there_is_not_known() {
        let mut sample = Sample::default();
        sample.of_io("");
        sample.of_stat("");
        sample.of_status("Name:\tx\n");
        assert_eq!(sample, Sample::default());
        let amounts = sample.amounts(&Sample { rchar: Some(5), ..sample });
        assert_eq!(amounts["io.rchar"], None);
        assert_eq!(sample.levels(&sample)["memory.file"], (None, None));
    }

    #[test]
    fn the_texts_of_the_system_are_understood() {
        let mut sample = Sample::default();
        sample.of_io("rchar: 100\nwchar: 7\nsyscr: 1\nsyscw: 2\nread_bytes: 40\nwrite_bytes: 0\n");
        sample.of_stat("12 (a ) b) S 1 12 12 0 -1 4194560 321 0 17 0 3 1 0 0 20 0 1 0 99 1 2");
        sample.of_status("VmHWM:\t    9 kB\nRssAnon:\t    3 kB\nRssFile:\t    5 kB\n");
        let wanted = Sample {
            rchar: Some(100),
            read_bytes: Some(40),
            minor_faults: Some(321),
            major_faults: Some(17),
            anonymous: Some(3072),
            file: Some(5120),
            peak: Some(9216),
        };
        assert_eq!(sample, wanted);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_memory() {
        let sample = Sample::take();
        assert!(sample.anonymous.unwrap() > 0 && sample.minor_faults.unwrap() > 0);
    }
}
