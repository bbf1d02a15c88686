//! Bad requests and bad starts: a typed refusal that names field, value and rule, nothing
//! changed, nothing left behind, the daemon serving. Through the client library; what
//! that cannot send is in `tests/python/test_hostile_requests.py`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use flextensord_client::{
    Budget, ClientError, LayerSpec, LoadOptions, OpenOptions,
    blocking::{Client, Manager},
    kind::Kind,
    upload::{Source, UploadTensor},
};
use flextensord_tests::{
    checkpoint,
    daemon::Daemon,
    process::binary,
    witness::{Witness, typed},
};

/// A daemon with a model of four layers of two tensors, as the set "model".
fn setting() -> (Daemon, PathBuf) {
    let daemon = Daemon::start(&[]).unwrap();
    let path = daemon.scratch().join("model.safetensors");
    checkpoint::write(&path, &checkpoint::layered(4, 2, 300_000)).unwrap();
    let client = daemon.client().unwrap();
    client
        .load(&path, "model", &LoadOptions::default(), |_| ())
        .unwrap();
    (daemon, path)
}

/// A client whose descriptor channel is open: it stays so, whatever is refused.
fn channelled(daemon: &Daemon, path: &Path) -> Client {
    let client = daemon.client().unwrap();
    let again = client.load(path, "model", &LoadOptions::default(), |_| ());
    assert!(again.unwrap().attached);
    client
}

fn named(name: &str) -> OpenOptions {
    OpenOptions {
        name: name.into(),
        ..OpenOptions::default()
    }
}

fn layer(name: &str, tensors: &[&str]) -> LayerSpec {
    LayerSpec {
        name: name.into(),
        tensors: tensors.iter().map(|&name| name.into()).collect(),
    }
}

/// Names that no manager, weight set or instance may have, with the rule each breaks.
fn bad_names() -> Vec<(String, &'static str)> {
    vec![
        ("a/b".into(), "contains '/'"),
        ("/".into(), "contains '/'"),
        ("a\0b".into(), "contains '\\0'"),
        ("..".into(), "starts with '.'"),
        (".hidden".into(), "starts with '.'"),
        ("../../etc/passwd".into(), "contains '/'"),
        ("a b".into(), "contains ' '"),
        ("ä".into(), "contains 'ä'"),
        ("x".repeat(129), "over the limit of 128"),
        ("x".repeat(100_000), "over the limit of 128"),
    ]
}

#[test]
fn bad_names_of_managers_and_weight_sets_are_refused_by_their_rule() {
    let (daemon, path) = setting();
    let client = channelled(&daemon, &path);
    let witness = Witness::new(&daemon).unwrap();
    let before = witness.snapshot().unwrap();
    let upload = UploadTensor {
        name: "w".into(),
        dtype: "U8".into(),
        shape: vec![3],
        stride: Vec::new(),
        source: Source::Bytes(b"abc"),
    };
    for (name, rule) in bad_names() {
        let load = client.load(&path, &name, &LoadOptions::default(), |_| ());
        let refusals = [
            client.open(named(&name)).map(drop).unwrap_err(),
            load.unwrap_err(),
            client
                .put(
                    &name,
                    std::slice::from_ref(&upload),
                    &LoadOptions::default(),
                )
                .unwrap_err(),
            client.weight_set(&name).unwrap_err(),
            client.drop_weight_set(&name).unwrap_err(),
        ];
        for error in refusals {
            let failure = typed(&error, Kind::InvalidArgument, "name", rule).unwrap();
            assert!(failure.message.len() < 500, "{}", failure.message);
            witness.unchanged(&before).unwrap();
        }
    }
    // where a name is not optional, an empty one is none
    for error in [
        client.weight_set("").unwrap_err(),
        client.drop_weight_set("").unwrap_err(),
    ] {
        typed(&error, Kind::InvalidArgument, "name", "empty").unwrap();
    }
    witness.unchanged(&before).unwrap();
}

