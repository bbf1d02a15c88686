use std::{collections::BTreeMap, path::Path, time::Duration};

use flextensord_device::cuda::{driver::Ordinal, error::CudaError, gpu::Gpu};

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
    gpus: GpuFacts,
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
                shmem_enabled: Some("always within_size advise [never] deny force".into()),
            },
            kernel: KernelFacts {
                release: "6.18.0".into(),
                proc: Ok(()),
                pidfd: Ok(()),
                peer_pidfd: Ok(()),
                seals: Ok(()),
                lease: Ok(()),
            },
            gpus: GpuFacts {
                asked: true,
                driver: Ok(DriverFacts {
                    version: 13_010,
                    module: Some("590.1".into()),
                    gpus: Ok(vec![Ok(sound_gpu())]),
                }),
                visible: None,
                mps: None,
                nodes: Some(2),
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
    fn gpus(&self) -> GpuFacts {
        self.gpus.clone()
    }
    fn login(&self) -> LoginFacts {
        self.login
    }
}

fn sound_gpu() -> OneGpu {
    OneGpu {
        gpu: Gpu {
            ordinal: Ordinal(0),
            name: "NVIDIA H200".into(),
            uuid: "GPU-0".into(),
            total_bytes: 140 << 30,
            numa_node: Some(1),
        },
        compute_mode: Some(0),
        bus: Some("PCIe 32.0 GT/s x16 of 32.0 GT/s x16".into()),
        trial: Trial::Passed {
            took: Duration::from_millis(400),
            link: Ok(Link {
                rate: 55_250_000_000,
                copies: 500,
            }),
        },
    }
}

/// A machine with a driver whose one GPU was changed.
fn with_gpu(change: impl FnOnce(&mut OneGpu)) -> Fixture {
    Fixture::with(|fixture| {
        let driver = fixture.gpus.driver.as_mut().unwrap();
        change(driver.gpus.as_mut().unwrap()[0].as_mut().unwrap());
    })
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

#[test]
fn a_gpu_is_told_with_its_node_its_link_and_how_it_is_attached() {
    let text = examine(&Fixture::sound()).text();
    for part in [
        "speaks CUDA 13.1, kernel module 590.1",
        "cuda:0 NVIDIA H200 GPU-0, 140.0 GiB, NUMA node 1",
        "55.25 GB/s",
        "PCIe 32.0 GT/s x16",
        "2 nodes, cuda:0 at node 1",
        "shmem_enabled is never",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("MIG"));
    let mig = with_gpu(|one| one.gpu.name = "NVIDIA H200 MIG 1g.18gb".into());
    assert!(examine(&mig).text().contains("a MIG device"));
}

#[test]
fn a_slow_link_and_a_trial_that_hangs_are_told() {
    let slow = complaint(&with_gpu(|one| {
        one.trial = Trial::Passed {
            took: Duration::ZERO,
            link: Ok(Link {
                rate: 4_990_000_000,
                copies: 40,
            }),
        };
    }));
    assert_eq!((slow.name, slow.verdict), ("GPU link", Verdict::Warn));
    assert!(slow.found.contains("4.99 GB/s"), "{slow:?}");
    let hung = complaint(&with_gpu(|one| {
        one.trial = Trial::Hung(Duration::from_secs(30));
    }));
    assert_eq!((hung.name, hung.verdict), ("GPU self-test", Verdict::Fail));
    assert!(hung.found.contains("30 s"), "{hung:?}");
}

#[test]
fn a_driver_that_cannot_be_used_says_what_it_lacks_and_what_helps() {
    let trouble = |error| {
        complaint(&Fixture::with(|f| {
            f.gpus.driver = Err(DriverTrouble::Refused(error));
        }))
    };
    let old = trouble(CudaError::MissingSymbol {
        symbols: vec!["cuMemCreate", "cuStreamBatchMemOp_v2"],
    });
    assert!(old.found.contains("cuMemCreate, cuStreamBatchMemOp_v2"));
    assert!(old.remedy.contains("newer"), "{old:?}");
    for (code, remedy) in [
        (100, "CUDA_VISIBLE_DEVICES"),
        (802, "nvidia-fabricmanager"),
        (803, "reboot"),
        (999, "nvidia-smi"),
    ] {
        let check = trouble(CudaError::Call {
            call: "cuInit",
            code,
        });
        assert_eq!(check.verdict, Verdict::Fail);
        assert!(check.remedy.contains(remedy), "{check:?}");
    }
    let hung = complaint(&Fixture::with(|f| {
        f.gpus.asked = false;
        f.gpus.driver = Err(DriverTrouble::Hung(Duration::from_secs(20)));
    }));
    assert_eq!(hung.verdict, Verdict::Warn);
}
