//! lifecycle.
