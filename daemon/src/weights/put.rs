//! Storing a weight set from a client's memory: declare, write, finish.
//!
//! Bytes go straight into the segment. Where the name is live, they are compared with
//! the live set instead, so that a second copy is never made.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
};

use flextensord_proto::limit;

pub use super::declaration::Declaration;
use super::{
    claim::{Build, Call, Claim},
    declaration::{TEXT_BYTES, place},
    digest,
    error::WeightError,
    load::{self, Outcome, SetRequest},
    loader::Watch,
    manifest::Manifest,
    registry::{WeightSet, WeightStore},
    room::Room,
    shares::Share,
};

/// A put under way. Dropped before [`PutSession::finish`] it leaves nothing behind.
#[derive(Debug)]
pub struct PutSession {
    store: Arc<WeightStore>,
    request: SetRequest,
    declared: Vec<Declaration>,
    text_bytes: u64,
    stage: Stage,
    _call: Call,
    // last: what it stands for goes before it
    share: Share,
}

#[derive(Debug)]
enum Stage {
    Declaring,
    Writing(Box<Writing>),
}

#[derive(Debug)]
struct Writing {
    manifest: Manifest,
    /// Storage by the name of the tensor that owns it.
    owners: HashMap<String, usize>,
    /// Bytes that came, by storage.
    written: Vec<u64>,
    target: Target,
}

#[derive(Debug)]
enum Target {
    /// A segment of our own.
    Segment { room: Room, build: Build },
    /// A live set whose bytes must be the same; tensors by storage.
    Compare {
        set: Arc<WeightSet>,
        tensors: Vec<Vec<usize>>,
    },
    /// A live set that the caller's content id vouches for.
    Vouched { set: Arc<WeightSet> },
}

impl PutSession {
    /// Begins a put.
    ///
    /// # Errors
    /// When name or content id break a rule, or too many loads and puts are under way.
    pub fn new(store: &Arc<WeightStore>, request: SetRequest) -> Result<Self, WeightError> {
        request.check()?;
        Ok(Self {
            _call: store.admit(request.uid)?,
            share: store.declarations.none(request.uid),
            store: Arc::clone(store),
            request,
            declared: Vec::new(),
            text_bytes: 0,
            stage: Stage::Declaring,
        })
    }

    /// Declares tensors; all of them come before the first bytes.
    ///
    /// # Errors
    /// When bytes have come already, there are too many tensors, their names and shapes
    /// are too long, or too much is declared by all puts under way.
    pub fn declare(&mut self, tensors: Vec<Declaration>) -> Result<(), WeightError> {
        let count = self.declared.len().saturating_add(tensors.len());
        let rule = match self.stage {
            Stage::Writing(_) => "tensors are declared before the first data".to_owned(),
            Stage::Declaring if count > limit::TENSORS => {
                format!("at most {} tensors", limit::TENSORS)
            }
            Stage::Declaring => {
                let text: u64 = tensors.iter().map(Declaration::text_bytes).sum();
                let all = self.text_bytes.saturating_add(text);
                if all > TEXT_BYTES {
                    let rule = format!("names and shapes of at most {TEXT_BYTES} bytes");
                    return Err(WeightError::argument("tensors", all, rule));
                }
                let fixed = tensors.len().saturating_mul(size_of::<Declaration>());
                self.share.grow(text.saturating_add(fixed as u64))?;
                self.text_bytes = all;
                self.declared.extend(tensors);
                return Ok(());
            }
        };
        Err(WeightError::argument("tensors", count, rule))
    }

    /// Stores a run of bytes of the storage that `tensor` owns. The first call reserves
    /// the memory and may wait for another call that builds the same name.
    ///
    /// # Errors
    /// When the bytes are not the next ones of their storage, differ from the live set
    /// of that name, or there is no room.
    pub fn write(
        &mut self,
        tensor: &str,
        offset: u64,
        bytes: &[u8],
        watch: &dyn Watch,
    ) -> Result<(), WeightError> {
        let writing = self.writing(watch)?;
        let field = || format!("data[{tensor}].offset");
        let Some(storage) = writing.owners.get(tensor).copied() else {
            let rule = "the name of a declared tensor that owns its storage";
            return Err(WeightError::argument("data.tensor", tensor, rule));
        };
        let (Some(entry), Some(written)) = (
            writing.manifest.storages().get(storage).copied(),
            writing.written.get_mut(storage),
        ) else {
            return Err(WeightError::Internal("owner without a storage"));
        };
        if offset != *written {
            let rule = format!("the next byte of this storage is {written}");
            return Err(WeightError::argument(field(), offset, rule));
        }
        let length = bytes.len() as u64;
        let end = offset.checked_add(length).filter(|end| *end <= entry.bytes);
        let Some(end) = end else {
            let rule = format!(
                "with {length} bytes it passes the end of its storage of {} bytes",
                entry.bytes
            );
            return Err(WeightError::argument(field(), offset, rule));
        };
        match &mut writing.target {
            Target::Segment { room, build } => {
                let at = entry.offset.saturating_add(offset);
                let segment = room.builder.bytes_mut()?;
                usize::try_from(at)
                    .ok()
                    .and_then(|at| segment.get_mut(at..)?.get_mut(..bytes.len()))
                    .ok_or(WeightError::Internal("storage outside its segment"))?
                    .copy_from_slice(bytes);
                build.progress.done.fetch_add(length, Ordering::Relaxed);
            }
            Target::Compare { set, tensors } => {
                let of_storage = tensors.get(storage).map_or(&[][..], Vec::as_slice);
                compare(set, &writing.manifest, of_storage, offset, bytes)?;
            }
            Target::Vouched { .. } => {}
        }
        *written = end;
        Ok(())
    }

