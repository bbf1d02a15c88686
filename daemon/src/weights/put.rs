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
    claim::{Build, Call, Claim, Room},
    declaration::place,
    digest,
    error::WeightError,
    load::{self, Outcome, SetRequest},
    loader::Watch,
    manifest::Manifest,
    registry::{WeightSet, WeightStore},
};

/// A put under way. Dropped before [`PutSession::finish`] it leaves nothing behind.
#[derive(Debug)]
pub struct PutSession {
    store: Arc<WeightStore>,
    request: SetRequest,
    declared: Vec<Declaration>,
    stage: Stage,
    _call: Call,
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
            store: Arc::clone(store),
            request,
            declared: Vec::new(),
            stage: Stage::Declaring,
        })
    }

    /// Declares tensors; all of them come before the first bytes.
    ///
    /// # Errors
    /// When bytes have come already, or there are too many tensors.
    pub fn declare(&mut self, tensors: Vec<Declaration>) -> Result<(), WeightError> {
        let count = self.declared.len().saturating_add(tensors.len());
        let rule = match self.stage {
            Stage::Writing(_) => "tensors are declared before the first data".to_owned(),
            Stage::Declaring if count > limit::TENSORS => {
                format!("at most {} tensors", limit::TENSORS)
            }
            Stage::Declaring => {
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
        self.writing(watch)?;
        let Stage::Writing(writing) = std::mem::replace(&mut self.stage, Stage::Declaring) else {
            return Err(WeightError::Internal("a put without a stage"));
        };
        let came: u64 = writing.written.iter().sum();
        let wanted = writing.manifest.logical_bytes();
        if came != wanted {
            return Err(WeightError::Aborted {
                what: "put",
                reason: format!("its stream ended after {came} of {wanted} bytes"),
            });
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
                let outcome = self
                    .store
                    .publish(&self.request, writing.manifest, room, digests);
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
            let declared = std::mem::take(&mut self.declared);
            let (manifest, owners) = place(declared)?;
            let target = self.target(&manifest, watch)?;
            let written = vec![0; manifest.storages().len()];
            self.stage = Stage::Writing(Box::new(Writing {
                manifest,
                owners,
                written,
                target,
            }));
        }
        match &mut self.stage {
            Stage::Writing(writing) => Ok(writing),
            Stage::Declaring => Err(WeightError::Internal("a put without a stage")),
        }
    }

    fn target(&self, manifest: &Manifest, watch: &dyn Watch) -> Result<Target, WeightError> {
        match self.store.claim(self.request.key(manifest), watch)? {
            Claim::Build(build) => {
                let total = manifest.logical_bytes();
                build.progress.total.store(total, Ordering::Relaxed);
                let room = self.store.room(manifest)?;
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
mod tests {
    use super::{
        super::{loader::Cancel, registry::fixture::*},
        *,
    };

    fn tensor(name: &str, bytes: u64) -> Declaration {
        Declaration {
            name: name.to_owned(),
            dtype: "U8".to_owned(),
            shape: vec![bytes],
            ..Declaration::default()
        }
    }

    fn view(name: &str, of: &str, offset: u64, shape: &[u64], stride: &[i64]) -> Declaration {
        Declaration {
            alias_of: of.to_owned(),
            storage_offset: offset,
            shape: shape.to_vec(),
            stride: stride.to_vec(),
            ..tensor(name, 0)
        }
    }

    fn put(
        scratch: &Scratch,
        request: SetRequest,
        tensors: Vec<Declaration>,
        data: &[(&str, u64, &[u8])],
    ) -> Result<Outcome, WeightError> {
        let mut session = PutSession::new(&scratch.store, request)?;
        session.declare(tensors)?;
        for (tensor, offset, bytes) in data {
            session.write(tensor, *offset, bytes, &Cancel::default())?;
        }
        session.finish(&Cancel::default())
    }

    #[test]
    fn bytes_that_were_put_equal_those_that_were_loaded() {
        let scratch = Scratch::new(None);
        let one: &[(&str, &[u8])] = &[("a", b"123"), ("b", b"")];
        let loaded = scratch.load(&named("m"), one).unwrap().set;
        let tensors = || vec![tensor("b", 0), tensor("a", 3)];
        let data: &[(&str, u64, &[u8])] = &[("a", 0, b"1"), ("a", 1, b"23")];
        let same = put(&scratch, named("m"), tensors(), data).unwrap();
        assert!(same.attached);
        let other = put(&scratch, named("n"), tensors(), data).unwrap();
        assert!(!other.attached);
        assert_eq!(other.set.digest(), loaded.digest());
        assert!(put(&scratch, named(""), tensors(), data).unwrap().attached);
        assert_eq!(scratch.files(), (2, 2));
    }

    #[test]
    fn tied_tensors_and_views_are_stored_once_and_compared_as_what_they_show() {
        let scratch = Scratch::new(None);
        let tied = || {
            vec![
                tensor("emb", 6),
                view("head", "emb", 0, &[6], &[]),
                view("row", "emb", 3, &[3], &[1]),
                view("turned", "emb", 0, &[3, 2], &[1, 3]),
            ]
        };
        let set = put(&scratch, named("m"), tied(), &[("emb", 0, b"abcdef")])
            .unwrap()
            .set;
        assert_eq!(set.manifest().logical_bytes(), 6);
        assert_eq!(set.manifest().storages().len(), 1);
        assert!(set.manifest().find("row").unwrap().stride.is_empty());
        assert_eq!(set.manifest().find("turned").unwrap().stride, [1, 3]);
        // the same tensors, stored apart
        let mut apart = tied();
        for tensor in &mut apart {
            tensor.alias_of.clear();
            tensor.storage_offset = 0;
        }
        let data: &[(&str, u64, &[u8])] = &[
            ("emb", 0, b"abcdef"),
            ("row", 0, b"def"),
            ("head", 0, b"abcdef"),
            ("turned", 0, b"abcdef"),
        ];
        assert!(
            put(&scratch, named("m"), apart.clone(), data)
                .unwrap()
                .attached
        );
        let mut wrong = data.to_vec();
        wrong[1] = ("row", 0, b"dex");
        let error = put(&scratch, named("m"), apart, &wrong).unwrap_err();
        assert!(
            matches!(&error, WeightError::ContentDiffers { tensor, .. } if tensor == "row"),
            "{error}"
        );
        assert_eq!(scratch.files(), (1, 1));
    }

    #[test]
    fn a_put_that_ends_early_leaves_nothing_and_frees_the_name() {
        let scratch = Scratch::new(None);
        let data: &[(&str, u64, &[u8])] = &[("a", 0, b"12")];
        let error = put(&scratch, named("m"), vec![tensor("a", 3)], data).unwrap_err();
        assert!(matches!(error, WeightError::Aborted { .. }), "{error}");
        let mut session = PutSession::new(&scratch.store, named("m")).unwrap();
        session.declare(vec![tensor("a", 3)]).unwrap();
        session.write("a", 0, b"1", &Cancel::default()).unwrap();
        assert_eq!(scratch.store.host().segment_bytes, 4096);
        drop(session);
        assert_eq!(scratch.files(), (0, 0));
        assert_eq!(scratch.store.host().segment_bytes, 0);
        let data: &[(&str, u64, &[u8])] = &[("a", 0, b"123")];
        assert!(put(&scratch, named("m"), vec![tensor("a", 3)], data).is_ok());
    }

    #[test]
    fn each_byte_comes_once_in_rising_order_within_its_storage() {
        let scratch = Scratch::new(None);
        let all = || vec![tensor("a", 3), view("v", "a", 1, &[2], &[])];
        let cases: [(&[(&str, u64, &[u8])], &str); 6] = [
            (&[("a", 1, b"2")], "next byte"),
            (&[("a", 0, b"1"), ("a", 0, b"1")], "next byte"),
            (&[("a", 0, b"1234")], "passes the end"),
            (&[("a", u64::MAX, b"12")], "next byte"),
            (&[("v", 0, b"1")], "owns its storage"),
            (&[("x", 0, b"1")], "owns its storage"),
        ];
        for (data, what) in cases {
            let error = put(&scratch, named("m"), all(), data).unwrap_err();
            assert!(error.to_string().contains(what), "{what}: {error}");
        }
        assert_eq!(scratch.files(), (0, 0));
    }

    #[test]
    fn declarations_that_break_a_rule_are_refused_naming_the_field() {
        let scratch = Scratch::new(None);
        let with = |change: fn(&mut Declaration)| {
            let mut declared = tensor("a", 4);
            change(&mut declared);
            declared
        };
        let cases = [
            (vec![with(|t| t.shape = vec![1 << 33, 1 << 33])], "shape"),
            (vec![with(|t| t.shape = vec![1; 65])], "shape"),
            (
                vec![
                    with(|t| "F4".clone_into(&mut t.dtype)),
                    with(|t| {
                        "F4".clone_into(&mut t.dtype);
                        "b".clone_into(&mut t.name);
                        t.shape = vec![5];
                    }),
                ],
                "shape",
            ),
            (vec![with(|t| "Q9".clone_into(&mut t.dtype))], "dtype"),
            (vec![with(|t| t.dtype.clear())], "dtype"),
            (vec![with(|t| t.stride = vec![-1])], "stride"),
            (vec![with(|t| t.stride = vec![1, 2])], "stride"),
            (vec![with(|t| t.storage_bytes = 3)], "storage_bytes"),
            (vec![with(|t| t.storage_offset = 3)], "storage_offset"),
            (vec![with(|t| t.name.clear())], "name"),
            (vec![tensor("a", 1), tensor("a", 1)], "name"),
            (
                vec![tensor("a", 4), view("v", "x", 0, &[1], &[])],
                "alias_of",
            ),
            (vec![view("v", "v", 0, &[1], &[])], "alias_of"),
            (
                vec![
                    tensor("a", 4),
                    view("v", "a", 0, &[1], &[]),
                    view("w", "v", 0, &[1], &[]),
                ],
                "alias_of",
            ),
            (
                vec![tensor("a", 4), view("v", "a", 3, &[2], &[])],
                "storage_offset",
            ),
            (
                vec![tensor("a", 4), view("v", "a", u64::MAX, &[2], &[])],
                "storage_offset",
            ),
            (vec![tensor("a", u64::MAX), tensor("b", u64::MAX)], "bytes"),
        ];
        for (tensors, field) in cases {
            let error = put(&scratch, named("m"), tensors, &[]).unwrap_err();
            assert!(
                matches!(&error, WeightError::Argument { field: named, .. } if named.contains(field)),
                "{field}: {error}"
            );
        }
        assert_eq!(scratch.files(), (0, 0));
    }

    #[test]
    fn an_unknown_type_is_carried_with_its_bytes() {
        let scratch = Scratch::new(None);
        let odd = |name: &str| Declaration {
            dtype: "F5_NEW".to_owned(),
            shape: vec![8],
            storage_bytes: 5,
            ..tensor(name, 0)
        };
        let tied = Declaration {
            storage_bytes: 0,
            alias_of: "a".to_owned(),
            ..odd("b")
        };
        let data: &[(&str, u64, &[u8])] = &[("a", 0, b"12345")];
        let set = put(&scratch, named("m"), vec![odd("a"), tied], data)
            .unwrap()
            .set;
        assert_eq!(set.manifest().find("b").unwrap().bytes, 5);
    }

    #[test]
    fn nothing_is_declared_after_the_first_bytes() {
        let scratch = Scratch::new(None);
        let mut session = PutSession::new(&scratch.store, named("m")).unwrap();
        session.declare(vec![tensor("a", 3)]).unwrap();
        session.write("a", 0, b"1", &Cancel::default()).unwrap();
        assert!(session.declare(vec![tensor("b", 3)]).is_err());
    }

    #[test]
    fn a_content_id_vouches_for_bytes_that_are_put() {
        let scratch = Scratch::new(None);
        let request = || SetRequest {
            content_id: Some("v1".to_owned()),
            ..named("m")
        };
        let data: &[(&str, u64, &[u8])] = &[("a", 0, b"123")];
        let first = put(&scratch, request(), vec![tensor("a", 3)], data).unwrap();
        assert!(!first.attached);
        assert!(first.set.digest().is_none());
        assert!(
            put(&scratch, request(), vec![tensor("a", 3)], data)
                .unwrap()
                .attached
        );
    }
}
