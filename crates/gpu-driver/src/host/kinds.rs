//! Which host memory a real driver registers, read from the process's memory maps: what it refuses, or never comes back
//! from, must not pass for right here.
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::error::{DriverError, Result};
use crate::types::{Bytes, Registration};

/// The real driver's answer to a range it cannot register.
const INVALID_VALUE: u32 = 1;

/// Refuses a range of which `maps`, in the format of `/proc/self/maps`, say that it is mapped in part, is a private mapping
/// of a file, or may not be written though it is registered for writing.
pub(super) fn check(maps: &str, start: u64, size: Bytes, registration: Registration) -> Result<()> {
    let range = start..start.saturating_add(size.0);
    let mut at = range.start;
    for (area, permissions, inode) in maps.lines().filter_map(area) {
        if area.end <= at || area.start >= range.end {
            continue;
        }
        if area.start > at {
            break;
        }
        if permissions.ends_with('p') && inode != "0" {
            // The real call does not return.
            return Err(refused(start, size, "which is a private mapping of a file"));
        }
        if registration == Registration::ReadWrite && !permissions.starts_with("rw") {
            return Err(refused(start, size, "which may not be written; register it read-only"));
        }
        at = area.end;
    }
    if at < range.end {
        return Err(refused(start, size, "which is not mapped throughout"));
    }
    Ok(())
}

fn refused(start: u64, size: Bytes, what: &str) -> DriverError {
    DriverError::Call {
        call: "register_host",
        code: INVALID_VALUE,
        name: "CUDA_ERROR_INVALID_VALUE".into(),
        detail: format!(": {size} at {start:#x}, {what}"),
    }
}

/// `start-end permissions offset device inode …`.
fn area(line: &str) -> Option<(Range<u64>, &str, &str)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    Some((range, fields.next()?, fields.nth(2)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0
3000-4000 rw-p 00000000 00:00 0 [heap]
4000-5000 r--s 00000000 08:01 77 /weights
5000-6000 rw-p 00000000 08:01 77 /weights
8000-9000 rw-s 00000000 00:01 5 /memfd:weights (deleted)
nonsense
";

    fn answer(range: Range<u64>, registration: Registration) -> String {
        let checked = check(MAPS, range.start, Bytes(range.end - range.start), registration);
        checked.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn what_a_driver_registers_is_taken_and_nothing_else() {
        use Registration::{ReadOnly, ReadWrite};
        let taken = [
            (0x1000..0x3000, ReadWrite),
            (0x2000..0x4000, ReadWrite),
            (0x4000..0x5000, ReadOnly),
            (0x8000..0x9000, ReadWrite),
            (0x1000..0x2000, ReadOnly),
        ];
        for (range, registration) in taken {
            assert_eq!(answer(range.clone(), registration), "", "{range:x?}");
        }
        let refused = [
            (0x4000..0x5000, ReadWrite, "may not be written"),
            (0x5000..0x6000, ReadWrite, "private mapping"),
            (0x5000..0x6000, ReadOnly, "private mapping"),
            (0x4000..0x6000, ReadOnly, "private mapping"),
            (0x8000..0xa000, ReadWrite, "not mapped throughout"),
            (0x0..0x2000, ReadWrite, "not mapped throughout"),
            (0x6000..0x9000, ReadWrite, "not mapped throughout"),
        ];
        for (range, registration, text) in refused {
            assert!(answer(range.clone(), registration).contains(text), "{range:x?}");
        }
    }
}
