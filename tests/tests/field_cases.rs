//! Faults that users of such services have met, each as a scenario on the real binary:
//! memory, names, namespaces.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{
    fs::{self, File},
    io::Write as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use flextensord_client::{
    Budget, ClientError, LayerSpec, LoadOptions, OpenOptions,
    kind::Kind,
    upload::{Source, UploadTensor},
};
use flextensord_tests::{
    checkpoint,
    daemon::Daemon,
    process::{binary, eventually},
    reader::{Reader, ReaderPlan},
    witness::{Witness, typed},
};

const SHM: &str = "/dev/shm";

/// A daemon whose segments lie where they would in production.
fn on_shared_memory(flags: &[&str]) -> Daemon {
    Daemon::start_with(&binary("flextensord").unwrap(), Path::new(SHM), flags).unwrap()
}

/// Loads a model of four layers of two tensors as the set "m".
fn load(daemon: &Daemon) -> PathBuf {
    let path = daemon.scratch().join("m.safetensors");
    checkpoint::write(&path, &checkpoint::layered(4, 2, 300_000)).unwrap();
    let client = daemon.client().unwrap();
    client
        .load(&path, "m", &LoadOptions::default(), |_| ())
        .unwrap();
    path
}

/// Two layers' worth of the device: most of the model streams.
fn plan(path: &Path) -> ReaderPlan<'_> {
    ReaderPlan::new("m", path)
        .with("--budget", 1_300_000)
        .with("--passes", 4)
}

