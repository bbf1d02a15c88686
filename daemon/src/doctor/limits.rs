//! Judges the limits of the process.

use bytesize::ByteSize;

use super::{probe::LimitFacts, report::Check};

/// Descriptors that a manager needs: its stream's share, its channel, pages, memory,
/// doorbell, process.
const OF_A_MANAGER: u64 = 16;
/// Descriptors of the daemon itself.
const OF_THE_DAEMON: u64 = 64;

/// Whether limits may stand in the way.
#[must_use]
pub fn judge(facts: &LimitFacts) -> Vec<Check> {
    vec![memlock(facts), descriptors(facts)]
}

fn memlock(facts: &LimitFacts) -> Check {
    const NAME: &str = "locked memory";
    match facts.memlock {
        u64::MAX => Check::ok(NAME, "not limited"),
        // pinning by a driver need not count against the limit: no reason to refuse
        bytes => Check::warn(
            NAME,
            format!(
                "limited to {}; the cpu device locks none, pinning for a GPU may fail",
                ByteSize(bytes)
            ),
            "LimitMEMLOCK=infinity in the unit, or docker run --ulimit memlock=-1",
        ),
    }
}

fn descriptors(facts: &LimitFacts) -> Check {
    const NAME: &str = "open files";
    let (soft, hard) = facts.descriptors;
    let managers = u64::try_from(facts.max_managers).unwrap_or(u64::MAX);
    let wanted = managers
        .saturating_mul(OF_A_MANAGER)
        .saturating_add(OF_THE_DAEMON);
    let found = if soft == u64::MAX {
        "not limited".to_owned()
    } else {
        format!("limited to {soft}, {managers} managers may need {wanted}")
    };
    if soft >= wanted {
        Check::ok(NAME, found)
    } else if hard >= wanted {
        let remedy = format!("ulimit -n {wanted}, LimitNOFILE={wanted}, or a smaller max_managers");
        Check::warn(NAME, found, remedy)
    } else {
        let remedy = format!(
            "LimitNOFILE={wanted} or docker run --ulimit nofile={wanted} (the hard limit is \
             {hard}), or a smaller max_managers"
        );
        Check::warn(NAME, found, remedy)
    }
}
