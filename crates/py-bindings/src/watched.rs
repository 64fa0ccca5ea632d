//! Long work that Python watches: it is told how far it is, and an error or interrupt of its own stops it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use checkpoint::{Cancel, CheckpointError};
use pyo3::prelude::*;

use crate::error::{Class, Failure, guarded};

/// How often Python is asked: well below the 200 ms in which a load must stop.
const PERIOD: Duration = Duration::from_millis(20);

/// Runs `work` on a thread of its own. `watch` is called on this one with the bytes done so far, as `work` counts them;
/// what it raises, and what a signal does, stops the work and is raised once that has ended.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    watch: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Cancel, &Arc<AtomicU64>) -> Result<T, CheckpointError> + Send,
) -> PyResult<T> {
    let (cancel, done) = (Cancel::new(), Arc::new(AtomicU64::new(0)));
    let (finished, waiting) = channel();
    thread::scope(|scope| {
        let (cancel, done) = (&cancel, &done);
        let worker = thread::Builder::new().name("weightstream-load".into()).spawn_scoped(scope, move || {
            let outcome = guarded(|| Ok(work(cancel, done)?));
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
