//! The daemon's binary.
#![forbid(unsafe_code)]

fn main() {}
