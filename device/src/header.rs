//! The header that control pages and journals begin with (see
//! [`flextensord_proto::layout`]).

use std::sync::atomic::Ordering::SeqCst;

use flextensord_proto::layout;

use crate::{
    control::{ControlError, ControlIdentity},
    mapping::{Mapping, RangeError},
};

/// Writes the header of a new page or file.
pub(crate) fn write(
    mapping: &Mapping,
    magic: u64,
    identity: ControlIdentity,
) -> Result<(), RangeError> {
    mapping.word64(layout::MAGIC)?.store(magic, SeqCst);
    mapping
        .word32(layout::VERSION)?
        .store(layout::LAYOUT_VERSION, SeqCst);
    mapping.word32(layout::PARTS)?.store(identity.parts, SeqCst);
    mapping
        .word64(layout::LEASE_EPOCH)?
        .store(identity.lease_epoch, SeqCst);
    mapping
        .word64(layout::PLAN_VERSION)?
        .store(identity.plan_version, SeqCst);
    Ok(())
}

/// Checks that a page is of the kind `magic` and of this version of the layout.
pub(crate) fn check_kind(mapping: &Mapping, magic: u64) -> Result<(), ControlError> {
    expect("magic", mapping.load64(layout::MAGIC)?, magic)?;
    let version = mapping.load32(layout::VERSION)?;
    expect(
        "layout version",
        version.into(),
        layout::LAYOUT_VERSION.into(),
    )
}

/// Checks that a page is that of `identity`.
pub(crate) fn check(
    mapping: &Mapping,
    magic: u64,
    identity: ControlIdentity,
) -> Result<(), ControlError> {
    check_kind(mapping, magic)?;
    expect(
        "parts",
        mapping.load32(layout::PARTS)?.into(),
        identity.parts.into(),
    )?;
    expect(
        "lease epoch",
        mapping.load64(layout::LEASE_EPOCH)?,
        identity.lease_epoch,
    )?;
    expect(
        "plan version",
        mapping.load64(layout::PLAN_VERSION)?,
        identity.plan_version,
    )
}

fn expect(what: &'static str, found: u64, expected: u64) -> Result<(), ControlError> {
    if found == expected {
        Ok(())
    } else {
        Err(ControlError::Header {
            what,
            found,
            expected,
        })
    }
}
