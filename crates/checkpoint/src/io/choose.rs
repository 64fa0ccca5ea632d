//! Which way a file is read, and why: a decision over facts, no question to the system in it.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use super::place::{Kind, Place};

/// Below this many bytes nothing is worth setting up.
const SMALL: u64 = 1 << 20;
/// From this part on in the page cache, all is read through it.
const WARM: f64 = 0.98;
/// Up to this part in the page cache, all is read past it.
const COLD: f64 = 0.02;

/// A way to read files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum IoMode {
    /// Whichever suits: what lies in the page cache is read through it, the rest past it where that can be done.
    #[default]
    Auto,
    /// Tensors are views of a mapping, nothing is copied. Where bytes have to be copied all the same, this reads
    /// [`Buffered`](Self::Buffered): a file that is cut under a mapping ends the process that reads it there.
    Mapped,
    /// `pread` through the page cache, which keeps the bytes for the next start.
    Buffered,
    /// `pread` past the page cache (`O_DIRECT`), by many threads.
    Direct,
    /// `io_uring` past the page cache, several reads in flight a thread.
    Uring,
}

/// The way that was taken, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoChoice {
    /// Never [`IoMode::Auto`].
    pub mode: IoMode,
    /// A sentence for people.
    pub why: String,
}

/// What is known of a file and of the machine.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    /// Where the file lies.
    pub(crate) place: Place,
    /// The part of what is asked for that lies in the page cache.
    pub(crate) resident: Option<f64>,
    /// How many bytes are asked for.
    pub(crate) asked: u64,
    /// Whether fewer threads may read than reads should be in flight.
    pub(crate) few_threads: bool,
    /// Why direct reads cannot be done, if they cannot.
    pub(crate) direct: Result<(), String>,
    /// Why `io_uring` cannot be used, if it cannot.
    pub(crate) uring: Result<(), String>,
}

/// A choice, and whether chunks that lie in the page cache are read through it all the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) choice: IoChoice,
    pub(crate) mixed: bool,
    /// Whether the page cache has little of it, so that a buffered read waits for the device.
    pub(crate) cold: bool,
}

/// Decides.
pub(crate) fn choose(wanted: IoMode, facts: &Facts) -> Decision {
    let cold = facts.place.kind != Kind::Memory && facts.resident.is_none_or(|part| part < WARM);
    let decided = |mode, why: String, mixed| Decision { choice: IoChoice { mode, why }, mixed, cold };
    match wanted {
        IoMode::Auto => {
            let (past, why) = auto(facts);
            if !past {
                return decided(IoMode::Buffered, why, false);
            }
            let mixed = facts.resident.is_none_or(|part| part > COLD);
            // With as many threads as reads in flight io_uring has nothing to add: beside bare direct reads, threads read at
            // 0.88 of the rate and io_uring at 0.83, on two busy cores.
            let (mode, how) = past_cache(facts, facts.few_threads);
            decided(mode, format!("{why}; {how}"), mixed && mode != IoMode::Buffered)
        }
        IoMode::Mapped => {
            let why = "bytes that are copied are read, not taken from the mapping: a file that is cut is then an error";
            decided(IoMode::Buffered, why.into(), false)
        }
        IoMode::Buffered => decided(IoMode::Buffered, "asked for".into(), false),
        IoMode::Direct | IoMode::Uring => {
            let (mode, how) = past_cache(facts, wanted == IoMode::Uring);
            let why = if mode == wanted { "asked for".into() } else { how };
            decided(mode, why, false)
        }
    }
}

/// Whether to read past the page cache, and why or why not.
fn auto(facts: &Facts) -> (bool, String) {
    let Place { name, kind, rotating } = &facts.place;
    let percent = facts.resident.map(|part| (part * 100.0).round());
    match kind {
        Kind::Memory => return (false, format!("files on {name} lie in memory")),
        Kind::Network => return (false, format!("{name} reads ahead and keeps what others read")),
        Kind::Local => {}
    }
    if facts.asked < SMALL {
        return (false, format!("{} bytes are not worth more", facts.asked));
    }
    match (facts.resident, percent) {
        (Some(part), Some(percent)) if part >= WARM => {
            return (false, format!("{percent} % of it lies in the page cache"));
        }
        _ => {}
    }
    if *rotating {
        return (false, format!("{name} on a device that rotates is fastest read in order and ahead"));
    }
    match percent {
        Some(percent) => (true, format!("{percent} % of it lies in the page cache, the rest on {name}")),
        None => (true, format!("{name}, and nothing tells what lies in the page cache")),
    }
}

