use super::*;

#[test]
fn a_published_segment_is_complete_read_only_and_gone_after_drop() {
    let directory = tempfile::tempdir().unwrap();
    let mut builder = SegmentBuilder::new(directory.path(), "s", 5000).unwrap();
    assert!(!directory.path().join("s").exists());
    builder.bytes_mut().unwrap()[4999] = 7;
    let segment = builder.publish().unwrap();
    let seen = fs::metadata(directory.path().join("s")).unwrap();
    assert_eq!(seen.permissions().mode() & 0o777, 0o400);
    assert_eq!(seen.len(), 5000);
    let given = segment.export().unwrap();
    assert!(Mapping::new(given.as_fd(), 5000, Access::ReadWrite).is_err());
    let theirs = Mapping::new(given.as_fd(), 5000, Access::Read).unwrap();
    drop(segment);
    assert!(theirs.equals(4999, &[7]).unwrap());
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_successor_takes_over_what_a_dead_daemon_left_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let mut builder = SegmentBuilder::new(directory.path(), "s", 5000).unwrap();
    builder.bytes_mut().unwrap()[4999] = 7;
    let first = builder.publish().unwrap();
    let living = Segment::adopt(directory.path(), "s", 5000).unwrap_err();
    assert!(living.to_string().contains("maker"), "{living}");
    first.keep();
    drop(first);
    assert!(Segment::adopt(directory.path(), "s", 4096).is_err());
    assert!(Segment::adopt(directory.path(), "t", 5000).is_err());
    std::os::unix::fs::symlink("s", directory.path().join("l")).unwrap();
    assert!(Segment::adopt(directory.path(), "l", 5000).is_err());
    let second = Segment::adopt(directory.path(), "s", 5000).unwrap();
    assert!(second.mapping().equals(4999, &[7]).unwrap());
    let mode = fs::metadata(second.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o400);
    assert!(Segment::adopt(directory.path(), "s", 5000).is_err());
    let seen = File::open(second.path()).unwrap();
    assert!(seen.try_lock().is_err());
    drop(second);
    assert!(!directory.path().join("s").exists());
}

#[test]
fn a_segment_is_locked_by_its_maker_until_that_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    let segment = SegmentBuilder::new(directory.path(), "s", 4096)
        .unwrap()
        .publish()
        .unwrap();
    let seen = File::open(segment.path()).unwrap();
    assert!(seen.try_lock().is_err());
    let given = File::from(segment.export().unwrap());
    drop(segment);
    assert!(seen.try_lock().is_ok());
    drop(given);
}

#[test]
fn populating_changes_no_byte_and_keeps_to_the_range() {
    let directory = tempfile::tempdir().unwrap();
    let mut builder = SegmentBuilder::new(directory.path(), "s", 20_000).unwrap();
    let bytes = builder.bytes_mut().unwrap();
    bytes.fill(9);
    for range in [0..20_000, 1..4095, 1..4097, 5000..5000, 4096..8192] {
        populate(&mut bytes[range]);
    }
    assert!(bytes.iter().all(|byte| *byte == 9));
}

#[test]
fn a_node_that_the_kernel_refuses_costs_the_place_and_not_the_segment() {
    let directory = tempfile::tempdir().unwrap();
    let on = |node| SegmentBuilder::on_node(directory.path(), "s", 9000, Some(node), &mut |_| true);
    let mut near = on(0).unwrap();
    assert!(near.misplaced().is_none());
    assert_eq!(near.bytes_mut().unwrap().len(), 9000);
    drop(near);
    let mut far = on(900).unwrap();
    let why = far.misplaced().map(ToString::to_string).unwrap();
    assert!(why.contains("NUMA node 900"), "{why}");
    assert_eq!(far.bytes_mut().unwrap().len(), 9000);
    drop(far);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn an_abandoned_builder_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    drop(SegmentBuilder::new(directory.path(), "s", 4096).unwrap());
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_file_system_without_room_is_an_error_with_figures_and_nothing_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let error = SegmentBuilder::new(directory.path(), "s", 1 << 60).unwrap_err();
    assert!(matches!(error, SegmentError::Full { wanted, .. } if wanted == 1 << 60));
    assert!(matches!(
        SegmentBuilder::new(directory.path(), "s", 0),
        Err(SegmentError::Size { bytes: 0 })
    ));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_large_segment_is_reserved_in_steps_and_may_be_given_up_between_them() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = STEP + STEP / 2;
    let mut seen = Vec::new();
    let mut proceed = |reserved| {
        let taken = fs::metadata(building_path(directory.path(), "s")).unwrap();
        seen.push((reserved, taken.blocks() * 512 >= reserved));
        reserved < STEP
    };
    let error = SegmentBuilder::on_node(directory.path(), "s", bytes, None, &mut proceed);
    assert!(matches!(
        error.unwrap_err(),
        SegmentError::GivenUp { wanted, reserved: STEP } if wanted == bytes
    ));
    assert_eq!(seen, [(0, true), (STEP, true)]);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn another_file_under_the_name_is_noticed_and_never_removed() {
    let directory = tempfile::tempdir().unwrap();
    let segment = SegmentBuilder::new(directory.path(), "s", 4096)
        .unwrap()
        .publish()
        .unwrap();
    assert!(!segment.is_unlinked());
    fs::remove_file(segment.path()).unwrap();
    fs::write(segment.path(), b"other").unwrap();
    assert!(segment.is_unlinked());
    drop(segment);
    assert_eq!(fs::read(directory.path().join("s")).unwrap(), b"other");
}
