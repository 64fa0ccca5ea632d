//! Long work that Python watches: it is told how far it is, and an error or interrupt of its own stops it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use checkpoint::Cancel;
use pyo3::prelude::*;

use crate::error::{Class, Failure, guarded};

/// How often Python is asked: well below the 200 ms in which a load must stop.
const PERIOD: Duration = Duration::from_millis(20);

/// Runs `work` on a thread of its own. `watch` is called on this one with the bytes done so far, as `work` counts them;
/// what it raises, and what a signal does, stops the work and is raised once that has ended.
pub(crate) fn watched<T: Send, E: Into<Failure>>(
    py: Python<'_>,
    watch: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Cancel, &Arc<AtomicU64>) -> Result<T, E> + Send,
) -> PyResult<T> {
    let (cancel, done) = (Cancel::new(), Arc::new(AtomicU64::new(0)));
    watched_by(py, watch, &cancel, &done, || work(&cancel, &done))
}

/// The same for work that has its flag and its count already.
pub(crate) fn watched_by<T: Send, E: Into<Failure>>(
    py: Python<'_>,
    watch: Option<&Bound<'_, PyAny>>,
    cancel: &Cancel,
    done: &AtomicU64,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T> {
    let (finished, waiting) = channel();
    thread::scope(|scope| {
        let worker = thread::Builder::new().name("weightstream-load".into()).spawn_scoped(scope, move || {
            let outcome = guarded(|| work().map_err(Into::into));
            // The other end may be gone only if this process is being torn down.
            let _ = finished.send(());
            outcome
        });
        let worker = match worker {
            Ok(worker) => worker,
            Err(error) => {
                return Err(Failure::new(Class::Internal, format!("no thread to load with: {error}")).into());
            }
        };
        let mut stopped = None;
        let mut waiting = waiting;
        loop {
            let outcome;
            (outcome, waiting) = py.detach(move || (waiting.recv_timeout(PERIOD), waiting));
            if outcome != Err(RecvTimeoutError::Timeout) {
                break;
            }
            let asked = py.check_signals().and_then(|()| match watch {
                Some(watch) => watch.call1((done.load(Ordering::Relaxed),)).map(drop),
                None => Ok(()),
            });
            if let Err(error) = asked {
                cancel.cancel();
                stopped = Some(error);
                break;
            }
        }
        let outcome = py.detach(move || worker.join());
        match (stopped, outcome) {
            (Some(error), _) => Err(error),
            (None, Ok(outcome)) => Ok(outcome?),
            (None, Err(_)) => Err(Failure::new(Class::Internal, "a loading thread ended in a panic").into()),
        }
    })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, clippy::expect_used, reason = "tests")]
    use std::sync::mpsc::sync_channel;

    use checkpoint::CheckpointError;
    use pyo3::exceptions::PyKeyError;
    use pyo3::ffi::c_str;

    use super::*;

    #[test]
    fn what_the_watcher_raises_stops_the_work_and_is_raised() {
        Python::initialize();
        Python::attach(|py| {
            let raises = py.eval(c_str!("lambda done: {}[done]"), None, None).unwrap();
            let (ended, end) = sync_channel(1);
            let outcome = watched(py, Some(&raises), move |cancel, done| {
                done.store(7, Ordering::Relaxed);
                while !cancel.is_cancelled() {
                    thread::sleep(Duration::from_millis(1));
                }
                ended.send(()).unwrap();
                Err::<(), _>(CheckpointError::Cancelled)
            });
            let error = outcome.unwrap_err();
            assert!(error.is_instance_of::<PyKeyError>(py), "{error}");
            assert!(error.to_string().contains('7'), "{error}");
            end.try_recv().expect("the work has ended before the error is raised");
        });
    }

    #[test]
    fn work_that_ends_by_itself_gives_its_outcome() {
        Python::initialize();
        Python::attach(|py| {
            assert_eq!(watched(py, None, |_, _| Ok::<_, Failure>(3)).unwrap(), 3);
            let failed = watched(py, None, |_, _| Err::<(), _>(CheckpointError::Cancelled));
            assert!(failed.is_err());
        });
    }
}
