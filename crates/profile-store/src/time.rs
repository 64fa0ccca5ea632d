//! The time of a write, as text.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Now, as ISO 8601 in UTC with microseconds. A clock before 1970 reads as 1970.
pub fn now() -> String {
    iso(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// A time since 1970. Days become a date by counting years from March, whose leap day comes last.
fn iso(since: Duration) -> String {
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let (month, later) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year + era * 400 + later;
    let (hour, minute) = (second / 3_600, second / 60 % 60);
    let (second, micro) = (second % 60, since.subsec_micros());
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}.{micro:06}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |seconds| iso(Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000000Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59.000000Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.000000Z");
        assert_eq!(iso(Duration::new(86_399, 1_000)), "1970-01-01T23:59:59.000001Z");
    }
}
