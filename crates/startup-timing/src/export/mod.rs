//! Reports for other programs and for people: Chrome traces, folded stacks, tables. Pure.

mod chrome;
mod folded;
mod table;

pub use chrome::chrome_trace;
pub use folded::folded_stacks;
pub(crate) use table::duration;
pub use table::{Column, Table, table};
