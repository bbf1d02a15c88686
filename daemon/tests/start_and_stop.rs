//! The daemon as a process: starts, refusals, stops.
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use std::{
    fs,
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        process::ExitStatusExt as _,
    },
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tonic::transport::Endpoint;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

/// Long enough for a busy machine; no test waits so long when all is well.
const PATIENCE: Duration = Duration::from_secs(20);

/// A runtime directory with at most one daemon that was started here.
struct Place {
    runtime: tempfile::TempDir,
    daemon: Option<Child>,
}

impl Place {
    fn new() -> Self {
        let runtime = tempfile::tempdir().unwrap();
        let daemon = None;
        Self { runtime, daemon }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.runtime.path().join("default").join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("flextensord.sock")
    }

    fn command(&self, subcommand: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flextensord"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FLEXTENSORD_") {
                command.env_remove(name);
            }
        }
        command.arg(subcommand).arg("--runtime-dir");
        command.arg(self.runtime.path()).stdin(Stdio::null());
        command
    }

    fn serve(&self) -> Command {
        let mut command = self.command("serve");
        command.args(["--device", "cpu"]);
        command
    }

    /// Starts the daemon and waits until it serves.
    fn start(&mut self) {
        self.daemon = Some(self.serve().stderr(Stdio::null()).spawn().unwrap());
        let deadline = Instant::now() + PATIENCE;
        while self.health() != Some(ServingStatus::Serving) {
            assert!(Instant::now() < deadline, "the daemon never served");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn health(&self) -> Option<ServingStatus> {
        let uri = format!("unix://{}", self.socket().display());
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(async {
                let channel = Endpoint::try_from(uri).ok()?.connect().await.ok()?;
                let request = HealthCheckRequest::default();
                let answer = HealthClient::new(channel).check(request).await.ok()?;
                Some(answer.into_inner().status())
            })
    }

    fn signal(&mut self, signal: Signal) -> std::process::ExitStatus {
        let mut daemon = self.daemon.take().unwrap();
        let pid = i32::try_from(daemon.id()).unwrap();
        kill(Pid::from_raw(pid), signal).unwrap();
        daemon.wait().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.kill().unwrap();
            daemon.wait().unwrap();
        }
    }
}

/// Runs a command that must end by itself: its status and what it complained.
fn end(command: &mut Command) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = command.output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

#[test]
fn a_second_daemon_exits_73_naming_the_first_which_still_answers() {
    let mut place = Place::new();
    place.start();
    let pid = format!("process {}", place.daemon.as_ref().unwrap().id());
    for lock_removed in [false, true] {
        if lock_removed {
            fs::remove_file(place.path("lock")).unwrap();
        }
        let (code, text) = end(&mut place.serve());
        assert_eq!(code, Some(73), "{text}");
        assert!(text.contains(&pid), "{text}");
        assert_eq!(place.health(), Some(ServingStatus::Serving));
    }
}

#[test]
fn sigterm_sigint_and_sighup_end_it_with_0_and_leave_no_socket() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut place = Place::new();
        place.start();
        for name in ["flextensord.sock", "fd.sock"] {
            let metadata = fs::metadata(place.path(name)).unwrap();
            assert!(metadata.file_type().is_socket());
            assert_eq!(metadata.permissions().mode() & 0o777, 0o660);
        }
        let status = place.signal(signal);
        assert_eq!(status.code(), Some(0));
        assert!(!place.socket().exists() && !place.path("fd.sock").exists());
        assert!(place.path("lock").exists());
    }
}

#[test]
fn a_client_that_watches_health_cannot_hold_up_a_stop() {
    let mut place = Place::new();
    place.start();
    let uri = format!("unix://{}", place.socket().display());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut watch = runtime.block_on(async {
        let channel = Endpoint::try_from(uri).unwrap().connect().await.unwrap();
        let request = HealthCheckRequest::default();
        let watch = HealthClient::new(channel).watch(request).await.unwrap();
        watch.into_inner()
    });
    let first = runtime.block_on(watch.message()).unwrap().unwrap();
    assert_eq!(first.status(), ServingStatus::Serving);
    assert_eq!(place.signal(Signal::SIGTERM).code(), Some(0));
    let last = runtime.block_on(watch.message()).unwrap().unwrap();
    assert_eq!(last.status(), ServingStatus::NotServing);
}

