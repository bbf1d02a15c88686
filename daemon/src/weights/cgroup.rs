//! What the chain of memory cgroups of this process leaves, in either version.
//!
//! A group's headroom is its limit less what it uses, plus the file cache that the
//! kernel would give up. Pages of shared memory are never counted as such cache.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// What the tightest memory cgroup leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Headroom {
    /// Bytes.
    pub bytes: u64,
    /// The group's path below its mount.
    pub group: String,
}

/// File names of one version of the interface.
struct Version {
    limit: &'static str,
    usage: &'static str,
    cache: [&'static str; 2],
}

const V2: Version = Version {
    limit: "memory.max",
    usage: "memory.current",
    cache: ["inactive_file", "active_file"],
};
const V1: Version = Version {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: ["total_inactive_file", "total_active_file"],
};
/// A limit from here on is how version 1 says that there is none.
const UNLIMITED: u64 = 1 << 62;

/// The tightest of all memory cgroups that this process is in, with their parents;
/// `None` when none has a limit. `root` is `/`, or a fixture.
#[must_use]
pub fn tightest(root: &Path) -> Option<Headroom> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let mut found: Vec<Headroom> = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let version = if controllers.is_empty() {
            V2
        } else if controllers.split(',').any(|c| c == "memory") {
            V1
        } else {
            continue;
        };
        let is_v2 = controllers.is_empty();
        if let Some((mount, below)) = mounts.lines().find_map(|m| mount_of(m, is_v2, path)) {
            let mount = root.join(mount.strip_prefix('/').unwrap_or(&mount));
            chain(&mount, &below, &version, &mut found);
        }
    }
    found.into_iter().min_by_key(|headroom| headroom.bytes)
}

/// Mount point and the group's path below it, if this line of mountinfo mounts that
/// hierarchy.
fn mount_of(line: &str, is_v2: bool, group: &str) -> Option<(String, String)> {
    let (before, after) = line.split_once(" - ")?;
    let mut before = before.split(' ').skip(3);
    let (mounted, point) = (before.next()?, before.next()?);
    let mut after = after.split(' ');
    let kind = after.next()?;
    let options = after.nth(1).unwrap_or_default();
    let fits = if is_v2 {
        kind == "cgroup2"
    } else {
        kind == "cgroup" && options.split(',').any(|o| o == "memory")
    };
    if !fits {
        return None;
    }
    // in a container without a namespace of its own the mount begins at its group;
    // a group outside of the mount is as good as the mount's own
    let below = group
        .strip_prefix(mounted.trim_end_matches('/'))
        .filter(|rest| rest.is_empty() || rest.starts_with('/'))
        .filter(|rest| !rest.split('/').any(|part| part == ".."))
        .unwrap_or_default();
    Some((point.to_owned(), below.trim_matches('/').to_owned()))
}

/// Adds the headroom of the group and of all its parents up to the mount.
fn chain(mount: &Path, below: &str, version: &Version, found: &mut Vec<Headroom>) {
    let mut group = PathBuf::from(below);
    loop {
        if let Some(bytes) = headroom(&mount.join(&group), version) {
            let group = format!("/{}", group.display());
            found.push(Headroom { bytes, group });
        }
        if !group.pop() {
            return;
        }
    }
}

fn headroom(directory: &Path, version: &Version) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(directory.join(name)).ok()?;
        text.trim().parse().ok()
    };
    // "max" is no number
    let limit = number(version.limit).filter(|limit| *limit < UNLIMITED)?;
    let usage = number(version.usage).unwrap_or(0);
    let stat = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
    let cache: u64 = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| version.cache.contains(name))
        .filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok())
        .fold(0, u64::saturating_add);
    Some(limit.saturating_sub(usage.saturating_sub(cache)))
}

#[cfg(test)]
pub(crate) mod fixture {
    //! A file tree like /proc and /sys/fs/cgroup.

    use std::{fs, path::Path};

    /// Writes files below `root`, with their directories.
    pub(crate) fn write(root: &Path, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    /// A line of mountinfo for version 2.
    pub(crate) const MOUNT_V2: &str = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
}

#[cfg(test)]
mod tests {
    use super::{fixture::*, *};

    const MOUNT_V1: &str = "33 31 0:33 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                            34 31 0:34 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";

    fn found(files: &[(&str, &str)]) -> Option<(u64, String)> {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), files);
        tightest(root.path()).map(|h| (h.bytes, h.group))
    }

    #[test]
    fn a_limit_on_the_parent_counts_and_file_cache_is_given_back() {
        let files = [
            ("proc/self/cgroup", "0::/a.slice/b.service\n"),
            ("proc/self/mountinfo", MOUNT_V2),
            ("sys/fs/cgroup/a.slice/b.service/memory.max", "max\n"),
            ("sys/fs/cgroup/a.slice/b.service/memory.current", "5\n"),
            ("sys/fs/cgroup/a.slice/memory.max", "1000\n"),
            ("sys/fs/cgroup/a.slice/memory.current", "900\n"),
            (
                "sys/fs/cgroup/a.slice/memory.stat",
                "anon 100\nfile 800\nshmem 300\nactive_file 200\ninactive_file 300\n",
            ),
        ];
        assert_eq!(found(&files), Some((600, "/a.slice".to_owned())));
    }

    #[test]
    fn version_1_in_a_container_without_a_namespace_is_found_at_its_mount() {
        let files = [
            (
                "proc/self/cgroup",
                "9:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n",
            ),
            ("proc/self/mountinfo", MOUNT_V1),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4096\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "96\n"),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "cache 50\ntotal_active_file 6\n",
            ),
        ];
        assert_eq!(found(&files), Some((4006, "/".to_owned())));
    }

    #[test]
    fn no_limit_is_no_limit() {
        let v1 = [
            ("proc/self/cgroup", "9:memory:/docker/abc\n"),
            ("proc/self/mountinfo", MOUNT_V1),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
        ];
        assert_eq!(found(&v1), None);
        let v2 = [
            ("proc/self/cgroup", "0::/x\n"),
            ("proc/self/mountinfo", MOUNT_V2),
            ("sys/fs/cgroup/x/memory.max", "max\n"),
        ];
        assert_eq!(found(&v2), None);
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[("proc/self/cgroup", "garbage\n:\n")]), None);
    }

    #[test]
    fn a_group_outside_of_its_mount_does_not_climb() {
        let files = [
            ("proc/self/cgroup", "0::/../../secret\n"),
            ("proc/self/mountinfo", MOUNT_V2),
            ("sys/fs/cgroup/memory.max", "7\n"),
            ("secret/memory.max", "3\n"),
        ];
        assert_eq!(found(&files), Some((7, "/".to_owned())));
    }
}
