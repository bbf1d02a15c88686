//! transfer.
