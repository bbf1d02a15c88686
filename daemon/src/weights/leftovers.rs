//! What a dead daemon of this instance left behind and nobody took over, removed before
//! anything is sized.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use nix::{libc::O_NOFOLLOW, unistd::geteuid};

use super::{adoption, error::WeightError, record::SegmentOfRecord};
use crate::state::StateDirectory;

/// Hexadecimal digits of an id.
pub const ID_DIGITS: usize = 32;

/// File name of the segment with that id.
#[must_use]
pub fn segment_name(instance: &str, id: &str) -> String {
    format!("flextensord-{instance}-{id}")
}

/// The id in the name of a segment of exactly this instance, built or being built.
/// Ids hold no '-', so the names of instance `a` are never those of `a-b`.
pub(super) fn id_of<'a>(instance: &str, file: &'a str) -> Option<&'a str> {
    let rest = file.strip_prefix("flextensord-")?;
    let rest = rest.strip_prefix(instance)?.strip_prefix('-')?;
    let id = rest.strip_suffix(".new").unwrap_or(rest);
    let legal = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    (id.len() == ID_DIGITS && id.bytes().all(legal)).then_some(id)
}

/// Whether a file of the state directory is the record of a weight set.
#[must_use]
pub fn is_record(file: &str) -> bool {
    file.starts_with("set-") && file.ends_with(".json")
}

/// Removes segments and state files of weight sets that a dead daemon of this instance
/// left, but for those of which the state files in `adopted` tell; each with a line in the
/// log. To be called under the instance lock.
///
/// A segment that no state file of ours names is only removed when its maker is gone,
/// which its lock tells: another daemon of the same instance name, with another
/// runtime directory, may use the same directory for segments.
///
/// Returns how many segments were removed.
///
/// # Errors
/// When a directory cannot be read or a file not be removed.
pub fn discard(
    shm_dir: &Path,
    instance: &str,
    state: &StateDirectory,
    adopted: &[String],
) -> Result<usize, WeightError> {
    let mut removed = 0;
    for name in state.list()? {
        if !is_record(&name) || adopted.contains(&name) {
            continue;
        }
        match state.read::<SegmentOfRecord>(&name) {
            // a name from a file is followed only where it can be nothing but ours
            Ok(Some(record)) if id_of(instance, &record.segment_file).is_some() => {
                let path = shm_dir.join(&record.segment_file);
                // a broken record may name a set that a good one names
                if adoption::is_kept(adopted, &path, instance) {
                    state.remove(&name)?;
                    continue;
                }
                if is_own_file(&path) {
                    remove(&path, "named by a state file")?;
                    removed += 1;
                }
            }
            Ok(_) => {}
            Err(e) => tracing::warn!(file = name, "discarding state file: {e}"),
        }
        tracing::info!(file = name, "discarding state of a weight set");
        state.remove(&name)?;
    }
    let failed = |source| {
        WeightError::Kernel(flextensord_device::kernel::KernelError {
            operation: format!("list {}", shm_dir.display()),
            source,
        })
    };
    for entry in fs::read_dir(shm_dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_named_so = path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| id_of(instance, name).is_some());
        let goes = is_named_so && !adoption::is_kept(adopted, &path, instance);
        if goes && is_own_file(&path) && maker_is_gone(&path) {
            remove(&path, "its maker is gone")?;
            removed += 1;
        }
    }
    Ok(removed)
}

fn is_own_file(path: &Path) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|found| found.is_file() && found.uid() == geteuid().as_raw())
}

/// A segment's maker holds a lock on it for as long as it has it open.
fn maker_is_gone(path: &Path) -> bool {
    let opened: io::Result<File> = OpenOptions::new()
        .read(true)
        .custom_flags(O_NOFOLLOW)
        .open(path);
    opened.is_ok_and(|file| file.try_lock().is_ok())
}

fn remove(path: &Path, why: &str) -> Result<(), WeightError> {
    tracing::info!(segment = %path.display(), why, "removing a segment that was left behind");
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            let operation = format!("remove {}", path.display());
            Err(flextensord_device::kernel::KernelError { operation, source }.into())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use flextensord_device::segment::SegmentBuilder;
    use serde_json::json;

    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn only_names_of_exactly_this_instance_are_ours() {
        let own = segment_name("a", ID);
        assert_eq!(id_of("a", &own), Some(ID));
        assert_eq!(id_of("a", &format!("{own}.new")), Some(ID));
        assert_eq!(id_of("a", &segment_name("a-b", ID)), None);
        assert_eq!(id_of("a-b", &own), None);
        // an instance whose name ends like an id
        assert_eq!(id_of("a", &segment_name(&format!("a-{ID}"), ID)), None);
        for bad in [
            "flextensord-a-",
            "flextensord-a-xyz",
            "a",
            &own[..own.len() - 1],
        ] {
            assert_eq!(id_of("a", bad), None, "{bad}");
        }
    }

    #[test]
    fn what_a_dead_daemon_left_goes_and_what_others_have_stays() {
        let shm = tempfile::tempdir().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(dir.path()).unwrap();
        let other_id = ID.replace('0', "f");
        let file = |name: &str| fs::write(shm.path().join(name), b"x").unwrap();
        file(&segment_name("a", ID));
        file(&format!("{}.new", segment_name("a", &other_id)));
        file(&segment_name("a-b", ID));
        file("unrelated");
        let live = segment_name("a", &ID.replace('1', "e"));
        let live = SegmentBuilder::new(shm.path(), &live, 4096).unwrap();
        state
            .write(
                "set-1.json",
                &json!({"format": 99, "segment_file": segment_name("a", ID)}),
            )
            .unwrap();
        state
            .write("set-2.json", &json!({"segment_file": "unrelated"}))
            .unwrap();
        state
            .write("set-3.json", &json!({"segment_file": "../../etc/passwd"}))
            .unwrap();
        fs::write(dir.path().join("set-4.json"), b"{").unwrap();
        state.write("manager-1.json", &1).unwrap();
        assert_eq!(discard(shm.path(), "a", &state, &[]).unwrap(), 2);
        assert_eq!(state.list().unwrap(), ["manager-1.json"]);
        let mut left: Vec<_> = fs::read_dir(shm.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let live_name = format!("{}.new", segment_name("a", &ID.replace('1', "e")));
        assert_eq!(left, [&live_name, &segment_name("a-b", ID), "unrelated"]);
        drop(live);
    }
}
