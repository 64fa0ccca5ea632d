//! The clock of recordings: monotonic, the same for all processes of one boot, with an anchor in wall time.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Where a recording's times start, so that recordings of several processes can be laid beside each other.
///
/// Processes of one boot share the monotonic clock. Across boots, hosts or time namespaces only the wall time is left, which is
/// as good as the machines' clocks agree.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Clock {
    /// The monotonic clock at the start, in nanoseconds.
    pub monotonic_origin: u64,
    /// Wall time at the start, in nanoseconds since 1970.
    pub unix_origin: u64,
    /// Which boot and time namespace the monotonic clock belongs to; empty if that is not known.
    #[serde(default)]
    pub boot_id: String,
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            monotonic_origin: monotonic(),
            unix_origin: u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX),
            boot_id: boot(),
        }
    }

    /// Nanoseconds since the start.
    pub fn now(&self) -> u64 {
        monotonic().saturating_sub(self.monotonic_origin)
    }

    /// The time of this clock for a reading of the monotonic clock in nanoseconds; what lies before the start is the start.
    pub fn at(&self, monotonic: u64) -> u64 {
        monotonic.saturating_sub(self.monotonic_origin)
    }
}

/// The boot's id, and the time namespace where that is not everybody's.
fn boot() -> String {
    let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned());
    let Ok(boot) = read("/proc/sys/kernel/random/boot_id") else { return String::new() };
    let offset = read("/proc/self/timens_offsets").unwrap_or_default();
    let moved = offset.lines().any(|line| line.split_whitespace().skip(1).any(|number| number != "0"));
    if moved { format!("{boot} {}", offset.split_whitespace().collect::<Vec<_>>().join(" ")) } else { boot }
}

#[cfg(unix)]
pub(crate) fn monotonic() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, nanoseconds) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
    seconds.unwrap_or_default().saturating_mul(1_000_000_000).saturating_add(nanoseconds.unwrap_or_default())
}

/// Elsewhere the clock starts with the first recording of the process, and has no boot that others could share.
#[cfg(not(unix))]
pub(crate) fn monotonic() -> u64 {
    static FIRST: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    u64::try_from(FIRST.get_or_init(std::time::Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds since this process was started by the system, to the hundredth of a second that the system keeps.
#[cfg(target_os = "linux")]
pub(crate) fn process_age() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // Ticks of user space are hundredths of a second on Linux, whatever the kernel's are.
    let ticks: u64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    let boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now =
        u64::try_from(boot.tv_sec).ok()?.checked_mul(1_000_000_000)? + u64::try_from(boot.tv_nsec).ok()?;
    Some(now.saturating_sub(ticks.checked_mul(10_000_000)?))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn process_age() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on_from_zero() {
        let clock = Clock::start();
        let first = clock.now();
        assert!(clock.now() >= first && first < 60_000_000_000);
        assert_eq!(clock.at(clock.monotonic_origin + 5), 5);
        assert_eq!(clock.at(0), 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_is_younger_than_its_machine() {
        let boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let age = process_age().unwrap_or(u64::MAX);
        assert!(age <= boot.tv_sec.unsigned_abs() * 1_000_000_000 + 1_000_000_000);
    }
}
