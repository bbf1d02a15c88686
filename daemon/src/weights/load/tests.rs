use std::sync::Barrier;

use super::{
    super::{
        checkpoint::fixture::{bytes, single, source},
        loader::Cancel,
        registry::fixture::*,
    },
    *,
};

type Tensors<'a> = &'a [(&'a str, &'a [u8])];

const ONE: Tensors = &[("l.2", b"123"), ("l.10", b"45")];

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
    let cases: [(Tensors, &str); 4] = [
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
fn tensors_without_bytes_are_legal_and_files_without_tensors_are_not() {
    let scratch = Scratch::new(None);
    let empty = scratch
        .load(&named("m"), &[("a", b""), ("b", b"")])
        .unwrap()
        .set;
    assert_eq!(empty.segment().bytes(), 4096);
    let metadata = br#"!!!!!!!!{"__metadata__":{"format":"pt"}}"#;
    let mut metadata = metadata.to_vec();
    let length = metadata.len() as u64 - 8;
    metadata[..8].copy_from_slice(&length.to_le_bytes());
    for content in [bytes(&[]), metadata] {
        let files = vec![source("none.safetensors", &content)];
        let error = scratch.store.load(&named("n"), files, &Cancel::default());
        let error = error.unwrap_err();
        assert!(matches!(error, WeightError::Checkpoint { .. }));
        assert!(error.to_string().contains("no tensors"), "{error}");
    }
    assert_eq!(scratch.files(), (1, 1));
}

/// A caller that goes away when the last byte has been read.
#[derive(Default)]
struct Late(Cancel);

impl Watch for Late {
    fn progress(&self, done: u64, total: u64) {
        if done == total {
            self.0.set();
        }
    }

    fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }
}

#[test]
fn a_load_whose_caller_leaves_after_the_last_byte_becomes_no_set() {
    let scratch = Scratch::new(None);
    let load = scratch
        .store
        .load(&named("m"), single(ONE), &Late::default());
    let error = load.unwrap_err();
    assert!(matches!(error, WeightError::Aborted { .. }), "{error}");
    assert!(scratch.store.all().is_empty());
    assert_eq!(scratch.files(), (0, 0));
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

/// A caller whose load hangs where a read of its file would.
#[derive(Default)]
struct Hung {
    cancel: Cancel,
    open: std::sync::atomic::AtomicBool,
    hangs: std::sync::atomic::AtomicBool,
}

impl Watch for Hung {
    fn progress(&self, _done: u64, _total: u64) {
        self.hangs.store(true, std::sync::atomic::Ordering::Relaxed);
        while !self.open.load(std::sync::atomic::Ordering::Relaxed) {
            std::thread::yield_now();
        }
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}

#[test]
fn a_load_that_hangs_in_a_read_keeps_its_reservation_and_leaves_nothing_after_a_stop() {
    let scratch = Scratch::new(None);
    let hung = Hung::default();
    std::thread::scope(|scope| {
        let load = scope.spawn(|| scratch.store.load(&named("m"), single(ONE), &hung));
        while !hung.hangs.load(std::sync::atomic::Ordering::Relaxed) {
            std::thread::yield_now();
        }
        // the caller goes away, which the thread cannot see
        hung.cancel.set();
        let host = scratch.store.host();
        assert_eq!((host.reserved_bytes, host.segment_bytes), (4096, 0));
        assert_eq!(scratch.files(), (1, 0));
        scratch.store.close(false);
        assert_eq!(scratch.files(), (0, 0));
        assert_eq!(scratch.store.host().reserved_bytes, 4096);
        hung.open.store(true, std::sync::atomic::Ordering::Relaxed);
        let error = load.join().unwrap().unwrap_err();
        assert!(matches!(error, WeightError::Aborted { .. }), "{error}");
    });
    assert_eq!(scratch.store.host().reserved_bytes, 0);
    assert_eq!(scratch.files(), (0, 0));
}

#[test]
fn a_load_that_outlives_the_stop_becomes_no_set() {
    let scratch = Scratch::new(None);
    let hung = Hung::default();
    std::thread::scope(|scope| {
        let load = scope.spawn(|| scratch.store.load(&named("m"), single(ONE), &hung));
        while scratch.files().0 == 0 {
            std::thread::yield_now();
        }
        scratch.store.close(false);
        hung.open.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(load.join().unwrap().is_err());
    });
    assert!(scratch.store.all().is_empty());
    assert_eq!(scratch.files(), (0, 0));
    assert!(scratch.load(&named("n"), ONE).is_err());
}
