//! Stands in for the daemon in tests.
