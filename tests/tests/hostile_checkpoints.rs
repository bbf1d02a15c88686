//! Files that are no checkpoints, and places without room for one: a typed refusal that
//! names field, value and rule, nothing changed, nothing left behind, the daemon serving.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{
    fs::{self, File},
    io::Write as _,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

use flextensord_client::{
    Budget, ClientError, LayerSpec, LoadOptions, LoadedSet, OpenOptions, blocking::Client,
    checkpoint::CheckpointError, kind::Kind,
};
use flextensord_tests::{
    checkpoint::{self, Tensor},
    daemon::{Daemon, directory},
    process::binary,
    tmpfs::Tmpfs,
    witness::{Snapshot, Witness, typed},
};

/// A daemon with a client that hands files over, and all as it was before.
struct Scene<'a> {
    daemon: &'a Daemon,
    client: Client,
    witness: Witness<'a>,
    before: Snapshot,
}

impl<'a> Scene<'a> {
    fn new(daemon: &'a Daemon) -> Self {
        let client = daemon.client().unwrap();
        // opens the descriptor channel, which stays open
        let path = daemon.scratch().join("first.safetensors");
        checkpoint::write(&path, &checkpoint::layered(1, 2, 100)).unwrap();
        load(&client, &path).unwrap();
        client.drop_weight_set("m").unwrap();
        let witness = Witness::new(daemon).unwrap();
        let before = witness.snapshot().unwrap();
        Self {
            daemon,
            client,
            witness,
            before,
        }
    }

    /// Loads a file with that content, which must be refused by that rule.
    fn refused(&self, content: &[u8], rule: &str) {
        let path = self.daemon.scratch().join("bad.safetensors");
        fs::write(&path, content).unwrap();
        let error = load(&self.client, &path).unwrap_err();
        let failure = typed(&error, Kind::CheckpointInvalid, "files", rule).unwrap();
        assert_eq!(failure.details["value"], "bad.safetensors");
        assert!(failure.message.len() < 1000, "{}", failure.message);
        self.unchanged();
    }

    fn unchanged(&self) {
        self.witness.unchanged(&self.before).unwrap();
    }
}

fn load(client: &Client, path: &Path) -> Result<LoadedSet, ClientError> {
    client.load(path, "m", &LoadOptions::default(), |_| ())
}

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data, 7);
    file
}

