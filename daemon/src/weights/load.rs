//! Loading a checkpoint into the store, and the rules by which equal content is shared.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use flextensord_device::failpoint::{self, Point};
use flextensord_proto::name;

use super::{
    checkpoint::{Checkpoint, SourceFile},
    claim::{Build, BuildProgress, Claim, Key},
    digest::{self, Digest},
    error::WeightError,
    loader::{self, Reading, Watch},
    manifest::Manifest,
    record::{self, SetRecord},
    registry::{Identity, WeightSet, WeightStore},
    room::Room,
    set::NewSet,
};

/// Most bytes of a content id.
const CONTENT_ID_BYTES: usize = 256;
/// How often a call starts again because the set that it found went away.
const ATTEMPTS: usize = 4;

/// Which set a caller wants to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetRequest {
    /// The caller.
    pub uid: u32,
    /// Its name for the set; `None` names it by its digest.
    pub name: Option<String>,
    /// Vouches for the content instead of hashing it; needs a name.
    pub content_id: Option<String>,
    /// Whether other users may attach.
    pub share: bool,
}

/// A set that is live.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The set.
    pub set: Arc<WeightSet>,
    /// Whether it was there already.
    pub attached: bool,
}

impl SetRequest {
    pub(crate) fn check(&self) -> Result<(), WeightError> {
        if let Some(name) = &self.name {
            name::check(name).map_err(|e| WeightError::name("name", name, &e))?;
        }
        let Some(id) = &self.content_id else {
            return Ok(());
        };
        let rule = if id.len() > CONTENT_ID_BYTES || id.is_empty() {
            "1 to 256 bytes"
        } else if id.chars().any(char::is_control) {
            "no control characters"
        } else if self.name.is_none() {
            "needs a name, since a set without one is named by its digest"
        } else {
            return Ok(());
        };
        Err(WeightError::argument("content_id", id, rule))
    }

    /// The key under which others wait; '#' is in no name.
    pub(crate) fn key(&self, manifest: &Manifest) -> Key {
        let name = self.name.clone();
        let unnamed = || format!("#{}", digest::hex(&manifest.fingerprint()));
        (self.uid, name.unwrap_or_else(unnamed))
    }
}

impl WeightStore {
    /// Loads a checkpoint, or attaches to a live set with the same content. Blocks until
    /// that is done; when it fails nothing is left behind.
    ///
    /// # Errors
    /// Any [`WeightError`]; [`WeightError::ContentDiffers`] when the name is live with
    /// other content, [`WeightError::Aborted`] when `watch` says that the caller is gone.
    pub fn load(
        self: &Arc<Self>,
        request: &SetRequest,
        files: Vec<SourceFile>,
        watch: &dyn Watch,
    ) -> Result<Outcome, WeightError> {
        request.check()?;
        let _call = self.admit(request.uid)?;
        let checkpoint = Checkpoint::open(files, &self.headers, request.uid, watch)?;
        for _ in 0..ATTEMPTS {
            match self.claim(request.key(checkpoint.manifest()), watch)? {
                Claim::Live(set) => {
                    self.check_same(&set, request, &checkpoint, watch)?;
                    if self.confirm(&set, request.uid, request.share)? {
                        return Ok(Outcome {
                            set,
                            attached: true,
                        });
                    }
                }
                Claim::Build(build) => return self.build(request, &checkpoint, &build, watch),
            }
        }
        Err(WeightError::Aborted {
            what: "load",
            reason: "the weight set was dropped while it was compared".to_owned(),
        })
    }

    fn build(
        &self,
        request: &SetRequest,
        checkpoint: &Checkpoint,
        build: &Build,
        watch: &dyn Watch,
    ) -> Result<Outcome, WeightError> {
        let watch = &Recorded {
            watch,
            progress: &build.progress,
        };
        // a look at the content is cheaper than a second copy of it
        let is_likely = self.candidates(request).iter().any(|set| {
            set.manifest()
                .first_difference(checkpoint.manifest())
                .is_none()
        });
        if is_likely {
            let digests = self.hash(checkpoint, watch)?;
            let digest = digest::set(checkpoint.manifest(), &digests);
            if let Some(set) = self.equal(request, &digest)? {
                return Ok(Outcome {
                    set,
                    attached: true,
                });
            }
        }
        let mut room = self.room(request.uid, checkpoint.manifest(), watch)?;
        failpoint::pass(Point::Load)?;
        let reading = Reading {
            threads: self.settings().load_threads,
            hash: request.content_id.is_none(),
        };
        let segment = room.builder.bytes_mut()?;
        let digests = loader::read(checkpoint, Some(segment), reading, watch)?;
        failpoint::pass(Point::Loaded)?;
        self.publish(request, checkpoint.manifest().clone(), room, digests, watch)
    }

    fn hash(&self, checkpoint: &Checkpoint, watch: &dyn Watch) -> Result<Vec<Digest>, WeightError> {
        let reading = Reading {
            threads: self.settings().load_threads,
            hash: true,
        };
        loader::read(checkpoint, None, reading, watch)?
            .ok_or(WeightError::Internal("a checkpoint was not hashed"))
    }

    fn check_same(
        &self,
        set: &WeightSet,
        request: &SetRequest,
        checkpoint: &Checkpoint,
        watch: &dyn Watch,
    ) -> Result<(), WeightError> {
        if check_declared(set, request, checkpoint.manifest())? {
            return Ok(());
        }
        let digests = self.hash(checkpoint, watch)?;
        check_digests(set, checkpoint.manifest(), &digests)
    }

