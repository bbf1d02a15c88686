use std::{collections::BTreeMap, path::Path};

use super::{memory::tightest_group, probe::*, *};
use crate::lifecycle::{Exit, socket::Occupant};

/// A machine without fault, to be changed.
#[derive(Clone)]
struct Fixture {
    instance: InstanceFacts,
    shared_memory: SharedMemoryFacts,
    limits: LimitFacts,
    memory: MemoryFacts,
    kernel: KernelFacts,
    login: LoginFacts,
}

impl Fixture {
    fn sound() -> Self {
        Self {
            instance: InstanceFacts {
                name: "default".into(),
                directory: "/run/flextensord/default".into(),
                objection: None,
                exists: true,
                grpc: (
                    "/run/f.sock".into(),
                    Ok(Occupant::Listener { pid: Some(7) }),
                ),
                channel: ("/run/fd.sock".into(), Ok(Occupant::Listener { pid: None })),
                version: Some("1.2.3".into()),
                own_version: "1.2.3",
            },
            shared_memory: SharedMemoryFacts {
                directory: "/dev/shm".into(),
                mount: Ok(MountFacts {
                    kind: "tmpfs".into(),
                    point: "/dev/shm".into(),
                    total: 8 << 30,
                    free: 4 << 30,
                    mode: 0o1777,
                }),
                segment_failure: None,
            },
            limits: LimitFacts {
                memlock: u64::MAX,
                descriptors: (1 << 20, 1 << 20),
                max_managers: 1024,
            },
            memory: MemoryFacts {
                machine: Ok((32 << 30, 64 << 30)),
                group: None,
                configured: None,
            },
            kernel: KernelFacts {
                release: "6.18.0".into(),
                proc: Ok(()),
                pidfd: Ok(()),
                peer_pidfd: Ok(()),
                seals: Ok(()),
                lease: Ok(()),
            },
            login: LoginFacts {
                uid: 0,
                last_system_uid: 999,
                managed: true,
                removes: true,
                lingers: false,
            },
        }
    }

    fn with(change: impl FnOnce(&mut Self)) -> Self {
        let mut fixture = Self::sound();
        change(&mut fixture);
        fixture
    }
}

impl Probe for Fixture {
    fn instance(&self) -> InstanceFacts {
        self.instance.clone()
    }
    fn shared_memory(&self) -> SharedMemoryFacts {
        self.shared_memory.clone()
    }
    fn limits(&self) -> LimitFacts {
        self.limits
    }
    fn memory(&self) -> MemoryFacts {
        self.memory.clone()
    }
    fn kernel(&self) -> KernelFacts {
        self.kernel.clone()
    }
    fn login(&self) -> LoginFacts {
        self.login
    }
}

/// The one check that is not ok.
fn complaint(fixture: &Fixture) -> Check {
    let mut bad: Vec<Check> = examine(fixture).0;
    bad.retain(|check| check.verdict != Verdict::Ok);
    assert_eq!(bad.len(), 1, "{bad:#?}");
    bad.remove(0)
}

#[test]
fn a_sound_machine_has_no_complaint_and_exits_0() {
    let report = examine(&Fixture::sound());
    assert_eq!(report.verdict(), Verdict::Ok, "{}", report.text());
    assert_eq!(report.exit(), Exit::Ok);
    assert!(
        report
            .text()
            .contains("version 1.2.3 serves /run/f.sock, process 7")
    );
    assert!(report.0.iter().all(|check| check.remedy.is_empty()));
}

#[test]
fn a_machine_without_a_daemon_is_sound_too() {
    let report = examine(&Fixture::with(|f| {
        f.instance.grpc.1 = Ok(Occupant::Nobody);
        f.instance.channel.1 = Ok(Occupant::Nobody);
        f.instance.exists = false;
    }));
    assert_eq!(report.verdict(), Verdict::Ok, "{}", report.text());
    assert!(report.text().contains("none serves instance default"));
}

#[test]
fn a_low_memlock_limit_warns_with_both_remedies_and_does_not_fail() {
    let fixture = Fixture::with(|f| f.limits.memlock = 8 << 20);
    let check = complaint(&fixture);
    assert_eq!(check.verdict, Verdict::Warn);
    assert!(check.remedy.contains("LimitMEMLOCK=infinity"));
    assert!(check.remedy.contains("--ulimit memlock=-1"));
    assert_eq!(examine(&fixture).exit(), Exit::Ok);
}

