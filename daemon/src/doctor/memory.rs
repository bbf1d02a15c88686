//! Judges the memory that weights may take.

use std::path::{Component, Path, PathBuf};

use bytesize::ByteSize;

use super::{
    probe::{GroupFacts, MemoryFacts},
    report::Check,
};

/// How much room there is, and who limits it.
#[must_use]
pub fn judge(facts: &MemoryFacts) -> Check {
    const NAME: &str = "host memory";
    let (available, mut found) = match &facts.machine {
        Ok((available, total)) => {
            let (free, all) = (ByteSize(*available), ByteSize(*total));
            (*available, format!("{free} of {all} available"))
        }
        Err(error) => return Check::warn(NAME, error, "weight sets need a configured host_memory"),
    };
    let mut room = available;
    if let Some(group) = &facts.group {
        found.push_str(&format!(
            ", control group {} holds {} of at most {}",
            group.path.display(),
            ByteSize(group.used),
            ByteSize(group.limit)
        ));
        room = room.min(group.limit.saturating_sub(group.used));
    } else {
        found.push_str(", no control group limits it");
    }
    match facts.configured {
        Some(wanted) if wanted > room => Check::warn(
            NAME,
            format!(
                "{found}; host_memory is {}, more than there is",
                ByteSize(wanted)
            ),
            "weights are refused when memory ends: raise MemoryMax= or docker run --memory, \
             or lower host_memory",
        ),
        _ => Check::ok(NAME, found),
    }
}

/// Whether shared memory may come in huge pages: told, since nothing depends on it.
#[must_use]
pub fn huge_pages(facts: &MemoryFacts) -> Check {
    const NAME: &str = "huge pages";
    let found = match &facts.shmem_enabled {
        Some(text) => {
            // the kernel lists all words and brackets the one that holds
            let chosen = text.split(['[', ']']).nth(1).unwrap_or(text);
            format!("shmem_enabled is {chosen}; a tmpfs goes by its own huge= option")
        }
        None => "the kernel has none for shared memory".to_owned(),
    };
    Check::ok(NAME, found)
}

/// The tightest memory limit on the way from our control group up to the root, versions
/// 1 and 2. `groups` is `/proc/self/cgroup`, `root` where the file systems are mounted,
/// `read` reads a file.
pub fn tightest_group(
    groups: &str,
    root: &Path,
    read: &dyn Fn(&Path) -> Option<String>,
) -> Option<GroupFacts> {
    let mut tightest: Option<GroupFacts> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (base, limit, used) = if controllers.is_empty() {
            (root.to_owned(), "memory.max", "memory.current")
        } else if controllers.split(',').any(|name| name == "memory") {
            let used = "memory.usage_in_bytes";
            (root.join("memory"), "memory.limit_in_bytes", used)
        } else {
            continue;
        };
        for group in upwards(path) {
            let folder = base.join(&group);
            let number = |name: &str| read(&folder.join(name))?.trim().parse::<u64>().ok();
            // "max" is no number; version 1 writes its own idea of infinity
            let Some(limit) = number(limit).filter(|limit| *limit < 1 << 60) else {
                continue;
            };
            let used = number(used).unwrap_or(0);
            let headroom = limit.saturating_sub(used);
            let tighter = tightest
                .as_ref()
                .is_none_or(|t| headroom < t.limit.saturating_sub(t.used));
            if tighter {
                tightest = Some(GroupFacts {
                    path: folder,
                    limit,
                    used,
                });
            }
        }
    }
    tightest
}

/// The group and its parents, relative to the root of their file system. In a container
/// that file system's root may be our own group, so it is always looked at.
fn upwards(path: &str) -> Vec<PathBuf> {
    let named = Path::new(path).components().filter_map(|part| match part {
        Component::Normal(name) => Some(name),
        _ => None,
    });
    let whole: PathBuf = named.collect();
    whole.ancestors().map(Path::to_owned).collect()
}