    /// Makes the set live, or attaches to the live one with the same content.
    ///
    /// # Errors
    /// [`WeightError::Aborted`] when bytes are missing; see [`WeightStore::load`] for
    /// the others.
    pub fn finish(mut self, watch: &dyn Watch) -> Result<Outcome, WeightError> {
        if let Stage::Declaring = self.stage {
            let (manifest, owners) = self.placed()?;
            // nothing is reserved, and nobody evicted, for bytes that never came
            if manifest.logical_bytes() > 0 {
                return Err(ended_early(0, manifest.logical_bytes()));
            }
            self.begin(manifest, owners, watch)?;
        }
        let Stage::Writing(writing) = std::mem::replace(&mut self.stage, Stage::Declaring) else {
            return Err(WeightError::Internal("a put without a stage"));
        };
        let came: u64 = writing.written.iter().sum();
        let wanted = writing.manifest.logical_bytes();
        if came != wanted {
            return Err(ended_early(came, wanted));
        }
        match writing.target {
            Target::Segment { mut room, build } => {
                let threads = self.store.settings().load_threads;
                let digests = match self.request.content_id {
                    Some(_) => None,
                    None => {
                        let segment = room.builder.bytes_mut()?;
                        let digests = digest::of_segment(&writing.manifest, segment, threads);
                        Some(digests.ok_or(WeightError::Internal("tensor outside its segment"))?)
                    }
                };
                let outcome =
                    self.store
                        .publish(&self.request, writing.manifest, room, digests, watch);
                drop(build);
                outcome
            }
            Target::Compare { set, .. } | Target::Vouched { set } => {
                if !self
                    .store
                    .confirm(&set, self.request.uid, self.request.share)?
                {
                    return Err(WeightError::Aborted {
                        what: "put",
                        reason: "the weight set was dropped while it was compared".to_owned(),
                    });
                }
                Ok(Outcome {
                    set,
                    attached: true,
                })
            }
        }
    }

    fn writing(&mut self, watch: &dyn Watch) -> Result<&mut Writing, WeightError> {
        if let Stage::Declaring = self.stage {
            let (manifest, owners) = self.placed()?;
            self.begin(manifest, owners, watch)?;
        }
        match &mut self.stage {
            Stage::Writing(writing) => Ok(writing),
            Stage::Declaring => Err(WeightError::Internal("a put without a stage")),
        }
    }

    fn placed(&mut self) -> Result<(Manifest, HashMap<String, usize>), WeightError> {
        if self.declared.is_empty() {
            let rule = "no tensors: a set has at least one";
            return Err(WeightError::argument("tensors", 0, rule));
        }
        place(std::mem::take(&mut self.declared))
    }

    fn begin(
        &mut self,
        manifest: Manifest,
        owners: HashMap<String, usize>,
        watch: &dyn Watch,
    ) -> Result<(), WeightError> {
        let target = self.target(&manifest, watch)?;
        let written = vec![0; manifest.storages().len()];
        self.stage = Stage::Writing(Box::new(Writing {
            manifest,
            owners,
            written,
            target,
        }));
        Ok(())
    }

    fn target(&self, manifest: &Manifest, watch: &dyn Watch) -> Result<Target, WeightError> {
        match self.store.claim(self.request.key(manifest), watch)? {
            Claim::Build(build) => {
                let total = manifest.logical_bytes();
                build.progress.total.store(total, Ordering::Relaxed);
                let room = self.store.room(self.request.uid, manifest, watch)?;
                Ok(Target::Segment { room, build })
            }
            Claim::Live(set) => {
                if load::check_declared(&set, &self.request, manifest)? {
                    return Ok(Target::Vouched { set });
                }
                let mut tensors = vec![Vec::new(); manifest.storages().len()];
                for (number, tensor) in manifest.tensors().iter().enumerate() {
                    let storage = usize::try_from(tensor.storage).unwrap_or(usize::MAX);
                    if let Some(of_storage) = tensors.get_mut(storage) {
                        of_storage.push(number);
                    }
                }
                Ok(Target::Compare { set, tensors })
            }
        }
    }
}

fn ended_early(came: u64, wanted: u64) -> WeightError {
    WeightError::Aborted {
        what: "put",
        reason: format!("its stream ended after {came} of {wanted} bytes"),
    }
}

/// Compares a run of bytes of one storage with the tensors that lie in it, wherever the
/// live set has them.
fn compare(
    set: &WeightSet,
    manifest: &Manifest,
    tensors: &[usize],
    offset: u64,
    bytes: &[u8],
) -> Result<(), WeightError> {
    const OUTSIDE: WeightError = WeightError::Internal("tensor outside its segment");
    let end = offset.saturating_add(bytes.len() as u64);
    for tensor in tensors.iter().filter_map(|n| manifest.tensors().get(*n)) {
        let first = offset.max(tensor.storage_offset);
        let last = end.min(tensor.storage_offset.saturating_add(tensor.bytes));
        if first >= last {
            continue;
        }
        let live = set.manifest();
        let place = live
            .find(&tensor.name)
            .and_then(|live_tensor| live.segment_offset(live_tensor))
            .and_then(|at| at.checked_add(first - tensor.storage_offset))
            .and_then(|at| usize::try_from(at).ok())
            .ok_or(OUTSIDE)?;
        let range = usize::try_from(first - offset).map_err(|_| OUTSIDE)?
            ..usize::try_from(last - offset).map_err(|_| OUTSIDE)?;
        let run = bytes.get(range).ok_or(OUTSIDE)?;
        if !set.segment().mapping().equals(place, run)? {
            return Err(load::bytes_differ(set, &tensor.name));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