#[test]
fn each_fault_is_found_by_itself_with_a_remedy() {
    use Verdict::{Fail, Warn};
    type Change = fn(&mut Fixture);
    let cases: [(&str, Verdict, Change); 17] = [
        ("runtime directory", Fail, |f| {
            f.instance.objection = Some("x".into())
        }),
        ("daemon", Warn, |f| {
            f.instance.version = Some("1.2.2".into())
        }),
        ("daemon", Warn, |f| f.instance.version = None),
        ("daemon", Fail, |f| {
            f.instance.grpc.1 = Ok(Occupant::Other("a file"))
        }),
        ("daemon", Warn, |f| f.instance.grpc.1 = Ok(Occupant::Stale)),
        ("daemon", Fail, |f| f.instance.grpc.1 = Err("denied".into())),
        ("descriptor channel", Fail, |f| {
            f.instance.channel.1 = Ok(Occupant::Nobody)
        }),
        ("shared memory", Fail, |f| {
            f.shared_memory.mount = Err("gone".into())
        }),
        ("segment", Fail, |f| {
            f.shared_memory.segment_failure = Some("x".into())
        }),
        ("open files", Warn, |f| {
            f.limits.descriptors = (1024, 1 << 20)
        }),
        ("host memory", Warn, |f| {
            f.memory.configured = Some(48 << 30)
        }),
        ("host memory", Warn, |f| f.memory.machine = Err("x".into())),
        ("/proc", Fail, |f| f.kernel.proc = Err("x".into())),
        ("process references", Fail, |f| {
            f.kernel.pidfd = Err("x".into())
        }),
        ("peer process", Warn, |f| {
            f.kernel.peer_pidfd = Err("x".into())
        }),
        ("sealed memory", Fail, |f| f.kernel.seals = Err("x".into())),
        ("log out", Warn, |f| f.login.uid = 1000),
    ];
    for (name, verdict, change) in cases {
        let fixture = Fixture::with(change);
        let check = complaint(&fixture);
        assert_eq!((check.name, check.verdict), (name, verdict), "{check:?}");
        assert!(!check.remedy.is_empty(), "{check:?}");
        let exit = if verdict == Fail {
            Exit::Unavailable
        } else {
            Exit::Ok
        };
        assert_eq!(examine(&fixture).exit(), exit);
    }
}

#[test]
fn shared_memory_is_judged_by_kind_size_and_mode() {
    let mount = |change: fn(&mut MountFacts)| {
        complaint(&Fixture::with(|f| {
            change(f.shared_memory.mount.as_mut().unwrap())
        }))
    };
    assert_eq!(
        mount(|m| m.kind = "file system 0xef53".into()).verdict,
        Verdict::Fail
    );
    assert_eq!(mount(|m| m.mode = 0o777).verdict, Verdict::Fail);
    let small = mount(|m| m.total = 64 << 20);
    assert_eq!(small.verdict, Verdict::Warn);
    assert!(small.remedy.contains("--shm-size"));
}

#[test]
fn shared_memory_stays_when_nobody_removes_it() {
    let changes: [fn(&mut LoginFacts); 3] = [
        |l| l.managed = false,
        |l| l.removes = false,
        |l| l.lingers = true,
    ];
    for change in changes {
        let report = examine(&Fixture::with(|f| {
            f.login.uid = 1000;
            change(&mut f.login);
        }));
        assert_eq!(report.verdict(), Verdict::Ok);
    }
}

#[test]
fn json_has_every_check_with_its_verdict() {
    let json = examine(&Fixture::with(|f| f.login.uid = 1000)).json();
    assert_eq!(json["verdict"], "warn");
    let checks = json["checks"].as_array().unwrap();
    let last = checks.last().unwrap();
    assert_eq!(
        (&last["name"], &last["verdict"]),
        (&"log out".into(), &"warn".into())
    );
    assert!(last["remedy"].as_str().unwrap().contains("RemoveIPC=no"));
}

#[test]
fn the_tightest_group_on_the_way_up_is_the_limit() {
    let files: BTreeMap<&str, &str> = [
        ("/c/a/b/memory.max", "max\n"),
        ("/c/a/memory.max", "1000\n"),
        ("/c/a/memory.current", "100\n"),
        ("/c/memory.max", "5000\n"),
        (
            "/c/memory/v1/memory.limit_in_bytes",
            "9223372036854771712\n",
        ),
        ("/c/memory/memory.limit_in_bytes", "800\n"),
        ("/c/memory/memory.usage_in_bytes", "300\n"),
    ]
    .into();
    let read = |path: &Path| files.get(path.to_str()?).map(|text| (*text).to_owned());
    let group = |groups: &str| tightest_group(groups, Path::new("/c"), &read);
    let two = group("0::/a/b\n").unwrap();
    assert_eq!(
        (two.path.as_path(), two.limit, two.used),
        (Path::new("/c/a"), 1000, 100)
    );
    let one = group("4:cpu:/x\n7:memory,x:/v1\n").unwrap();
    assert_eq!((one.limit, one.used), (800, 300));
    assert_eq!(group("0::/../..\n").unwrap().limit, 5000);
    assert_eq!(group("4:cpu:/x\nnonsense\n"), None);
    assert_eq!(tightest_group("0::/\n", Path::new("/none"), &read), None);
}