    /// Sets under which the content of the request may be live already.
    fn candidates(&self, request: &SetRequest) -> Vec<Arc<WeightSet>> {
        // what another user vouches for proves nothing
        if request.content_id.is_some() {
            return Vec::new();
        }
        let mut sets = self.visible_to(request.uid);
        sets.retain(|set| {
            let is_named_so = request.name.as_ref().is_none_or(|name| set.name() == name);
            is_named_so && set.content_id().is_none()
        });
        sets
    }

    /// A live set with that digest which may serve the request.
    fn equal(
        &self,
        request: &SetRequest,
        digest: &Digest,
    ) -> Result<Option<Arc<WeightSet>>, WeightError> {
        for set in self.candidates(request) {
            if *set.identity() == Identity::Digest(*digest)
                && self.confirm(&set, request.uid, request.share)?
            {
                return Ok(Some(set));
            }
        }
        Ok(None)
    }

    /// Makes a filled segment a live set, unless the same content is live by now.
    pub(crate) fn publish(
        &self,
        request: &SetRequest,
        manifest: Manifest,
        mut room: Room,
        digests: Option<Vec<Digest>>,
        watch: &dyn Watch,
    ) -> Result<Outcome, WeightError> {
        if watch.is_cancelled() {
            return Err(WeightError::gone("load"));
        }
        let tensor_digests = digests.unwrap_or_default();
        let identity = match &request.content_id {
            Some(id) => Identity::ContentId(id.clone()),
            None => Identity::Digest(digest::set(&manifest, &tensor_digests)),
        };
        if let Identity::Digest(digest) = &identity
            && let Some(set) = self.equal(request, digest)?
        {
            return Ok(Outcome {
                set,
                attached: true,
            });
        }
        let name = match (&request.name, &identity) {
            (Some(name), _) => name.clone(),
            (None, Identity::Digest(digest)) => digest::hex(digest),
            (None, Identity::ContentId(_)) => {
                return Err(WeightError::Internal("a content id without a name"));
            }
        };
        let loaded_at = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let segment = room.builder.publish()?;
        let pinner = &self.settings().pinner;
        failpoint::pass(Point::Pin)?;
        let pinned = pinner.pin(segment.mapping(), &manifest, watch)?;
        failpoint::pass(Point::Pinned)?;
        room.reservation.mark_live();
        let set = Arc::new(WeightSet::new(NewSet {
            pinned,
            segment,
            reservation: room.reservation,
            id: room.building.id().to_owned(),
            name,
            owner_uid: request.uid,
            shared: request.share,
            manifest,
            identity,
            tensor_digests,
            loaded_at,
        }));
        // a successor must know of it before the client does
        let file = record::file_name(set.id());
        self.state().write(&file, &SetRecord::of(&set))?;
        if let Err(refused) = self.insert(Arc::clone(&set), watch) {
            self.state().remove(&file)?;
            return Err(refused);
        }
        failpoint::cross(Point::Live);
        tracing::info!(
            set = set.id(),
            name = set.name(),
            uid = set.owner_uid(),
            tensors = set.manifest().tensors().len(),
            bytes = set.segment().bytes(),
            "weight set loaded"
        );
        Ok(Outcome {
            set,
            attached: false,
        })
    }
}

/// Compares what is declared. True when that settles it: the caller vouched with the
/// set's content id. False when the bytes are to be compared.
pub(crate) fn check_declared(
    set: &WeightSet,
    request: &SetRequest,
    manifest: &Manifest,
) -> Result<bool, WeightError> {
    let differs = |tensor: String, difference: String| WeightError::ContentDiffers {
        name: set.name().to_owned(),
        tensor,
        difference,
    };
    if let Some((tensor, how)) = set.manifest().first_difference(manifest) {
        let text = format!("tensor {tensor:?}: {how}");
        return Err(differs(tensor, text));
    }
    let how = match (set.content_id(), request.content_id.as_deref()) {
        (None, None) => return Ok(false),
        (Some(theirs), Some(own)) if theirs == own => return Ok(true),
        (Some(_), Some(_)) => "its content id is another",
        (Some(_), None) => "it was loaded with a content id, so its bytes were never hashed",
        (None, Some(_)) => "it was loaded without a content id",
    };
    Err(differs(String::new(), how.to_owned()))
}

/// Compares the bytes by their digests.
fn check_digests(
    set: &WeightSet,
    manifest: &Manifest,
    digests: &[Digest],
) -> Result<(), WeightError> {
    // equal declarations come in the same order
    let pairs = set.tensor_digests().iter().zip(digests);
    match manifest
        .tensors()
        .iter()
        .zip(pairs)
        .find(|(_, (a, b))| a != b)
    {
        None => Ok(()),
        Some((tensor, _)) => Err(bytes_differ(set, &tensor.name)),
    }
}

pub(crate) fn bytes_differ(set: &WeightSet, tensor: &str) -> WeightError {
    WeightError::ContentDiffers {
        name: set.name().to_owned(),
        tensor: tensor.to_owned(),
        difference: format!("tensor {tensor:?}: its bytes are others"),
    }
}

/// Passes progress on, and to those who wait.
struct Recorded<'a> {
    watch: &'a dyn Watch,
    progress: &'a BuildProgress,
}

impl Watch for Recorded<'_> {
    fn progress(&self, done: u64, total: u64) {
        self.progress.record(done, total);
        self.watch.progress(done, total);
    }

    fn is_cancelled(&self) -> bool {
        self.watch.is_cancelled()
    }
}

#[cfg(test)]
mod tests;
