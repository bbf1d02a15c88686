//! Loading a checkpoint into the store, and the rules by which equal content is shared.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use flextensord_proto::name;

use super::{
    checkpoint::{Checkpoint, SourceFile},
    claim::{Build, BuildProgress, Claim, Key, Room},
    digest::{self, Digest},
    error::WeightError,
    loader::{self, Reading, Watch},
    manifest::Manifest,
    record::{self, SetRecord},
    registry::{Identity, WeightSet, WeightStore},
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
        let checkpoint = Checkpoint::open(files)?;
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
        let mut room = self.room(checkpoint.manifest())?;
        let reading = Reading {
            threads: self.settings().load_threads,
            hash: request.content_id.is_none(),
        };
        let segment = room.builder.bytes_mut()?;
        let digests = loader::read(checkpoint, Some(segment), reading, watch)?;
        self.publish(request, checkpoint.manifest().clone(), room, digests)
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
        room: Room,
        digests: Option<Vec<Digest>>,
    ) -> Result<Outcome, WeightError> {
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
        let set = Arc::new(WeightSet::new(NewSet {
            segment: room.builder.publish()?,
            reservation: room.reservation,
            id: room.id,
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
        if self.insert(Arc::clone(&set)).is_err() {
            // only a set that was given another's digest as its name can be there
            self.state().remove(&file)?;
            return Err(WeightError::ContentDiffers {
                name: set.name().to_owned(),
                tensor: String::new(),
                difference: "its name is the digest of other content".to_owned(),
            });
        }
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
        self.progress.total.store(total, Ordering::Relaxed);
        self.progress.done.fetch_max(done, Ordering::Relaxed);
        self.watch.progress(done, total);
    }

    fn is_cancelled(&self) -> bool {
        self.watch.is_cancelled()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::{
        super::{
            checkpoint::fixture::{bytes, single, source},
            loader::Cancel,
            registry::fixture::*,
        },
        *,
    };

    const ONE: &[(&str, &[u8])] = &[("l.2", b"123"), ("l.10", b"45")];

    fn differing(error: WeightError) -> String {
        match error {
            WeightError::ContentDiffers { tensor, .. } => tensor,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_live_name_attaches_only_with_the_same_content() {
        let scratch = Scratch::new(None);
        let first = scratch.load(&named("m"), ONE).unwrap();
        assert!(!first.attached);
        let again = scratch.load(&named("m"), ONE).unwrap();
        assert!(again.attached);
        assert_eq!(again.set.id(), first.set.id());
        let cases: [(&[(&str, &[u8])], &str); 4] = [
            (&[("l.2", b"123"), ("l.10", b"4x")], "l.10"),
            (&[("l.2", b"1x3"), ("l.10", b"4x")], "l.2"),
            (&[("l.2", b"123")], "l.10"),
            (&[("l.2", b"123"), ("l.10", b"456")], "l.10"),
        ];
        for (tensors, differs) in cases {
            let error = scratch.load(&named("m"), tensors).unwrap_err();
            assert_eq!(differing(error), differs);
        }
        assert_eq!(scratch.files(), (1, 1));
    }

    #[test]
    fn sharding_does_not_change_the_digest() {
        let scratch = Scratch::new(None);
        let whole = scratch.load(&named("one"), ONE).unwrap().set;
        let index = br#"{"weight_map":{"l.2":"m-2","l.10":"m-1"}}"#;
        let files = vec![
            source("m-1", &bytes(&ONE[1..])),
            source("m-2", &bytes(&ONE[..1])),
            source("m.safetensors.index.json", index),
        ];
        let cancel = Cancel::default();
        let shards = scratch.store.load(&named("two"), files, &cancel).unwrap();
        assert_eq!(whole.digest(), shards.set.digest());
        assert_eq!(whole.manifest(), shards.set.manifest());
    }

    #[test]
    fn equal_weights_without_a_name_are_one_set() {
        let scratch = Scratch::new(None);
        let first = scratch.load(&named(""), ONE).unwrap();
        assert_eq!(Some(first.set.name().to_owned()), first.set.digest());
        assert!(scratch.load(&named(""), ONE).unwrap().attached);
        let other = scratch.load(&named(""), &[("l.2", b"124"), ("l.10", b"45")]);
        assert!(!other.unwrap().attached);
        // another user shares only what is shared
        let stranger = SetRequest {
            uid: 2,
            ..named("")
        };
        assert!(!scratch.load(&stranger, ONE).unwrap().attached);
        assert_eq!(scratch.files(), (3, 3));
    }

    #[test]
    fn a_content_id_vouches_and_different_ids_never_share() {
        let scratch = Scratch::new(None);
        let with = |id: &str| SetRequest {
            content_id: Some(id.to_owned()),
            ..named("m")
        };
        let first = scratch.load(&with("v1"), ONE).unwrap();
        assert_eq!(first.set.digest(), None);
        assert!(scratch.load(&with("v1"), ONE).unwrap().attached);
        for request in [with("v2"), named("m")] {
            assert_eq!(differing(scratch.load(&request, ONE).unwrap_err()), "");
        }
        // the id does not vouch for what is declared
        let error = scratch.load(&with("v1"), &ONE[..1]).unwrap_err();
        assert_eq!(differing(error), "l.10");
        for (name, id) in [
            (None, "v1"),
            (Some("n"), "a\n"),
            (Some("n"), &"x".repeat(257)),
        ] {
            let request = SetRequest {
                name: name.map(str::to_owned),
                ..with(id)
            };
            let error = scratch.load(&request, ONE).unwrap_err();
            assert!(matches!(error, WeightError::Argument { .. }), "{error}");
        }
    }

    #[test]
    fn what_another_user_vouches_for_is_never_taken() {
        let scratch = Scratch::new(None);
        let theirs = SetRequest {
            uid: 2,
            content_id: Some("v1".to_owned()),
            share: true,
            ..named("m")
        };
        scratch
            .load(&theirs, &[("l.2", b"bad"), ("l.10", b"45")])
            .unwrap();
        let ours = SetRequest { uid: 1, ..theirs };
        let outcome = scratch.load(&ours, ONE).unwrap();
        assert!(!outcome.attached);
        assert_eq!(outcome.set.owner_uid(), 1);
    }

    #[test]
    fn a_shared_set_with_the_same_content_serves_other_users_too() {
        let scratch = Scratch::new(None);
        let theirs = SetRequest {
            uid: 2,
            share: true,
            ..named("m")
        };
        scratch.load(&theirs, ONE).unwrap();
        assert!(scratch.load(&named("m"), ONE).unwrap().attached);
        assert!(scratch.load(&named(""), ONE).unwrap().attached);
        assert_eq!(scratch.files(), (1, 1));
    }

    #[test]
    fn many_loads_of_one_name_at_once_make_one_copy() {
        let scratch = Scratch::new(None);
        for name in ["m", ""] {
            let barrier = Barrier::new(8);
            let attached = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8)
                    .map(|_| {
                        scope.spawn(|| {
                            barrier.wait();
                            scratch.load(&named(name), ONE).unwrap().attached
                        })
                    })
                    .collect();
                let joined = threads.into_iter().map(|t| t.join().unwrap());
                joined.filter(|attached| *attached).count()
            });
            // the unnamed ones find the named set, which has the same content
            assert_eq!(attached, if name.is_empty() { 8 } else { 7 }, "{name}");
        }
        assert_eq!(scratch.files(), (1, 1));
    }

    #[test]
    fn a_failed_or_cancelled_load_leaves_nothing_and_frees_the_name() {
        let scratch = Scratch::new(Some(1 << 20));
        let cancel = Cancel::default();
        cancel.set();
        let error = scratch
            .store
            .load(&named("m"), single(ONE), &cancel)
            .unwrap_err();
        assert!(matches!(error, WeightError::Aborted { .. }));
        let error = scratch
            .load(&named("m"), &[("w", &[0; 2 << 20])])
            .unwrap_err();
        assert!(matches!(error, WeightError::HostMemory { .. }));
        assert_eq!(scratch.files(), (0, 0));
        let figures = scratch.store.host();
        assert_eq!((figures.segment_bytes, figures.reserved_bytes), (0, 0));
        assert!(!scratch.load(&named("m"), ONE).unwrap().attached);
    }

    #[test]
    fn a_state_directory_that_refuses_leaves_no_set() {
        let scratch = Scratch::new(None);
        std::fs::remove_dir(scratch.state.path()).unwrap();
        let error = scratch.load(&named("m"), ONE).unwrap_err();
        assert!(matches!(error, WeightError::State(_)), "{error}");
        assert!(scratch.store.all().is_empty());
        assert_eq!(std::fs::read_dir(scratch.shm.path()).unwrap().count(), 0);
    }

    #[test]
    fn sets_without_bytes_or_without_tensors_are_legal() {
        let scratch = Scratch::new(None);
        let empty = scratch
            .load(&named("m"), &[("a", b""), ("b", b"")])
            .unwrap()
            .set;
        assert_eq!(empty.segment().bytes(), 4096);
        scratch.load(&named("n"), &[]).unwrap();
        assert!(scratch.load(&named("n"), &[]).unwrap().attached);
    }

    #[test]
    fn a_segment_takes_little_more_than_its_tensors() {
        const BYTES: usize = (2 << 20) + (1 << 18) + 1;
        let scratch = Scratch::new(None);
        let content = vec![1; BYTES];
        let names: Vec<String> = (0..40).map(|i| format!("t.{i}")).collect();
        let tensors: Vec<_> = names
            .iter()
            .map(|n| (n.as_str(), content.as_slice()))
            .collect();
        let set = scratch.load(&named("m"), &tensors).unwrap().set;
        let found = std::fs::metadata(set.segment().path()).unwrap();
        let taken = std::os::unix::fs::MetadataExt::blocks(&found) * 512;
        assert!(taken <= (40 * (BYTES + 256) + 4096) as u64, "{taken}");
    }
}