/// Case 3: shared memory takes what the weights take, and a little padding.
#[test]
fn forty_tensors_of_odd_size_take_their_bytes_and_256_more_each() {
    let daemon = on_shared_memory(&[]);
    let (count, bytes) = (40_u64, (9_u64 << 18) + 1);
    let entries: Vec<String> = (0..count)
        .map(|at| {
            let (begin, end) = (at * bytes, (at + 1) * bytes);
            format!(r#""w{at}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[{begin},{end}]}}"#)
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let path = daemon.scratch().join("m.safetensors");
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + count * bytes)
        .unwrap();
    let client = daemon.client().unwrap();
    let set = client
        .load(&path, "m", &LoadOptions::default(), |_| ())
        .unwrap()
        .set;
    let most = count * bytes + count * 256 + 4096;
    assert_eq!(set.logical_bytes, count * bytes);
    assert!(set.segment_bytes <= most, "{set:?}");
    let segment = fs::metadata(Path::new(SHM).join(&daemon.segments()[0])).unwrap();
    assert_eq!(segment.size(), set.segment_bytes);
    assert!(segment.blocks() * 512 <= most, "{}", segment.blocks());
    assert!(segment.blocks() * 512 <= count * bytes * 105 / 100);
}

/// Case 13: a client in a container has a `/dev/shm` of its own, and maybe a file of the
/// segment's name in it. Descriptors come over the socket, so neither matters.
#[test]
fn a_client_with_a_dev_shm_of_its_own_reads_the_daemons_bytes() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: needs root for a mount namespace");
        return;
    }
    let daemon = on_shared_memory(&[]);
    let path = load(&daemon);
    let segment = daemon.segments().remove(0);
    let bytes = fs::metadata(Path::new(SHM).join(&segment)).unwrap().len();
    let nothing = format!("mount -t tmpfs none {SHM}");
    let other = format!("{nothing} && head -c {bytes} /dev/zero > {SHM}/{segment}");
    for prepare in [nothing, other] {
        let script = format!("{prepare} && ls {SHM} >&2 && exec \"$@\"");
        let output = Command::new("unshare")
            .args(["-m", "sh", "-c", &script, "sh"])
            .arg(binary("reader").unwrap())
            .arg("--socket")
            .arg(daemon.socket())
            .arg("--checkpoint")
            .arg(&path)
            .args(["--weight-set", "m", "--budget", "1300000", "--passes", "2"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let seen = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said} {seen}");
        assert!(said.contains("\"done\""), "{said} {seen}");
        assert!(said.contains("\"streamed_bytes\""), "{said}");
    }
}

/// Case 19: the segment's name is removed under the daemon, then taken by another file.
#[test]
fn a_segment_removed_under_the_daemon_is_served_on_and_a_file_of_its_name_left_alone() {
    let mut daemon = Daemon::start(&["--poison-released", "true"]).unwrap();
    let path = load(&daemon);
    let mut a = Reader::start(&daemon, &plan(&path).with("--hold-in-pass", 1)).unwrap();
    a.expect("registered").unwrap();
    a.expect("holding").unwrap();
    let segment = daemon.shm().join(&daemon.segments()[0]);
    let unlinked = || daemon.status().unwrap().weight_sets[0].unlinked;
    assert!(!unlinked());
    fs::remove_file(&segment).unwrap();
    assert!(unlinked());
    a.go_on();
    let b = Reader::start(&daemon, &plan(&path)).unwrap();
    b.expect("registered").unwrap();
    a.finish().unwrap();
    b.finish().unwrap();
    // somebody puts another file there
    let foreign = vec![0x55; 4096];
    fs::write(&segment, &foreign).unwrap();
    assert!(unlinked());
    let client = daemon.client().unwrap();
    let again = client
        .load(&path, "m", &LoadOptions::default(), |_| ())
        .unwrap();
    assert!(again.attached && again.set.unlinked);
    let c = Reader::start(&daemon, &plan(&path)).unwrap();
    c.expect("registered").unwrap();
    c.finish().unwrap();
    eventually("the set is free", flextensord_tests::daemon::SOON, || {
        client.drop_weight_set("m").ok()
    })
    .unwrap();
    assert_eq!(fs::read(&segment).unwrap(), foreign);
    // what is loaded anew has a name of its own
    let path = load(&daemon);
    Reader::start(&daemon, &plan(&path))
        .unwrap()
        .expect("registered")
        .unwrap();
    assert_eq!(fs::read(&segment).unwrap(), foreign);
    assert!(daemon.stop().unwrap().success());
    assert_eq!(fs::read(&segment).unwrap(), foreign);
}

/// Case 12: regions outside their object, in every way that sums and products can go.
#[test]
fn views_beyond_their_storage_and_shapes_that_overflow_are_refused_and_the_plan_stays() {
    let daemon = Daemon::start(&[]).unwrap();
    load(&daemon);
    let client = daemon.client().unwrap();
    let mut manager = client.open(OpenOptions::default()).unwrap();
    let layers = [LayerSpec {
        name: "l".into(),
        tensors: vec!["layers.0.0".into(), "layers.1.0".into()],
    }];
    manager
        .register("m", &layers, Budget::Fraction(1.0))
        .unwrap();
    let witness = Witness::new(&daemon).unwrap();
    let before = witness.snapshot().unwrap();
    let bytes = vec![1; 4096];
    let tensor = |name: &str, dtype: &str, shape: Vec<u64>, source| UploadTensor {
        name: name.into(),
        dtype: dtype.into(),
        shape,
        stride: Vec::new(),
        source,
    };
    let view = |offset, shape: Vec<u64>| {
        let of = "w".to_owned();
        tensor("v", "U8", shape, Source::Alias { of, offset })
    };
    let strided = |stride: i64| UploadTensor {
        stride: vec![stride],
        ..view(0, vec![2])
    };
    for (second, field, rule) in [
        (view(0, vec![4097]), "storage_offset", "passes the end"),
        (view(4096, vec![1]), "storage_offset", "passes the end"),
        (view(1, vec![4096]), "storage_offset", "passes the end"),
        (view(u64::MAX, vec![2]), "storage_offset", "passes the end"),
        (view(0, vec![1 << 63]), "storage_offset", "passes the end"),
        (view(0, vec![1 << 33, 1 << 33]), "shape", "overflows"),
        (view(0, vec![1; 65]), "shape", "65 dimensions"),
        (strided(4096), "storage_offset", "passes the end"),
        (strided(i64::MAX), "storage_offset", "passes the end"),
        (strided(i64::MIN), "stride", "negative"),
        (strided(-1), "stride", "negative"),
        (
            UploadTensor {
                stride: vec![1, 1],
                ..view(0, vec![2])
            },
            "stride",
            "2 values for 1 dimensions",
        ),
        (
            UploadTensor {
                stride: vec![2],
                dtype: "F4".into(),
                ..view(0, vec![2])
            },
            "stride",
            "4-bit",
        ),
        (
            tensor("v", "F64", vec![1 << 62], Source::Bytes(&[])),
            "shape",
            "overflows",
        ),
        (
            tensor("v", "U8", vec![1 << 63], Source::Bytes(b"x")),
            "storage_bytes",
            "need 9223372036854775808",
        ),
        (
            tensor("v", "F4", vec![5], Source::Bytes(b"abc")),
            "shape",
            "whole bytes",
        ),
        (
            tensor("v", "F8 X", vec![3], Source::Bytes(b"abc")),
            "dtype",
            "dtype must be",
        ),
        (
            tensor(
                "v",
                "U8",
                vec![1],
                Source::Alias {
                    of: "nosuch".into(),
                    offset: 0,
                },
            ),
            "alias_of",
            "owns its storage",
        ),
        (
            tensor(
                "v",
                "U8",
                vec![1],
                Source::Alias {
                    of: "v".into(),
                    offset: 0,
                },
            ),
            "alias_of",
            "owns its storage",
        ),
        (
            tensor("w", "U8", vec![1], Source::Bytes(b"x")),
            "name",
            "twice",
        ),
        (
            tensor("", "U8", vec![1], Source::Bytes(b"x")),
            "name",
            "empty",
        ),
        (
            tensor("a\0", "U8", vec![1], Source::Bytes(b"x")),
            "name",
            "control",
        ),
    ] {
        let first = tensor("w", "U8", vec![4096], Source::Bytes(&bytes));
        let what = format!("{second:?}");
        let error = client
            .put("bad", &[first, second], &LoadOptions::default())
            .expect_err(&what);
        typed(&error, Kind::InvalidArgument, field, rule).expect(&what);
        witness.unchanged(&before).unwrap();
    }
    // a size that no machine has is refused by the host's budget, before any memory is taken
    let huge = tensor("w", "U8", vec![1 << 50], Source::Bytes(&[]));
    let error = client
        .put("huge", &[huge], &LoadOptions::default())
        .unwrap_err();
    let ClientError::Refused(failure) = &error else {
        panic!("{error}")
    };
    assert!(
        matches!(
            failure.kind,
            Kind::HostMemory | Kind::Aborted | Kind::SharedMemoryFull
        ),
        "{error}"
    );
    witness.unchanged(&before).unwrap();
    let layer = manager.layer("l").unwrap();
    assert_eq!(manager.acquire(layer).unwrap().tensors().count(), 2);
}
