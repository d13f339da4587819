//! berth
fn main() {}