/// The best way past the page cache that this machine has.
fn past_cache(facts: &Facts, ring: bool) -> (IoMode, String) {
    if let Err(why) = &facts.direct {
        return (IoMode::Buffered, format!("direct reads are not offered: {why}"));
    }
    match (&facts.uring, ring) {
        (Ok(()), true) => (IoMode::Uring, "direct reads through io_uring".into()),
        (Err(why), true) => {
            (IoMode::Direct, format!("direct reads by threads, as io_uring is not offered: {why}"))
        }
        (_, false) => (IoMode::Direct, "direct reads by threads".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        let place = Place { name: "ext4".into(), kind: Kind::Local, rotating: false };
        Facts {
            place,
            resident: Some(0.0),
            asked: 1 << 30,
            few_threads: false,
            direct: Ok(()),
            uring: Ok(()),
        }
    }

    fn auto_mode(facts: &Facts) -> (IoMode, bool, String) {
        let decision = choose(IoMode::Auto, facts);
        (decision.choice.mode, decision.mixed, decision.choice.why)
    }

    #[test]
    fn auto_goes_by_what_is_known() {
        let (mode, mixed, why) = auto_mode(&facts());
        assert_eq!((mode, mixed), (IoMode::Direct, false));
        assert!(why.contains("0 % of it lies in the page cache, the rest on ext4"), "{why}");
        let half = auto_mode(&Facts { resident: Some(0.4), ..facts() });
        assert_eq!((half.0, half.1), (IoMode::Direct, true));
        let unknown = auto_mode(&Facts { resident: None, ..facts() });
        assert_eq!((unknown.0, unknown.1), (IoMode::Direct, true));
        let few = auto_mode(&Facts { few_threads: true, ..facts() });
        assert_eq!((few.0, few.1), (IoMode::Uring, false));
        let warm = auto_mode(&Facts { resident: Some(1.0), ..facts() });
        assert_eq!((warm.0, warm.1), (IoMode::Buffered, false));
        assert!(warm.2.contains("100 %"), "{}", warm.2);
        assert_eq!(auto_mode(&Facts { asked: 4096, ..facts() }).0, IoMode::Buffered);
        for (kind, rotating) in [(Kind::Memory, false), (Kind::Network, false), (Kind::Local, true)] {
            let place = Place { name: "x".into(), kind, rotating };
            assert_eq!(auto_mode(&Facts { place, ..facts() }).0, IoMode::Buffered);
        }
        let no_ring = auto_mode(&Facts { few_threads: true, uring: Err("not permitted".into()), ..facts() });
        assert_eq!(no_ring.0, IoMode::Direct);
        assert!(no_ring.2.contains("not permitted"), "{}", no_ring.2);
        let no_direct =
            auto_mode(&Facts { direct: Err("unsupported".into()), resident: Some(0.5), ..facts() });
        assert_eq!((no_direct.0, no_direct.1), (IoMode::Buffered, false));
    }

    #[test]
    fn what_is_asked_for_is_done_or_the_reason_given() {
        for mode in [IoMode::Buffered, IoMode::Direct, IoMode::Uring] {
            assert_eq!(choose(mode, &facts()).choice, IoChoice { mode, why: "asked for".into() });
        }
        assert_eq!(choose(IoMode::Mapped, &facts()).choice.mode, IoMode::Buffered);
        let neither = Facts { direct: Err("no".into()), uring: Err("none".into()), ..facts() };
        assert_eq!(choose(IoMode::Direct, &neither).choice.mode, IoMode::Buffered);
        let no_ring = Facts { uring: Err("none".into()), ..facts() };
        let choice = choose(IoMode::Uring, &no_ring).choice;
        assert_eq!(choice.mode, IoMode::Direct);
        assert!(choice.why.contains("none"), "{}", choice.why);
    }

    #[test]
    fn waiting_for_the_device_is_known() {
        assert!(choose(IoMode::Buffered, &facts()).cold);
        assert!(!choose(IoMode::Buffered, &Facts { resident: Some(1.0), ..facts() }).cold);
    }
}
