//! Taking over the weight sets of a dead daemon: before anything is served, and before
//! what is not taken over is removed. Nothing is copied; pinning comes later.

use std::{
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use flextensord_device::{
    failpoint::{self, Point},
    mapping::Mapping,
    segment::Segment,
};

use super::{
    digest::{self, BLOCK, Digest},
    error::WeightError,
    leftovers,
    manifest::Manifest,
    pinning::Pinned,
    record::{self, FORMAT, SetRecord},
    registry::WeightStore,
    set::{Identity, NewSet, WeightSet},
};

/// Bytes that are populated and pinned at a time, so that the first parts of a set can be
/// copied at full speed before the last are pinned.
const CHUNK: u64 = 64 << 20;

impl WeightStore {
    /// Takes over every set that its state file, its segment and, with `verify`, the digest
    /// of its bytes agree on; removes what is left then. To be called under the instance
    /// lock, once, before anything is served. Returns how many were taken over.
    ///
    /// # Errors
    /// When a directory cannot be read, or a file that is left not be removed. A set that
    /// cannot be taken over is no error: it is logged, and removed.
    pub fn adopt(&self, verify: bool) -> Result<usize, WeightError> {
        let mut adopted = Vec::new();
        for file in self.state().list()? {
            if !leftovers::is_record(&file) {
                continue;
            }
            match self.adopt_one(&file, verify) {
                Ok(set) => {
                    tracing::info!(
                        set = set.id(),
                        name = set.name(),
                        bytes = set.segment().bytes(),
                        "weight set taken over"
                    );
                    self.restore(set);
                    adopted.push(file);
                }
                Err(why) => tracing::warn!(file, why, "weight set not taken over"),
            }
        }
        let settings = self.settings();
        leftovers::discard(
            &settings.shm_dir,
            &settings.instance,
            self.state(),
            &adopted,
        )?;
        Ok(adopted.len())
    }

    fn adopt_one(&self, file: &str, verify: bool) -> Result<Arc<WeightSet>, String> {
        let text = |error: &dyn std::error::Error| error.to_string();
        failpoint::pass(Point::AdoptSegment).map_err(|e| text(&e))?;
        let record: SetRecord = self
            .state()
            .read(file)
            .map_err(|e| text(&e))?
            .ok_or("the state file is gone")?;
        let settings = self.settings();
        check(&record, file, &settings.instance)?;
        let identity = identity(&record)?;
        let tensor_digests: Vec<Digest> = record
            .tensor_digests
            .iter()
            .map(|hex| digest::parse_hex(hex))
            .collect::<Option<_>>()
            .ok_or("a digest of a tensor is none")?;
        let segment = Segment::adopt(
            &settings.shm_dir,
            &record.segment_file,
            record.segment_bytes,
        )
        .map_err(|e| text(&e))?;
        if verify && !tensor_digests.is_empty() {
            let found = digests(&record.manifest, segment.mapping(), settings.load_threads)?;
            let pairs = record.manifest.tensors().iter().zip(&tensor_digests);
            if let Some(((entry, _), _)) = pairs.zip(&found).find(|((_, a), b)| a != b) {
                return Err(format!("the bytes of tensor {:?} are others", entry.name));
            }
        }
        failpoint::pass(Point::AdoptedSegment).map_err(|e| text(&e))?;
        Ok(Arc::new(WeightSet::new(NewSet {
            pinned: Pinned::default(),
            reservation: self.budget.adopt(record.segment_bytes),
            segment,
            id: record.id,
            name: record.name,
            owner_uid: record.owner_uid,
            shared: record.shared,
            manifest: record.manifest,
            identity,
            tensor_digests,
            loaded_at: record.loaded_at,
        })))
    }

    /// Pins the sets that were taken over, those that managers are attached to first, in
    /// chunks that are of use at once. Blocks the thread; ends early when the store closes.
    pub fn pin_adopted(&self) {
        let pinner = &self.settings().pinner;
        let mut sets = self.all();
        sets.sort_by_key(|set| (set.attachments() == 0, u64::MAX - set.last_use()));
        for set in sets {
            let total = set.segment().bytes();
            let mut done = set.pinned_bytes();
            while done < total && !pinner.is_closed() {
                let bytes = CHUNK.min(total - done);
                populate(
                    set.segment().mapping(),
                    done,
                    bytes,
                    self.settings().load_threads,
                );
                let pinned = pinner.pin_range(set.segment().mapping(), done, bytes);
                let goes_on = pinned.degraded.is_none();
                set.add_pins(pinned);
                done += bytes;
                if !goes_on {
                    break;
                }
            }
        }
    }
}

/// Whether a record says what it can say of this instance.
fn check(record: &SetRecord, file: &str, instance: &str) -> Result<(), String> {
    if record.format != FORMAT {
        return Err(format!("format {} instead of {FORMAT}", record.format));
    }
    if record::file_name(&record.id) != file
        || leftovers::segment_name(instance, &record.id) != record.segment_file
    {
        return Err("id, file and segment do not belong together".to_owned());
    }
    if record.manifest.segment_bytes() != record.segment_bytes {
        return Err(format!(
            "manifest of {} bytes with a segment of {}",
            record.manifest.segment_bytes(),
            record.segment_bytes
        ));
    }
    let digests = record.tensor_digests.len();
    if digests != 0 && digests != record.manifest.tensors().len() {
        return Err(format!("{digests} digests of tensors"));
    }
    Ok(())
}

fn identity(record: &SetRecord) -> Result<Identity, String> {
    match (&record.digest, &record.content_id) {
        (Some(hex), None) => digest::parse_hex(hex)
            .map(Identity::Digest)
            .ok_or_else(|| "its digest is none".to_owned()),
        (None, Some(id)) => Ok(Identity::ContentId(id.clone())),
        _ => Err("neither a digest nor a content id, or both".to_owned()),
    }
}

/// The digests of all tensors, from the bytes as they are now.
fn digests(manifest: &Manifest, segment: &Mapping, threads: usize) -> Result<Vec<Digest>, String> {
    let tensors = manifest.tensors();
    let next = AtomicUsize::new(0);
    let found = Mutex::new(vec![None; tensors.len()]);
    let hash = |at: usize| -> Option<Digest> {
        let entry = &tensors[at];
        let mut offset = usize::try_from(manifest.segment_offset(entry)?).ok()?;
        let mut left = usize::try_from(entry.bytes).ok()?;
        let mut blocks = Vec::new();
        let mut bytes = vec![0; left.min(BLOCK)];
        while left > 0 {
            let length = left.min(BLOCK);
            segment.read(offset, &mut bytes[..length]).ok()?;
            blocks.push(digest::block(&bytes[..length]));
            offset += length;
            left -= length;
        }
        Some(digest::tensor(entry.bytes, &blocks))
    };
    thread::scope(|scope| {
        for _ in 0..threads.clamp(1, tensors.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= tensors.len() {
                        return;
                    }
                    let digest = hash(at);
                    found.lock().unwrap_or_else(PoisonError::into_inner)[at] = digest;
                }
            });
        }
    });
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found
        .into_iter()
        .collect::<Option<_>>()
        .ok_or_else(|| "a tensor does not lie in the segment".to_owned())
}

/// Maps pages by several threads: one alone takes longer than the driver does afterwards.
fn populate(segment: &Mapping, offset: u64, bytes: u64, threads: usize) {
    let index = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let share = index(bytes)
        .div_ceil(threads.max(1))
        .next_multiple_of(1 << 20);
    let end = index(offset.saturating_add(bytes));
    thread::scope(|scope| {
        for first in (index(offset)..end).step_by(share) {
            scope.spawn(move || segment.populate(first, share.min(end - first)));
        }
    });
}

/// Whether the path of a segment is one that this instance may remove.
pub(super) fn is_kept(adopted: &[String], path: &Path, instance: &str) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let id = name.and_then(|name| leftovers::id_of(instance, name));
    id.is_some_and(|id| adopted.contains(&record::file_name(id)))
}
