//! The client library.
#![forbid(unsafe_code)]