#[test]
fn sockets_of_a_killed_daemon_are_taken_over() {
    let mut place = Place::new();
    for _ in 0..3 {
        place.start();
        assert_eq!(place.signal(Signal::SIGKILL).signal(), Some(9));
        assert!(place.socket().exists());
    }
    place.start();
    let generation = fs::read_to_string(place.path("state/generation")).unwrap();
    assert_eq!(generation, "4\n");
}

#[test]
fn a_file_in_the_place_of_a_socket_is_named_and_left_alone() {
    for name in ["flextensord.sock", "fd.sock"] {
        let place = Place::new();
        fs::create_dir(place.runtime.path().join("default")).unwrap();
        fs::write(place.path(name), b"precious").unwrap();
        let (code, text) = end(&mut place.serve());
        assert_eq!(code, Some(78), "{text}");
        assert!(text.contains(name) && text.contains("is a file"), "{text}");
        assert_eq!(fs::read(place.path(name)).unwrap(), b"precious");
    }
}

#[test]
fn a_wrong_configuration_exits_78_naming_the_key_before_anything_is_made() {
    let place = Place::new();
    let file = place.runtime.path().join("f.toml");
    fs::write(&file, "device = 'cpu'\nmax_managres = 3\n").unwrap();
    let long = "r".repeat(120);
    let file = file.to_str().unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&[], "device is not set"),
        (&["--device", "gpu"], "must be cpu, cuda for all GPUs"),
        (
            &["--device", "cpu", "--cpu-devices", "33"],
            "cpu_devices = \"33\" (flag --cpu-devices)",
        ),
        (
            &["--config", file],
            "line 2: unknown key \"max_managres\"; did you mean max_managers?",
        ),
        (
            &["--device", "cpu", "--instance", &long],
            "over the limit of 107",
        ),
    ];
    for (arguments, message) in cases {
        for subcommand in ["serve", "check-config"] {
            let (code, text) = end(place.command(subcommand).args(arguments));
            assert_eq!(code, Some(78), "{text}");
            assert!(text.contains(message), "{text:?} lacks {message:?}");
        }
    }
    let unknown = end(place.serve().env("FLEXTENSORD_DEVICES", "cpu"));
    assert_eq!(unknown.0, Some(78));
    assert!(unknown.1.contains("FLEXTENSORD_DEVICE?"), "{}", unknown.1);
    assert!(!place.runtime.path().join("default").exists());
}

#[test]
fn a_directory_that_others_can_write_exits_77() {
    let place = Place::new();
    let open = fs::Permissions::from_mode(0o777);
    fs::set_permissions(place.runtime.path(), open).unwrap();
    let (code, text) = end(&mut place.serve());
    assert_eq!(code, Some(77), "{text}");
    assert!(text.contains("can be written by others"), "{text}");
}

#[test]
fn a_wrong_command_line_exits_64_and_help_and_version_0() {
    for arguments in [&["--no-such-flag"][..], &["serve", "x"], &["sevre"], &[]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flextensord"));
        let (code, text) = end(command.args(arguments));
        assert_eq!(code, Some(64), "{text}");
        assert!(!text.is_empty());
    }
    for arguments in [&["--version"][..], &["--help"], &["serve", "--help"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flextensord"));
        let output = command.args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(!output.stdout.is_empty());
    }
}

#[test]
fn the_effective_configuration_names_each_origin() {
    let place = Place::new();
    let mut command = place.command("check-config");
    command.env("FLEXTENSORD_DEVICE", "cpu").arg("--json");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["device"]["origin"], "environment FLEXTENSORD_DEVICE");
    assert_eq!(json["runtime_dir"]["origin"], "flag --runtime-dir");
    assert_eq!(json["cpu_memory"]["value"], "1GiB");
}

#[test]
fn doctor_sees_a_daemon_come_and_die() {
    let mut place = Place::new();
    let daemon = |place: &Place| {
        let output = place.command("doctor").arg("--json").output().unwrap();
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let checks = json["checks"].as_array().unwrap().clone();
        let of_daemon = checks.into_iter().find(|check| check["name"] == "daemon");
        of_daemon.unwrap()["found"].as_str().unwrap().to_owned()
    };
    assert!(daemon(&place).contains("none serves"));
    place.start();
    let pid = place.daemon.as_ref().unwrap().id();
    assert!(daemon(&place).contains(&format!("process {pid}")));
    place.signal(Signal::SIGKILL);
    assert!(daemon(&place).contains("is left from a daemon that died"));
}
