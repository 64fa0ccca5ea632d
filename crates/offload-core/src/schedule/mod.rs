//! Which copies go when: a pure state machine from unit visits to commands.
//!
//! ```text
//!   visits     enter(0)            leave(0) enter(1)            leave(1) enter(2) …
//!   compute    wait copied 0 ─ … ─ last use 0  wait copied 1 ─ … ─ last use 1 …
//!   copies     copy 0, copy 1      └── wait ── copy 2              └── wait ── copy 3 …   (two slots)
//! ```
//!
//! It learns the order of a step's visits, copies units ahead of their turn, follows repeats and skips, and serves a
//! unit nobody expected on demand. It knows no device and no clock: [`engine`](crate::engine) executes its
//! commands, `simulate` times them, tests explore every order in which they can complete.
//!
//! **Invariants.** A copy is issued only after every unit whose ring bytes overlap its own was left, and waits for
//! uses already recorded only. A unit that is open or held is never overwritten. A copy ahead of its turn never
//! overwrites a unit that is expected sooner. Steady visits allocate nothing.
//!
//! The commands assume one logical compute queue: whoever executes them on several compute streams makes each
//! stream wait for the one before it when it changes. Waiting for the latest of several uses then covers the others.

mod command;
mod copies;
mod error;
mod order;
mod state;
mod view;

pub use command::Command;
pub use error::ScheduleError;
pub use state::Schedule;
pub use view::UnitView;

#[cfg(test)]
mod tests;
