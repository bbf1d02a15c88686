use super::{super::loader::Cancel, fixture::*, *};

fn index(map: &str) -> SourceFile {
    let text = format!(r#"{{"metadata":{{"total_size":3}},"weight_map":{map}}}"#);
    source("model.safetensors.index.json", text.as_bytes())
}

fn shards() -> Vec<SourceFile> {
    vec![
        source("m-1", &bytes(&[("a", b"1")])),
        source("m-2", &bytes(&[("b", b"23")])),
    ]
}

fn with(mut files: Vec<SourceFile>, more: SourceFile) -> Vec<SourceFile> {
    files.push(more);
    files
}

#[test]
fn shards_and_their_index_are_one_checkpoint() {
    let files = with(shards(), index(r#"{"a":"m-1","b":"m-2"}"#));
    let checkpoint = open(files).unwrap();
    assert_eq!(checkpoint.manifest().tensors().len(), 2);
    let mut read = [0; 2];
    checkpoint
        .read(checkpoint.places()[1], 0, &mut read)
        .unwrap();
    assert_eq!(&read, b"23");
    checkpoint.check_unchanged().unwrap();
}

#[test]
fn an_index_that_disagrees_with_the_shards_is_refused_naming_the_file() {
    for (file, files) in [
        (
            "index",
            with(shards(), index(r#"{"a":"m-1","b":"m-2","c":"m-3"}"#)),
        ),
        (
            "m-2",
            with(shards(), index(r#"{"a":"m-1","b":"m-2","c":"m-2"}"#)),
        ),
        ("m-2", with(shards(), index(r#"{"a":"m-1"}"#))),
        ("m-1", with(shards(), index(r#"{"a":"m-2","b":"m-2"}"#))),
        (
            "index",
            with(shards(), index(r#"{"a":"m-1","b":"m-2","a":"m-1"}"#)),
        ),
        ("index", with(shards(), index("3"))),
        ("m-1", shards()),
        ("index", with(with(shards(), index("{}")), index("{}"))),
        (
            "m-1",
            with(
                with(shards(), shards().remove(0)),
                index(r#"{"a":"m-1","b":"m-2"}"#),
            ),
        ),
        (
            "m-2",
            with(
                vec![
                    source("m-1", &bytes(&[("a", b"1")])),
                    source("m-2", &bytes(&[])),
                ],
                index(r#"{"a":"m-1"}"#),
            ),
        ),
        (
            "m-2",
            with(
                vec![
                    source("m-1", &bytes(&[("a", b"1")])),
                    source("m-2", &bytes(&[("a", b"1")])),
                ],
                index(r#"{"a":"m-1"}"#),
            ),
        ),
    ] {
        let error = open(files).unwrap_err();
        assert!(
            matches!(&error, WeightError::Checkpoint { file: named, .. } if named.contains(file)),
            "{file}: {error}"
        );
    }
    for files in [vec![], vec![index("{}")]] {
        assert!(matches!(open(files), Err(WeightError::Argument { .. })));
    }
}

#[test]
fn a_file_cut_at_any_length_is_refused_naming_it() {
    let whole = bytes(&[("a", b"123"), ("b", b"4")]);
    for length in 0..whole.len() {
        let error = open(vec![source("cut", &whole[..length])]).unwrap_err();
        assert!(error.to_string().contains("\"cut\""), "{length}: {error}");
    }
}

#[test]
fn what_is_no_regular_file_is_refused() {
    for path in ["/", "/dev/null"] {
        let file = File::open(path).unwrap();
        let name = "x".to_owned();
        let error = open(vec![SourceFile { name, file }]).unwrap_err();
        assert!(error.to_string().contains("regular"), "{error}");
    }
}

#[test]
fn a_change_behind_our_back_is_noticed() {
    let files = single(&[("a", b"123")]);
    let behind = files[0].file.try_clone().unwrap();
    let checkpoint = open(files).unwrap();
    let length = behind.metadata().unwrap().len();
    behind.set_len(length - 1).unwrap();
    let mut target = [0; 3];
    let place = checkpoint.places()[0];
    for error in [
        checkpoint.read(place, 0, &mut target).unwrap_err(),
        checkpoint.check_unchanged().unwrap_err(),
    ] {
        assert!(
            matches!(error, WeightError::CheckpointChanged { .. }),
            "{error}"
        );
    }
    behind.set_len(length).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
    behind.set_modified(later).unwrap();
    assert!(checkpoint.check_unchanged().is_err());
}

#[test]
fn headers_over_the_limit_are_refused_before_they_are_read() {
    let sparse = |name: &str, header: u64| {
        let made = source(name, &header.to_le_bytes());
        made.file.set_len(8 + header).unwrap();
        made
    };
    let error = open(vec![sparse("one", (32 << 20) + 1)]).unwrap_err();
    assert!(error.to_string().contains("32 MiB"), "{error}");
    let mut files: Vec<_> = (0..3)
        .map(|i| sparse(&format!("m-{i}"), 22 << 20))
        .collect();
    files.push(index("{}"));
    let error = open(files).unwrap_err().to_string();
    assert!(error.contains("over the limit of 67108864"), "{error}");
}

#[test]
fn a_checkpoint_waits_until_its_users_headers_are_gone() {
    let shares = Shares::new("bytes", 100, 400);
    let none = Cancel::default();
    let long = "n".repeat(50);
    let files = || single(&[(long.as_str(), b"1")]);
    let first = Checkpoint::open(files(), &shares, 1, &none).unwrap();
    Checkpoint::open(files(), &shares, 2, &none).unwrap();
    let cancel = Cancel::default();
    cancel.set();
    let error = Checkpoint::open(files(), &shares, 1, &cancel).unwrap_err();
    assert!(matches!(error, WeightError::Aborted { .. }), "{error}");
    drop(first);
    Checkpoint::open(files(), &shares, 1, &none).unwrap();
}
