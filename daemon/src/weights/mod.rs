//! weights.
