//! The locks and threads of the ring, in one place so that the crate's own tests can swap them for a model checker's.
//! Integration tests and users get the standard library's.
#![forbid(unsafe_code)]

#[cfg(not(test))]
pub(super) use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread,
};

#[cfg(test)]
pub(super) use shuttle::{
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread,
};

/// Locks, also after a panic elsewhere: every critical section leaves the state whole.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits for the next change.
pub(super) fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
}
