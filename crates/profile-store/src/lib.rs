#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod error;
pub mod folder;
mod identity;
pub mod json;
mod location;
mod record;
pub mod rules;
mod schema;
mod store;
mod time;

pub use error::{About, Notice, Result, StoreError};
pub use identity::Identity;
pub use json::Json;
pub use location::{VARIABLE, default_folder};
pub use record::Record;
pub use schema::schema;
pub use store::{LIMIT, Loaded, Store, WAIT};
pub use time::now;
