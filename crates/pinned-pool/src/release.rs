//! Memory that is given back on a thread of its own, since that takes a while, and those who wait for it: what is still
//! locked by a load that was ended must not be refused to the next one.
#![forbid(unsafe_code)]

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::watch::Watch;

/// The longest that is waited for: unlocking and freeing a terabyte. What takes longer is stuck.
const LONGEST: Duration = Duration::from_secs(20);
/// How often a watch is asked meanwhile.
const AGAIN: Duration = Duration::from_millis(5);

static RELEASES: Mutex<u64> = Mutex::new(0);
static RELEASED: Condvar = Condvar::new();

/// Counts a release as long as it lives.
struct Release;

impl Release {
    fn new() -> Self {
        *RELEASES.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        *RELEASES.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        RELEASED.notify_all();
    }
}

/// Runs `release` on a thread of its own, or at once where there is none to be had.
pub(crate) fn behind(release: impl FnOnce() + Send + 'static) {
    let counted = Release::new();
    let work = move || {
        release();
        drop(counted);
    };
    if let Err(error) = std::thread::Builder::new().name("host-release".into()).spawn(work) {
        tracing::debug!(%error, "memory was given back without a thread of its own");
    }
}

/// Waits for what is being given back, unless `watch` ends that.
pub(crate) fn wait(watch: &Watch) -> Result<()> {
    let until = Instant::now() + LONGEST;
    let mut releases = RELEASES.lock().unwrap_or_else(PoisonError::into_inner);
    while *releases > 0 && Instant::now() < until {
        watch.check()?;
        releases = RELEASED.wait_timeout(releases, AGAIN).unwrap_or_else(PoisonError::into_inner).0;
    }
    Ok(())
}