#[test]
fn unknown_sets_managers_tensors_and_devices_are_not_found_by_name() {
    let (daemon, _) = setting();
    let client = daemon.client().unwrap();
    let mut manager = client.open(named("m")).unwrap();
    let witness = Witness::new(&daemon).unwrap();
    let before = witness.snapshot().unwrap();
    let device = OpenOptions {
        device: "cuda:9".into(),
        ..OpenOptions::default()
    };
    let known = [layer("l", &["layers.0.0"])];
    let unknown = [layer("l", &["layers.0.0", "layers.9.9"])];
    let budget = Budget::Fraction(0.5);
    for (error, field, value) in [
        (client.weight_set("nosuch").unwrap_err(), "name", "nosuch"),
        (
            client.drop_weight_set("nosuch").unwrap_err(),
            "name",
            "nosuch",
        ),
        (
            client.terminate("nobody", None).unwrap_err(),
            "name",
            "nobody",
        ),
        (client.terminate("m", Some(4711)).unwrap_err(), "name", "m"),
        (
            client.dump(Some("nobody")).unwrap_err(),
            "manager",
            "nobody",
        ),
        (
            client.open(device).map(drop).unwrap_err(),
            "device",
            "cuda:9",
        ),
        (
            manager.register("nosuch", &known, budget).unwrap_err(),
            "weight_set",
            "nosuch",
        ),
        (
            manager.register("model", &unknown, budget).unwrap_err(),
            "layers.tensors",
            "layers.9.9",
        ),
    ] {
        let failure = typed(&error, Kind::NotFound, field, "").unwrap();
        assert_eq!(failure.details["value"], value);
        assert!(failure.message.contains(value), "{}", failure.message);
        witness.unchanged(&before).unwrap();
    }
    // the manager is as good as before
    manager.register("model", &known, budget).unwrap();
}

#[test]
fn registrations_that_break_a_rule_leave_the_manager_free_to_try_again() {
    let (daemon, _) = setting();
    let client = daemon.client().unwrap();
    let mut manager = client.open(named("m")).unwrap();
    let witness = Witness::new(&daemon).unwrap();
    let before = witness.snapshot().unwrap();
    let half = Budget::Fraction(0.5);
    let good = vec![layer("l", &["layers.0.0"])];
    let long = "x".repeat(513);
    let cases: Vec<(Vec<LayerSpec>, Budget, &str, &str)> = vec![
        (vec![], half, "layers", "at least one"),
        (vec![layer("", &[])], half, "layers.name", "empty"),
        (
            vec![layer("a\0b", &[])],
            half,
            "layers.name",
            "control character",
        ),
        (
            vec![layer(&long, &[])],
            half,
            "layers.name",
            "over the limit of 512",
        ),
        (
            vec![layer("l", &["layers.0.0"]), layer("hollow", &[])],
            half,
            "layers.tensors",
            "at least one tensor",
        ),
        (
            vec![layer("l", &["layers.0.0"]), layer("l", &["layers.0.0"])],
            half,
            "layers.name",
            "unique",
        ),
        (good.clone(), Budget::Bytes(0), "budget_bytes", "over 0"),
        (
            good.clone(),
            Budget::Fraction(0.0),
            "memory_fraction",
            "over 0",
        ),
        (
            good.clone(),
            Budget::Fraction(-1.0),
            "memory_fraction",
            "over 0",
        ),
        (
            good.clone(),
            Budget::Fraction(1.5),
            "memory_fraction",
            "up to 1",
        ),
        (
            good.clone(),
            Budget::Fraction(f64::NAN),
            "memory_fraction",
            "over 0",
        ),
        (
            good.clone(),
            Budget::Fraction(f64::INFINITY),
            "memory_fraction",
            "up to 1",
        ),
    ];
    for (layers, budget, field, rule) in cases {
        let error = manager.register("model", &layers, budget).unwrap_err();
        typed(&error, Kind::InvalidArgument, field, rule).unwrap();
        witness.unchanged(&before).unwrap();
    }
    for (name, rule) in bad_names() {
        let error = manager.register(&name, &good, half).unwrap_err();
        typed(&error, Kind::InvalidArgument, "weight_set", rule).unwrap();
    }
    witness.unchanged(&before).unwrap();
    manager.register("model", &good, half).unwrap();
    let again = manager.register("model", &good, half).unwrap_err();
    assert!(
        again.kind() == Some(Kind::FailedPrecondition) || matches!(again, ClientError::State(_)),
        "{again}"
    );
}

