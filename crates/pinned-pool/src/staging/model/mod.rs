//! Tests of the ring's protocol against a device that does what it must and no more: a copy reads its slot when it runs,
//! and it runs at any time after it was submitted.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod device;
mod orders;
mod schedules;
