//! managers.