#[test]
fn a_layer_too_large_for_one_answer_is_refused_at_its_registration() {
    let daemon = Daemon::start(&[]).unwrap();
    let client = daemon.client().unwrap();
    let tensors: Vec<UploadTensor<'_>> = (0..9100)
        .map(|number| UploadTensor {
            name: format!("{number}.{}", "x".repeat(440)),
            dtype: "U8".into(),
            shape: vec![1],
            stride: Vec::new(),
            source: Source::Bytes(b"a"),
        })
        .collect();
    client
        .put("wide", &tensors, &LoadOptions::default())
        .unwrap();
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    let mut manager = client.open(named("m")).unwrap();
    let witness = Witness::new(&daemon).unwrap();
    let before = witness.snapshot().unwrap();
    let whole = [layer("all", &names)];
    let budget = Budget::Fraction(0.5);
    let error = manager.register("wide", &whole, budget).unwrap_err();
    typed(
        &error,
        Kind::InvalidArgument,
        "layers.tensors",
        "smaller layers",
    )
    .unwrap();
    witness.unchanged(&before).unwrap();
    // of those that fit, nearly the largest
    let (one, two) = names.split_at(8_700);
    let halves = [layer("one", one), layer("two", two)];
    manager.register("wide", &halves, budget).unwrap();
    hold_by_rpc(&manager, "one", one.len());
}

fn hold_by_rpc(manager: &Manager, layer: &str, tensors: usize) {
    let hold = manager.acquire_rpc(manager.layer(layer).unwrap()).unwrap();
    assert_eq!(hold.tensors().count(), tensors);
    manager.release_rpc(hold).unwrap();
}

#[test]
fn a_second_owner_is_told_of_the_first_who_goes_on() {
    let (daemon, path) = setting();
    let client = daemon.client().unwrap();
    let mut first = client.open(named("m")).unwrap();
    first
        .register(
            "model",
            &[layer("l", &["layers.0.0"])],
            Budget::Bytes(400_000),
        )
        .unwrap();
    let second = channelled(&daemon, &path);
    let witness = Witness::new(&daemon).unwrap();
    let before = witness.snapshot().unwrap();
    let error = second.open(named("m")).map(drop).unwrap_err();
    let ClientError::Refused(failure) = &error else {
        panic!("{error}")
    };
    assert_eq!(failure.kind, Kind::ManagerTaken);
    assert_eq!(failure.details["name"], "m");
    assert_eq!(
        failure.details["holder_pid"],
        std::process::id().to_string()
    );
    witness.unchanged(&before).unwrap();
    hold_by_rpc(&first, "l", 1);
    // the set that it is attached to stays
    let error = second.drop_weight_set("model").unwrap_err();
    assert_eq!(error.kind(), Some(Kind::InUse));
    witness.unchanged(&before).unwrap();
}

