//! The threads that dequantize: one pool a process, made when first used. A forked child has none of its parent's threads and
//! makes its own.

use std::sync::{Arc, Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Class, Failure};

static POOL: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);

/// The pool of this process.
pub(super) fn threads() -> Result<Arc<ThreadPool>, Failure> {
    let process = std::process::id();
    let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((owner, threads)) = pool.as_ref()
        && *owner == process
    {
        return Ok(Arc::clone(threads));
    }
    let made =
        ThreadPoolBuilder::new().thread_name(|number| format!("weightstream-numbers-{number}")).build();
    let made = Arc::new(made.map_err(|error| {
        Failure::new(Class::Internal, format!("no threads to dequantize weights with: {error}"))
    })?);
    // A parent's pool is left alone: its threads are not here, and nobody would answer.
    std::mem::forget(pool.replace((process, Arc::clone(&made))));
    Ok(made)
}
