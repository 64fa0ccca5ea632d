#![doc = include_str!("../README.md")]
#![expect(unsafe_code, reason = "this crate owns device addresses and pages")]

mod error;
mod page;
mod retire;
mod space;
mod table;
mod window;

pub use error::{Result, UndoFailure, VmmError};
pub use page::{Page, PagePool, PoolReport};
pub use retire::poison_page;
pub use space::{AddressSpace, SpaceReport};
