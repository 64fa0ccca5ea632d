//! The example network on the emulator, which compares every output itself.
#![allow(missing_docs, dead_code, clippy::unwrap_used, reason = "tests")]

#[path = "../examples/mlp/main.rs"]
mod mlp;

#[test]
fn the_example_network_streams_to_the_same_bits() {
    mlp::run(Some("host")).unwrap();
}
