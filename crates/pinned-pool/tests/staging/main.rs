//! The staging ring on the emulator: bytes from memory, from files and from page-locked memory, in every copy order, when
//! reads and driver calls fail, and what is left at the end.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "tests")]

mod failures;
mod life;
mod property;
mod rig;
