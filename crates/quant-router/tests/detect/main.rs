//! What detection makes of files as users have them, well made, mixed and broken.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod bnb;
mod build;
mod compressed;
mod fp4;
mod fp8;
mod ggml;
mod gptq;
mod handlers;
mod int8;
mod markers;
mod nunchaku;
mod properties;
mod quanto;
mod torchao;
mod w4a8;