fn entry(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

fn header(entries: &[String]) -> String {
    format!("{{{}}}", entries.join(","))
}

#[test]
fn a_file_cut_at_any_length_is_refused() {
    let daemon = Daemon::start(&["--log", "warn"]).unwrap();
    let scene = Scene::new(&daemon);
    let small = file(&header(&[entry("a", "U8", "[5]", 0, 5)]), 5);
    for length in 0..small.len() {
        scene.refused(&small[..length], "");
    }
    // and one with more than a page of header, at the lengths where something ends
    let path = daemon.scratch().join("large.safetensors");
    checkpoint::write(&path, &checkpoint::layered(40, 4, 1000)).unwrap();
    let large = fs::read(&path).unwrap();
    let head = 8 + usize::try_from(u64::from_le_bytes(*large.first_chunk().unwrap())).unwrap();
    for (length, rule) in [
        (0, "too few"),
        (7, "too few"),
        (8, "passes the end"),
        (9, "passes the end"),
        (head - 1, "passes the end"),
        (head, "the file has 0"),
        (head + 1, "the file has 1"),
        (large.len() - 1, "the file has"),
    ] {
        scene.refused(&large[..length], rule);
    }
    load(&scene.client, &path).unwrap();
}

#[test]
fn headers_that_lie_are_refused_by_the_rule_they_break() {
    let daemon = Daemon::start(&["--log", "warn"]).unwrap();
    let scene = Scene::new(&daemon);
    let one = entry("a", "U8", "[4]", 0, 4);
    let wide = format!("[{0},{0}]", 1_u64 << 33);
    let flat = format!("[{}]", vec!["1"; 65].join(","));
    let cases = [
        (
            file(&header(&[one.clone(), entry("b", "U8", "[4]", 3, 7)]), 7),
            "inside the tensor",
        ),
        (
            file(&header(&[one.clone(), entry("b", "U8", "[4]", 5, 9)]), 9),
            "hole",
        ),
        (
            file(&header(std::slice::from_ref(&one)), 5),
            "the file has 5",
        ),
        (
            file(&header(std::slice::from_ref(&one)), 3),
            "the file has 3",
        ),
        (
            file(&header(&[entry("a", "U8", "[4]", 4, 0)]), 4),
            "offsets 4..0",
        ),
        (
            file(&header(&[entry("a", "U8", "[3]", 0, 4)]), 4),
            "need 3 bytes",
        ),
        (
            file(
                &header(&[entry("a", "U8", "[4]", u64::MAX - 3, u64::MAX)]),
                4,
            ),
            "need 4 bytes",
        ),
        (
            file(&header(&[entry("a", "U8", &wide, 0, 4)]), 4),
            "overflows",
        ),
        (
            file(
                &header(&[entry("a", "F64", &format!("[{}]", 1_u64 << 62), 0, 0)]),
                0,
            ),
            "overflows",
        ),
        (
            file(&header(&[entry("a", "U8", &flat, 0, 1)]), 1),
            "more than 64 dimensions",
        ),
        (
            file(&header(&[entry("a", "U8", "[-1]", 0, 1)]), 1),
            "not valid",
        ),
        (
            file(
                &header(&[entry("a", "U8", "[18446744073709551616]", 0, 1)]),
                1,
            ),
            "not valid",
        ),
        (
            file(&header(&[entry("a", "F4", "[5]", 0, 3)]), 3),
            "whole bytes",
        ),
        (
            file(&header(&[entry("a", "F6_E2M3", "[3]", 0, 3)]), 3),
            "whole bytes",
        ),
        (
            file(&header(&[entry("a", "F3_NEW", "[3]", 0, 2)]), 2),
            "do not divide",
        ),
        (
            file(&header(&[entry("a", "", "[4]", 0, 4)]), 4),
            "dtype must be",
        ),
        (file(&header(&[one.clone(), one.clone()]), 4), "twice"),
        (file(&header(&[entry("", "U8", "[4]", 0, 4)]), 4), "empty"),
        (
            file(&header(&[entry(r"a\u0000b", "U8", "[4]", 0, 4)]), 4),
            "control",
        ),
        (
            file(&header(&[entry(&"x".repeat(513), "U8", "[4]", 0, 4)]), 4),
            "513 bytes",
        ),
        (file(r#"{"a":3}"#, 0), "not valid"),
        (file("[]", 0), "begin with '{'"),
        (file("{", 0), "not valid"),
        (file(&"[".repeat(100_000), 0), "begin with '{'"),
        (
            file(&format!(r#"{{"a":{}"#, "[".repeat(100_000)), 0),
            "not valid",
        ),
        (
            file(
                &format!(r#"{{"__metadata__":{}"#, r#"{"a":"#.repeat(100_000)),
                0,
            ),
            "not valid",
        ),
        (vec![0xff; 4096], "over the limit"),
        (
            [&[4, 0, 0, 0, 0, 0, 0, 0][..], &[0xff; 60]].concat(),
            "begin with '{'",
        ),
    ];
    for (content, rule) in cases {
        scene.refused(&content, rule);
    }
    for length in [1 << 63, u64::MAX, u64::MAX - 7, (32 << 20) + 1] {
        let mut content = file(&header(std::slice::from_ref(&one)), 4);
        content[..8].copy_from_slice(&u64::to_le_bytes(length));
        scene.refused(
            &content,
            &format!("header of {length} bytes is over the limit"),
        );
    }
    // seeded noise behind a plausible length
    for seed in 1..=60 {
        let mut content = checkpoint::pattern(seed, 200);
        content[..8].copy_from_slice(&(seed * 3).to_le_bytes());
        scene.refused(&content, "");
    }
}

/// A sparse file of one tensor.
fn sparse(path: &Path, bytes: u64) {
    let header = header(&[entry("w", "U8", &format!("[{bytes}]"), 0, bytes)]);
    let mut made = File::create(path).unwrap();
    made.write_all(&file(&header, 0)).unwrap();
    made.set_len(8 + header.len() as u64 + bytes).unwrap();
}

#[test]
fn a_file_changed_while_it_is_read_is_refused_as_changed() {
    let daemon = Daemon::start(&["--load-threads", "1", "--log", "warn"]).unwrap();
    let scene = Scene::new(&daemon);
    let bytes = 192 << 20;
    let path = scene.daemon.scratch().join("large.safetensors");
    type Change = (&'static str, fn(&File));
    let changes: [Change; 4] = [
        ("truncated", |file| file.set_len(1 << 20).unwrap()),
        ("grown", |file| {
            let end = file.metadata().unwrap().size();
            file.write_all_at(b"more", end).unwrap();
        }),
        ("touched", |file| {
            file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        }),
        ("written", |file| file.write_all_at(b"x", 4096).unwrap()),
    ];
    for (what, change) in changes {
        sparse(&path, bytes);
        let file = File::options().write(true).open(&path).unwrap();
        let mut done = false;
        let outcome = scene
            .client
            .load(&path, "m", &LoadOptions::default(), |step| {
                if !done && step.bytes_done > 0 && step.bytes_done < step.bytes_total {
                    done = true;
                    change(&file);
                }
            });
        assert!(done, "{what}: the load was over too soon");
        let error = outcome.unwrap_err();
        let failure = typed(&error, Kind::CheckpointChanged, "files", "not change").unwrap();
        assert!(failure.retryable && failure.details["value"] == "large.safetensors");
        scene.unchanged();
    }
}

#[test]
fn what_is_no_regular_file_is_refused_before_it_is_opened() {
    let daemon = Daemon::start(&["--log", "warn"]).unwrap();
    let scene = Scene::new(&daemon);
    let at = |name: &str| daemon.scratch().join(name);
    let pipe = at("pipe.safetensors");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let device = at("device.safetensors");
    std::os::unix::fs::symlink("/dev/zero", &device).unwrap();
    let directory = at("directory.safetensors");
    fs::create_dir(&directory).unwrap();
    let none = at("none.safetensors");
    for path in [&pipe, &device, &directory, &none] {
        let begin = std::time::Instant::now();
        let error = load(&scene.client, path).unwrap_err();
        let named = error.to_string().contains(&path.display().to_string());
        assert!(
            named && matches!(error, ClientError::Checkpoint(_)),
            "{error}"
        );
        assert!(begin.elapsed() < Duration::from_secs(5), "{error}");
        scene.unchanged();
    }
    let error = load(&scene.client, &pipe).unwrap_err();
    assert!(matches!(
        error,
        ClientError::Checkpoint(CheckpointError::NotRegular { .. })
    ));
}

fn tensor(name: &str, bytes: usize) -> Tensor {
    Tensor {
        name: name.into(),
        dtype: "U8".into(),
        shape: vec![bytes as u64],
        data: checkpoint::pattern(bytes as u64, bytes),
    }
}

fn model(directory: &Path, mebibytes: usize) -> PathBuf {
    let path = directory.join(format!("{mebibytes}.safetensors"));
    checkpoint::write(&path, &[tensor("w", mebibytes << 20)]).unwrap();
    path
}

/// Case 7: a full shared memory file system is an error with figures, never a bus error.
#[test]
fn a_shared_memory_of_8_mib_refuses_16_with_figures_and_then_takes_4() {
    let Some(shm) = Tmpfs::mount(8).unwrap() else {
        return;
    };
    let flags = ["--log", "warn"];
    let daemon = Daemon::start_with(&binary("flextensord").unwrap(), shm.path(), &flags).unwrap();
    let scene = Scene::new(&daemon);
    let large = model(daemon.scratch(), 16);
    for _ in 0..3 {
        let error = load(&scene.client, &large).unwrap_err();
        let ClientError::Refused(failure) = &error else {
            panic!("{error}")
        };
        assert_eq!(failure.kind, Kind::SharedMemoryFull, "{error}");
        assert_eq!(failure.details["wanted"], (16 << 20).to_string());
        let available: u64 = failure.details["available"].parse().unwrap();
        assert!(available <= 8 << 20, "{available}");
        assert!(failure.details["remedy"].contains("--shm-size"), "{error}");
        assert!(
            error
                .to_string()
                .contains(&shm.path().display().to_string()),
            "{error}"
        );
        scene.unchanged();
    }
    let small = model(daemon.scratch(), 4);
    load(&scene.client, &small).unwrap();
    assert_eq!(fs::read_dir(shm.path()).unwrap().count(), 1);
    // what is left is too little for another, and a set in use is not evicted for it
    let mut manager = scene.client.open(OpenOptions::default()).unwrap();
    let layers = [LayerSpec {
        name: "l".into(),
        tensors: vec!["w".into()],
    }];
    manager
        .register("m", &layers, Budget::Fraction(1.0))
        .unwrap();
    let error = scene
        .client
        .load(
            &model(daemon.scratch(), 5),
            "second",
            &LoadOptions::default(),
            |_| (),
        )
        .unwrap_err();
    assert_eq!(error.kind(), Some(Kind::SharedMemoryFull));
    assert_eq!(fs::read_dir(shm.path()).unwrap().count(), 1);
}

/// Case 7, nastier: two loads at once that fit only one by one.
#[test]
fn two_loads_at_once_that_fit_only_one_by_one_end_with_one_set_and_no_rest() {
    let Some(shm) = Tmpfs::mount(24).unwrap() else {
        return;
    };
    let flags = ["--log", "warn"];
    let daemon = Daemon::start_with(&binary("flextensord").unwrap(), shm.path(), &flags).unwrap();
    let path = model(daemon.scratch(), 14);
    for round in 0..5 {
        let outcomes: Vec<_> = thread::scope(|scope| {
            let one = |name: &'static str| {
                let (daemon, path) = (&daemon, &path);
                scope.spawn(move || {
                    let client = daemon.client().unwrap();
                    client.load(path, name, &LoadOptions::default(), |_| ())
                })
            };
            let threads = [one("a"), one("b")];
            threads.map(|thread| thread.join().unwrap()).into()
        });
        // one that is not in use may be evicted for the other
        for error in outcomes.into_iter().filter_map(Result::err) {
            assert_eq!(error.kind(), Some(Kind::SharedMemoryFull), "{error}");
        }
        let client = daemon.client().unwrap();
        let sets = client.weight_sets().unwrap();
        assert!(sets.len() <= 1, "round {round}: {sets:?}");
        assert_eq!(fs::read_dir(shm.path()).unwrap().count(), sets.len());
        for set in sets {
            client.drop_weight_set(&set.name).unwrap();
        }
        assert_eq!(fs::read_dir(shm.path()).unwrap().count(), 0);
    }
}

/// Case 6: what a killed daemon leaves never fills the file system, and a neighbour whose
/// name begins the same keeps its own.
#[test]
fn ten_kills_leave_room_for_the_next_start_and_the_neighbour_keeps_its_segment() {
    let Some(shm) = Tmpfs::mount(24).unwrap() else {
        return;
    };
    let flextensord = binary("flextensord").unwrap();
    let start = |instance: &str, directory| {
        let flags = ["--log", "warn"];
        Daemon::start_as(
            instance,
            directory,
            shm.path().to_owned(),
            &flextensord,
            &flags,
        )
        .unwrap()
    };
    let neighbour = start("a-b", directory().unwrap());
    let client = neighbour.client().unwrap();
    load(&client, &model(neighbour.scratch(), 4)).unwrap();
    let kept = neighbour.segments();
    assert_eq!(kept.len(), 1);
    let witness = Witness::new(&neighbour).unwrap();
    let mut place = directory().unwrap();
    let pool = model(place.path(), 16);
    for round in 0..10 {
        let daemon = start("a", place);
        // what it was left is there once, and not beside a new one
        let there = fs::read_dir(shm.path()).unwrap().count();
        assert_eq!(there, 1 + usize::from(round > 0), "round {round}");
        load(&daemon.client().unwrap(), &pool).unwrap();
        assert_eq!(fs::read_dir(shm.path()).unwrap().count(), 2);
        (place, _) = daemon.kill().unwrap();
    }
    let mut last = start("a", place);
    assert_eq!(last.status().unwrap().weight_sets.len(), 1);
    last.stop().unwrap();
    assert_eq!(fs::read_dir(shm.path()).unwrap().count(), 1);
    assert_eq!(neighbour.segments(), kept);
    assert!(witness.is_serving().unwrap());
    let right = checkpoint::pattern(4 << 20, 4 << 20);
    let segment = fs::read(shm.path().join(&kept[0])).unwrap();
    assert!(segment == right);
}
