//! Judges whether logging out takes the shared memory away.

use super::{probe::LoginFacts, report::Check};

/// The login manager removes shared memory of users who are not system users when they
/// log out, a daemon's too.
#[must_use]
pub fn judge(facts: &LoginFacts) -> Check {
    const NAME: &str = "log out";
    let uid = facts.uid;
    if !facts.managed {
        Check::ok(NAME, "no login manager removes shared memory")
    } else if uid <= facts.last_system_uid {
        Check::ok(
            NAME,
            format!("uid {uid} is a system user: its memory stays"),
        )
    } else if !facts.removes {
        Check::ok(NAME, "RemoveIPC=no: memory stays")
    } else if facts.lingers {
        Check::ok(NAME, format!("uid {uid} lingers: its memory stays"))
    } else {
        Check::warn(
            NAME,
            format!("segments of uid {uid} are removed when it logs out (RemoveIPC=yes)"),
            "run the daemon as a system user, or RemoveIPC=no in logind.conf, \
             or loginctl enable-linger",
        )
    }
}
