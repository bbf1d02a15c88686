use super::{
    super::{loader::Cancel, registry::fixture::*},
    *,
};

/// Runs of bytes: owner, offset, bytes.
type Data<'a> = &'a [(&'a str, u64, &'a [u8])];

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
    data: Data,
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
    let data: Data = &[("a", 0, b"1"), ("a", 1, b"23")];
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
    let data: Data = &[
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
    let data: Data = &[("a", 0, b"12")];
    let error = put(&scratch, named("m"), vec![tensor("a", 3)], data).unwrap_err();
    assert!(matches!(error, WeightError::Aborted { .. }), "{error}");
    let mut session = PutSession::new(&scratch.store, named("m")).unwrap();
    session.declare(vec![tensor("a", 3)]).unwrap();
    session.write("a", 0, b"1", &Cancel::default()).unwrap();
    assert_eq!(scratch.store.host().reserved_bytes, 4096);
    drop(session);
    assert_eq!(scratch.files(), (0, 0));
    assert_eq!(scratch.store.host().reserved_bytes, 0);
    let data: Data = &[("a", 0, b"123")];
    assert!(put(&scratch, named("m"), vec![tensor("a", 3)], data).is_ok());
}

#[test]
fn each_byte_comes_once_in_rising_order_within_its_storage() {
    let scratch = Scratch::new(None);
    let all = || vec![tensor("a", 3), view("v", "a", 1, &[2], &[])];
    let cases: [(Data, &str); 6] = [
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
    let data: Data = &[("a", 0, b"12345")];
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
    let data: Data = &[("a", 0, b"123")];
    let first = put(&scratch, request(), vec![tensor("a", 3)], data).unwrap();
    assert!(!first.attached);
    assert!(first.set.digest().is_none());
    assert!(
        put(&scratch, request(), vec![tensor("a", 3)], data)
            .unwrap()
            .attached
    );
}

#[test]
fn a_put_that_declares_and_sends_nothing_evicts_nobody() {
    let scratch = Scratch::new(Some(2 * 4096));
    let one: &[(&str, &[u8])] = &[("a", b"123")];
    scratch.load(&named("kept"), one).unwrap();
    let declared = || vec![tensor("a", 2 * 4096)];
    let error = put(&scratch, named("m"), declared(), &[]).unwrap_err();
    assert!(matches!(error, WeightError::Aborted { .. }), "{error}");
    assert_eq!(scratch.files(), (1, 1));
    let mut session = PutSession::new(&scratch.store, named("m")).unwrap();
    session.declare(declared()).unwrap();
    drop(session);
    assert_eq!(scratch.files(), (1, 1));
    // with its first bytes it may make room
    let data: Data = &[("a", 0, &[7; 2 * 4096])];
    put(&scratch, named("m"), declared(), data).unwrap();
    assert_eq!(scratch.store.all()[0].name(), "m");
}

#[test]
fn a_put_without_tensors_is_refused() {
    let scratch = Scratch::new(None);
    for data in [&[] as Data, &[("a", 0, b"")]] {
        let error = put(&scratch, named("m"), vec![], data).unwrap_err();
        assert!(
            matches!(&error, WeightError::Argument { field, .. } if field == "tensors"),
            "{error}"
        );
        assert!(error.to_string().contains("no tensors"), "{error}");
    }
    assert_eq!(scratch.files(), (0, 0));
}

#[test]
fn a_put_whose_caller_is_gone_when_it_ends_becomes_no_set() {
    let scratch = Scratch::new(None);
    for bytes in [0, 3] {
        let cancel = Cancel::default();
        let mut session = PutSession::new(&scratch.store, named("m")).unwrap();
        session.declare(vec![tensor("a", bytes)]).unwrap();
        if bytes > 0 {
            session.write("a", 0, b"123", &cancel).unwrap();
        }
        cancel.set();
        let error = session.finish(&cancel).unwrap_err();
        assert!(matches!(error, WeightError::Aborted { .. }), "{error}");
        assert_eq!(scratch.files(), (0, 0));
    }
}

#[test]
fn declarations_without_end_are_refused_and_give_their_share_back() {
    let scratch = Scratch::new(None);
    let long = |name: usize| Declaration {
        shape: vec![1; 64],
        stride: vec![0; 64],
        ..tensor(&name.to_string(), 1)
    };
    let thousand = || (0..1000).map(long).collect::<Vec<_>>();
    let mut sessions = Vec::new();
    let refused = loop {
        let mut session = PutSession::new(&scratch.store, named("m")).unwrap();
        let error = loop {
            if let Err(e) = session.declare(thousand()) {
                break e;
            }
        };
        sessions.push(session);
        if matches!(error, WeightError::TooMany { .. }) {
            break error;
        }
        assert!(
            matches!(&error, WeightError::Argument { rule, .. } if rule.contains("67108864")),
            "{error}"
        );
    };
    assert!(refused.to_string().contains("declarations"), "{refused}");
    assert!(sessions.len() <= 4, "{}", sessions.len());
    let other = SetRequest {
        uid: 2,
        ..named("m")
    };
    let mut other = PutSession::new(&scratch.store, other).unwrap();
    other.declare(thousand()).unwrap();
    drop(sessions);
    let mut again = PutSession::new(&scratch.store, named("m")).unwrap();
    again.declare(thousand()).unwrap();
}