#[test]
fn another_user_may_not_drop_terminate_drain_or_even_connect() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: needs root to become another user");
        return;
    }
    let (daemon, path) = setting();
    let client = daemon.client().unwrap();
    let share = LoadOptions {
        share: true,
        ..LoadOptions::default()
    };
    client.load(&path, "shared", &share, |_| ()).unwrap();
    let _manager = client.open(named("m")).unwrap();
    let witness = Witness::new(&daemon).unwrap();
    let before = witness.snapshot().unwrap();
    // the socket is for its owner and group
    assert_eq!(as_nobody(&daemon, &["status"]).status.code(), Some(77));
    witness.unchanged(&before).unwrap();
    daemon.open_to_all().unwrap();
    for (arguments, exit, text) in [
        (&["drop", "model"][..], 70, "no weight set \"model\""),
        (&["drop", "shared"], 77, "belongs to another user"),
        (&["terminate", "m"], 70, "no manager \"m\""),
        (
            &["terminate", "m", "--uid", "0"],
            77,
            "another user's manager",
        ),
        (&["drain"], 77, "may not drain"),
        (&["layers", "m"], 70, "no manager \"m\""),
    ] {
        let output = as_nobody(&daemon, arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(text), "{arguments:?}: {said}");
        assert_ne!(output.status.code(), Some(0), "{arguments:?}");
        if exit == 77 {
            assert_eq!(output.status.code(), Some(exit), "{arguments:?}: {said}");
        }
        witness.unchanged(&before).unwrap();
    }
    let listed = as_nobody(&daemon, &["--json", "managers"]);
    assert!(!String::from_utf8_lossy(&listed.stdout).contains("\"m\""));
    // a name is each user's own: the other may have it too
    let theirs = as_nobody(&daemon, &["load", "model", "/nonexistent.safetensors"]);
    assert_ne!(theirs.status.code(), Some(0));
    // a file that the caller may not read is not read for it
    let secret = daemon.scratch().join("secret.safetensors");
    fs::copy(&path, &secret).unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let refused = as_nobody(&daemon, &["load", "stolen", &secret.display().to_string()]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("Permission denied"), "{said}");
    witness.unchanged(&before).unwrap();
}

/// `flextensorctl` as another user; the binary lies where that user can reach it.
fn as_nobody(daemon: &Daemon, arguments: &[&str]) -> Output {
    let ctl = daemon.scratch().join("flextensorctl");
    if !ctl.exists() {
        fs::copy(binary("flextensorctl").unwrap(), &ctl).unwrap();
    }
    let mut command = daemon.ctl_of(&ctl, arguments);
    command.uid(65_534).gid(65_534).output().unwrap()
}

fn serve(runtime: &Path, instance: &str) -> Output {
    Command::new(binary("flextensord").unwrap())
        .args(["serve", "--device", "cpu", "--instance", instance])
        .arg("--runtime-dir")
        .arg(runtime)
        .output()
        .unwrap()
}

#[test]
fn a_second_daemon_of_an_instance_exits_73_and_the_first_is_as_before() {
    let (daemon, _) = setting();
    let witness = Witness::new(&daemon).unwrap();
    let before = witness.snapshot().unwrap();
    let instance = daemon.instance_dir();
    let name = instance.file_name().unwrap().to_str().unwrap();
    let output = serve(&daemon.runtime_dir(), name);
    assert_eq!(output.status.code(), Some(73));
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    assert!(said.contains(&daemon.pid().to_string()), "{said}");
    witness.unchanged(&before).unwrap();
}

#[test]
fn a_start_with_a_bad_instance_or_a_socket_path_too_long_exits_78_and_makes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = directory.path().join("run");
    let expect = |runtime: &Path, instance: &str, texts: &[&str]| {
        let output = serve(runtime, instance);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(78), "{instance:?}: {said}");
        for text in texts {
            assert!(said.contains(text), "{instance:?}: {text:?} in {said}");
        }
        assert!(!runtime.exists(), "{instance:?}");
    };
    let long = "x".repeat(129);
    for (instance, rule) in [
        ("", "empty"),
        ("a/b", "'/'"),
        ("..", "starts with '.'"),
        (".x", "starts with '.'"),
        (&long, "129 bytes"),
    ] {
        expect(&runtime, instance, &["instance", rule]);
    }
    let deep = runtime.join("d".repeat(100));
    expect(&deep, "default", &["107", "runtime_dir"]);
    // to the byte: RUNTIME/i/flextensord.sock
    let fixed = runtime.as_os_str().len() + "/".len() + "/i/flextensord.sock".len();
    expect(&runtime.join("d".repeat(108 - fixed)), "i", &["107", "108"]);
    assert!(!directory.path().join("run").exists());
    let fits = Daemon::start(&[]).unwrap();
    drop::<Client>(fits.client().unwrap());
}
