//! The descriptor channel: one-time tickets, and the socket where they are redeemed.

pub mod server;
pub mod ticket;
