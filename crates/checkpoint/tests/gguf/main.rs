//! GGUF headers: as the format's own package reads them, as a naive writer means them, and bad in every way.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failure is the test's")]

mod build;
mod counted;
#[path = "../common/counting.rs"]
mod counting;
mod good;
mod hostile;
mod properties;
mod reference;
