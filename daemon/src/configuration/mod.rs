//! configuration.
