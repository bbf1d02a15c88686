use super::{
    super::{leftovers, load::SetRequest},
    fixture::*,
    *,
};

const ONE: &[(&str, &[u8])] = &[("a", b"123"), ("b", b"4")];

#[test]
fn a_set_stays_while_it_is_attached_and_leaves_nothing_when_dropped() {
    let scratch = Scratch::new(None);
    scratch.load(&named("m"), ONE).unwrap();
    assert_eq!(scratch.files(), (1, 1));
    let attachment = scratch.store.attach(1, "m", "manager-a").unwrap();
    let set = Arc::clone(attachment.set());
    assert_eq!(set.attached_by()[0].manager, "manager-a");
    let error = scratch.store.remove(1, false, "m").unwrap_err();
    assert!(matches!(error, WeightError::InUse { managers: 1, .. }));
    assert_eq!(scratch.store.evict(1, 1), 0);
    drop(attachment);
    assert_eq!(scratch.store.remove(1, false, "m").unwrap(), 4096);
    assert_eq!(scratch.store.host().segment_bytes, 4096);
    drop(set);
    assert_eq!(scratch.store.host().segment_bytes, 0);
    assert_eq!(scratch.files(), (0, 0));
}

#[test]
fn another_users_set_is_absent_unless_it_is_shared() {
    let scratch = Scratch::new(None);
    scratch.load(&named("m"), ONE).unwrap();
    let unshared = scratch.store.attach(2, "m", "x").unwrap_err();
    let absent = scratch.store.attach(2, "n", "x").unwrap_err();
    assert_eq!(
        unshared.to_string().replace("\"m\"", "\"n\""),
        absent.to_string()
    );
    assert!(scratch.store.visible_to(2).is_empty());
    let error = scratch.store.remove(2, false, "m").unwrap_err();
    assert!(matches!(error, WeightError::NotFound { .. }));
    let share = SetRequest {
        share: true,
        ..named("m")
    };
    assert!(scratch.load(&share, ONE).unwrap().attached);
    assert_eq!(scratch.store.visible_to(2).len(), 1);
    assert!(scratch.store.attach(2, "m", "x").is_ok());
    let error = scratch.store.remove(2, false, "m").unwrap_err();
    assert!(matches!(error, WeightError::NotOwner { .. }));
    // one's own set comes first
    let own = SetRequest {
        uid: 2,
        ..named("m")
    };
    let outcome = scratch.load(&own, &[("z", b"9")]).unwrap();
    assert!(!outcome.attached);
    assert_eq!(scratch.store.get(2, "m").unwrap().id(), outcome.set.id());
    drop(outcome);
    scratch.store.remove(0, true, "m").unwrap();
    assert_eq!(scratch.store.all().len(), 1);
}

#[test]
fn names_that_could_leave_their_directory_are_refused_and_nothing_is_left() {
    let scratch = Scratch::new(None);
    for name in ["a/b", "..", "a\0b", &"x".repeat(129), ".a"] {
        let error = scratch.load(&named(name), ONE).unwrap_err();
        assert!(matches!(error, WeightError::Argument { .. }), "{name:?}");
        let error = scratch.store.attach(1, name, "m").unwrap_err();
        assert!(matches!(error, WeightError::Argument { .. }), "{name:?}");
    }
    assert!(scratch.store.attach(1, "", "m").is_err());
    assert_eq!(scratch.files(), (0, 0));
}

#[test]
fn unattached_sets_make_room_least_recently_used_first() {
    let scratch = Scratch::new(Some(3 * 4096));
    for name in ["a", "b", "c"] {
        scratch.load(&named(name), ONE).unwrap();
    }
    let kept = scratch.store.attach(1, "a", "m").unwrap();
    drop(scratch.store.attach(1, "b", "m").unwrap());
    // c is now the one that was used longest ago
    scratch.load(&named("d"), ONE).unwrap();
    let names = |s: &Scratch| -> Vec<String> {
        s.store
            .all()
            .iter()
            .map(|set| set.name().to_owned())
            .collect()
    };
    assert_eq!(names(&scratch), ["a", "b", "d"]);
    // what can never fit evicts nobody
    let error = scratch
        .load(&named("e"), &[("w", &[0; 4 * 4096])])
        .unwrap_err();
    assert!(
        matches!(error, WeightError::HostMemory { limit: 12288, .. }),
        "{error}"
    );
    let error = scratch
        .load(&named("e"), &[("w", &[0; 3 * 4096])])
        .unwrap_err();
    assert!(matches!(error, WeightError::HostMemory { .. }), "{error}");
    assert_eq!(names(&scratch), ["a", "b", "d"]);
    drop(kept);
    scratch.load(&named("e"), &[("w", &[0; 3 * 4096])]).unwrap();
    assert_eq!(names(&scratch), ["e"]);
    assert_eq!(scratch.files(), (1, 1));
}

