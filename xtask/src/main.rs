//! Entry point of the project commands.
fn main() {}
