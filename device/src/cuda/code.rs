//! tmp
/// tmp
pub const OUT_OF_MEMORY: u32 = 2;
/// tmp
pub fn name(_c: u32) -> &'static str { "x" }
/// tmp
pub fn is_sticky(c: u32) -> bool { c >= 700 }