fn names(scratch: &Scratch) -> Vec<(u32, String)> {
    let sets = scratch.store.all();
    let named = |set: &Arc<WeightSet>| (set.owner_uid(), set.name().to_owned());
    sets.iter().map(named).collect()
}

#[test]
fn one_users_load_never_evicts_anothers_set() {
    let scratch = Scratch::new(Some(3 * 4096));
    let of = |uid, name| SetRequest { uid, ..named(name) };
    for request in [of(2, "theirs"), of(1, "old"), of(1, "new")] {
        scratch.load(&request, ONE).unwrap();
    }
    // two of three pages are the most that user 1 can have
    let error = scratch.load(&named("big"), &[("w", &[0; 3 * 4096])]);
    assert!(matches!(error, Err(WeightError::HostMemory { .. })));
    assert_eq!(scratch.store.all().len(), 3);
    scratch
        .load(&named("big"), &[("w", &[0; 2 * 4096])])
        .unwrap();
    let left = [(1, "big".to_owned()), (2, "theirs".to_owned())];
    assert_eq!(names(&scratch), left);
    // an administrator may evict anybody's, its own first
    scratch.store.remove(1, false, "big").unwrap();
    for name in ["a", "b"] {
        scratch.load(&of(0, name), ONE).unwrap();
    }
    scratch.load(&of(0, "c"), ONE).unwrap();
    let left = [(0, "b"), (0, "c"), (2, "theirs")].map(|(uid, name)| (uid, name.to_owned()));
    assert_eq!(names(&scratch), left);
    scratch.load(&of(0, "d"), &[("w", &[0; 3 * 4096])]).unwrap();
    assert_eq!(names(&scratch), [(0, "d".to_owned())]);
}

#[test]
fn nobody_is_evicted_for_a_segment_that_the_file_system_cannot_hold() {
    let scratch = Scratch::new(Some(1 << 40));
    scratch.load(&named("kept"), ONE).unwrap();
    let free = segment::free_bytes(scratch.shm.path()).unwrap();
    let manifest = super::super::manifest::Manifest::place(
        vec![super::super::manifest::TensorEntry {
            name: "w".to_owned(),
            dtype: "U8".to_owned(),
            shape: vec![free + (1 << 30)],
            stride: Vec::new(),
            bytes: free + (1 << 30),
            storage: 0,
            storage_offset: 0,
        }],
        &[free + (1 << 30)],
    );
    let cancel = super::super::loader::Cancel::default();
    let error = scratch.store.room(1, &manifest.unwrap(), &cancel);
    assert!(matches!(
        error.unwrap_err(),
        WeightError::Segment(segment::SegmentError::Full { .. })
    ));
    assert_eq!(names(&scratch), [(1, "kept".to_owned())]);
    assert_eq!(scratch.store.host().reserved_bytes, 0);
}

#[test]
fn a_removed_segment_is_flagged_and_still_served() {
    let scratch = Scratch::new(None);
    let set = scratch.load(&named("m"), ONE).unwrap().set;
    std::fs::remove_file(set.segment().path()).unwrap();
    std::fs::write(set.segment().path(), b"other").unwrap();
    assert!(set.segment().is_unlinked());
    let again = scratch.store.attach(1, "m", "x").unwrap();
    let given = again.set().segment().export().unwrap();
    let mut bytes = [0; 3];
    let file = std::fs::File::from(given);
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"123");
}

#[test]
fn a_user_cannot_start_calls_without_end() {
    let scratch = Scratch::new(None);
    let calls: Vec<_> = (0..64).map(|_| scratch.store.admit(1).unwrap()).collect();
    assert!(matches!(
        scratch.store.admit(1),
        Err(WeightError::TooMany { limit: 64, .. })
    ));
    assert!(scratch.store.admit(2).is_ok());
    drop(calls);
    assert!(scratch.store.admit(1).is_ok());
}

#[test]
fn a_successor_removes_what_a_killed_daemon_left() {
    let scratch = Scratch::new(None);
    let set = scratch.load(&named("m"), ONE).unwrap().set;
    let state = scratch.store.state().clone();
    let record: super::super::record::SetRecord =
        state.read(&record::file_name(set.id())).unwrap().unwrap();
    assert_eq!(record.manifest, *set.manifest());
    assert_eq!(record.digest, set.digest());
    // what a kill leaves: the files without their process
    let left = set.segment().path().with_file_name(leftovers::segment_name(
        "test",
        &"0".repeat(leftovers::ID_DIGITS),
    ));
    std::fs::write(&left, b"x").unwrap();
    let removed = leftovers::discard(scratch.shm.path(), "test", &state, &[]);
    assert_eq!(removed.unwrap(), 2);
    assert_eq!(scratch.files(), (0, 0));
}
