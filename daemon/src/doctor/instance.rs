//! Judges directories and sockets.

use super::{probe::InstanceFacts, report::Check};
use crate::lifecycle::socket::Occupant;

/// Whether a daemon serves, or could.
#[must_use]
pub fn judge(facts: &InstanceFacts) -> Vec<Check> {
    vec![directory(facts), daemon(facts), channel(facts)]
}

fn directory(facts: &InstanceFacts) -> Check {
    const NAME: &str = "runtime directory";
    let path = facts.directory.display();
    match &facts.objection {
        Some(objection) => Check::fail(
            NAME,
            objection,
            "make it the daemon's own and writable by nobody else, or give another --runtime-dir",
        ),
        None if facts.exists => Check::ok(NAME, path.to_string()),
        None => Check::ok(NAME, format!("{path} does not exist; serve makes it")),
    }
}

fn daemon(facts: &InstanceFacts) -> Check {
    const NAME: &str = "daemon";
    let (path, occupant) = &facts.grpc;
    let path = path.display();
    match occupant {
        Ok(Occupant::Listener { pid }) => {
            let process = pid.map_or_else(String::new, |pid| format!(", process {pid}"));
            let own = facts.own_version;
            match facts.version.as_deref() {
                Some(version) if version == own => {
                    Check::ok(NAME, format!("version {version} serves {path}{process}"))
                }
                Some(version) => Check::warn(
                    NAME,
                    format!("version {version} serves {path}{process}, this is {own}"),
                    "restart the daemon to upgrade it",
                ),
                None => Check::warn(
                    NAME,
                    format!("a daemon that does not tell its version serves {path}{process}"),
                    "it may be starting, hung, or closed to this user: see its log",
                ),
            }
        }
        other => vacant(NAME, &path, other, || {
            format!("none serves instance {}", facts.name)
        }),
    }
}

fn channel(facts: &InstanceFacts) -> Check {
    const NAME: &str = "descriptor channel";
    let (path, occupant) = &facts.channel;
    let path = path.display();
    let daemon = matches!(facts.grpc.1, Ok(Occupant::Listener { .. }));
    match occupant {
        Ok(Occupant::Listener { .. }) => Check::ok(NAME, format!("listens at {path}")),
        _ if daemon => Check::fail(
            NAME,
            format!("nobody listens at {path}, though the daemon serves"),
            "its socket was removed under it: restart the daemon",
        ),
        other => vacant(NAME, &path, other, || format!("nothing at {path}")),
    }
}

fn vacant(
    name: &'static str,
    path: &dyn std::fmt::Display,
    occupant: &Result<Occupant, String>,
    nobody: impl FnOnce() -> String,
) -> Check {
    match occupant {
        Ok(Occupant::Nobody | Occupant::Listener { .. }) => Check::ok(name, nobody()),
        Ok(Occupant::Stale) => Check::warn(
            name,
            format!("{path} is left from a daemon that died"),
            "nothing: the next serve takes it over",
        ),
        Ok(Occupant::Other(found)) => Check::fail(
            name,
            format!("{path} is {found}, not a socket"),
            "move it away",
        ),
        Err(error) => Check::fail(
            name,
            error,
            "run doctor as the daemon's user or in its group",
        ),
    }
}
