//! Tests of the engine on the host emulator.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod case;
mod case_budget;
mod desc;
mod draw;
mod faulty;
mod life;
mod mutant;
mod property;
mod rig;
mod rng;
mod source;
mod threads;
mod timing;

pub(super) use mutant::{Mutant, mutate, mutate_schedule};
