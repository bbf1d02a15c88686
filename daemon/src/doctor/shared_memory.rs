//! Judges the file system of the segments.

use bytesize::ByteSize;

use super::{
    probe::{MountFacts, SharedMemoryFacts},
    report::Check,
};

/// What container runtimes give when nobody asks for more.
const CONTAINER_DEFAULT: u64 = 64 << 20;

/// Whether segments can be made, and how large.
#[must_use]
pub fn judge(facts: &SharedMemoryFacts) -> Vec<Check> {
    let mut checks = vec![mount(facts)];
    if facts.mount.is_ok() {
        checks.push(segment(facts));
    }
    checks
}

fn mount(facts: &SharedMemoryFacts) -> Check {
    const NAME: &str = "shared memory";
    let directory = facts.directory.display();
    let mount = match &facts.mount {
        Ok(mount) => mount,
        Err(error) => {
            let remedy = "give a directory on a tmpfs as --shm-dir";
            return Check::fail(NAME, error, remedy);
        }
    };
    let MountFacts {
        kind,
        point,
        total,
        free,
        mode,
    } = mount;
    let found = format!(
        "{directory}: {kind} mounted at {}, {} of {} free, mode {mode:04o}",
        point.display(),
        ByteSize(*free),
        ByteSize(*total),
    );
    if kind != "tmpfs" && kind != "ramfs" {
        let remedy = "weights would lie on a disk: give a directory on a tmpfs as --shm-dir";
        return Check::fail(NAME, found, remedy);
    }
    if mode & 0o002 != 0 && mode & 0o1000 == 0 {
        let remedy = format!("others could remove segments: chmod +t {directory}");
        return Check::fail(NAME, found, remedy);
    }
    if *total <= CONTAINER_DEFAULT {
        let remedy = "few models fit: mount -o remount,size=…, docker run --shm-size=…, \
                      or an emptyDir of medium Memory";
        return Check::warn(NAME, found, remedy);
    }
    Check::ok(NAME, found)
}

fn segment(facts: &SharedMemoryFacts) -> Check {
    const NAME: &str = "segment";
    match &facts.segment_failure {
        None => Check::ok(NAME, "one was made, published and mapped"),
        Some(failure) => Check::fail(
            NAME,
            failure,
            "give a directory that this user can write, with room, as --shm-dir",
        ),
    }
}
