//! doctor.
