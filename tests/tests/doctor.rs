//! What `flextensord doctor` says of GPUs, over a driver in host memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{fs, process::Command};

use flextensord_tests::{
    daemon::{FAKE_DRIVER, directory},
    process::binary,
};
use serde_json::Value;

const FIT: &str = "gpus=1,memory=256MiB";

/// What doctor says, and how it exits.
struct Said {
    checks: Vec<Value>,
    code: i32,
}

impl Said {
    /// The checks of that name: verdict, what was found, what to change.
    fn of(&self, name: &str) -> Vec<[&str; 3]> {
        let named = self.checks.iter().filter(|check| check["name"] == name);
        named
            .map(|check| ["verdict", "found", "remedy"].map(|key| check[key].as_str().unwrap()))
            .collect()
    }

    fn one(&self, name: &str) -> [&str; 3] {
        let found = self.of(name);
        assert_eq!(found.len(), 1, "{name}: {:#?}", self.checks);
        found[0]
    }
}

fn doctor(program: &str, driver: &str, flags: &[&str], environment: &[(&str, &str)]) -> Said {
    let scratch = directory().unwrap();
    let output = Command::new(binary(program).unwrap())
        .args(["doctor", "--json", "--runtime-dir"])
        .arg(scratch.path().join("run"))
        .arg("--shm-dir")
        .arg("/dev/shm")
        .args(flags)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env_remove("CUDA_MPS_PIPE_DIRECTORY")
        .env(FAKE_DRIVER, driver)
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let json: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    Said {
        checks: json["checks"].as_array().unwrap().clone(),
        code: output.status.code().unwrap(),
    }
}

fn on_fake(faults: &str) -> Said {
    let driver = format!("{FIT}{faults}");
    doctor("flextensord-on-fake", &driver, &["--device", "cuda"], &[])
}

#[test]
fn a_fit_gpu_passes_its_self_test_and_its_link_is_measured() {
    let said = on_fake("");
    let [verdict, found, _] = said.one("CUDA driver");
    assert_eq!(verdict, "ok");
    assert!(found.contains("CUDA 13.0"), "{found}");
    let [verdict, found, _] = said.one("GPU");
    assert_eq!(verdict, "ok");
    for part in ["cuda:0", "GPU-", "256.0 MiB"] {
        assert!(found.contains(part), "{found}");
    }
    let [verdict, found, _] = said.one("GPU self-test");
    assert_eq!(verdict, "ok", "{found}");
    assert!(found.contains("every byte"), "{found}");
    let [_, found, _] = said.one("GPU link");
    assert!(
        found.contains("GB/s") && found.contains("median of"),
        "{found}"
    );
    assert_eq!(said.one("huge pages")[0], "ok");
    assert_eq!(said.one("NUMA")[0], "ok");
    assert_eq!(said.code, 0);
}

#[test]
fn a_slow_link_warns_with_its_rate_and_where_to_look() {
    let said = on_fake(",bandwidth=128MiB");
    let [verdict, found, remedy] = said.one("GPU link");
    assert_eq!(verdict, "warn", "{found}");
    assert!(found.contains(" 0.1"), "{found}");
    assert!(
        remedy.contains("PCIe") && remedy.contains("NUMA"),
        "{remedy}"
    );
    assert_eq!(said.code, 0);
}

#[test]
fn an_unfit_gpu_is_named_with_what_it_lacks_and_is_not_tried() {
    for (fault, lack, remedy) in [
        (
            "StreamMemoryOps64=0",
            "64-bit stream memory operations",
            "driver",
        ),
        ("ComputeMode=3", "EXCLUSIVE_PROCESS", "-c DEFAULT"),
        ("ComputeMode=2", "PROHIBITED", "-c DEFAULT"),
    ] {
        let said = on_fake(&format!(",attribute.{fault}"));
        let [verdict, found, told] = said.one("GPU");
        assert_eq!(verdict, "fail");
        assert!(found.contains(lack) && found.contains("GPU-"), "{found}");
        assert!(told.contains(remedy), "{told}");
        assert!(said.of("GPU self-test").is_empty() && said.of("GPU link").is_empty());
        assert_eq!(said.code, 69);
    }
}

#[test]
fn refused_pinning_is_told_with_its_code_and_the_remedies() {
    // the first call pins the page with the number of the last copy, the second 64 MiB
    for fault in [
        "register_refuse=2",
        "register_fail=2:2",
        "register_limit=4MiB",
    ] {
        let said = on_fake(&format!(",{fault}"));
        let [verdict, found, remedy] = said.one("GPU self-test");
        assert_eq!(verdict, "fail", "{found}");
        assert!(found.contains("CUDA_ERROR_OUT_OF_MEMORY (2)"), "{found}");
        for part in ["LimitMEMLOCK=infinity", "--ulimit memlock=-1"] {
            assert!(remedy.contains(part), "{remedy}");
        }
        assert_eq!(said.code, 69);
    }
}

#[test]
fn a_driver_that_fails_while_pinning_is_no_matter_of_locked_memory() {
    for code in [1, 201, 700] {
        let said = on_fake(&format!(",register_refuse={code}"));
        let [verdict, found, remedy] = said.one("GPU self-test");
        assert_eq!(verdict, "fail", "{found}");
        assert!(found.contains(&format!("({code})")), "{found}");
        assert!(!remedy.contains("memlock"), "{remedy}");
    }
}

#[test]
fn refused_sharing_is_told_with_its_code_and_a_hint_at_containers() {
    for fault in ["import_refuse=304", "import_own=304", "export_refuse=304"] {
        let said = on_fake(&format!(",{fault}"));
        let [verdict, found, remedy] = said.one("GPU self-test");
        assert_eq!(verdict, "fail", "{found}");
        assert!(
            found.contains("sharing") && found.contains("(304)"),
            "{found}"
        );
        assert!(
            remedy.contains("container") && remedy.contains("visible"),
            "{remedy}"
        );
    }
}

#[test]
fn a_gpu_without_free_memory_or_that_breaks_is_told_in_a_bounded_time() {
    let said = on_fake(",out_of_memory_at_create=1");
    let [verdict, found, _] = said.one("GPU self-test");
    assert_eq!(verdict, "warn", "{found}");
    let said = on_fake(",break_at_copy=2:700");
    let [verdict, found, _] = said.one("GPU self-test");
    assert_eq!(verdict, "fail", "{found}");
    assert!(found.contains("(700)"), "{found}");
}

#[test]
fn gpus_that_are_not_asked_for_are_left_alone_and_one_that_is_not_there_fails() {
    let run = |device| {
        let driver = "gpus=3,memory=128MiB";
        doctor("flextensord-on-fake", driver, &["--device", device], &[])
    };
    let said = run("cuda:1");
    assert!(said.one("GPU")[1].contains("cuda:1"));
    assert_eq!(said.of("GPU self-test").len(), 1);
    let said = run("cuda:7");
    let [verdict, found, _] = said.one("GPU");
    assert_eq!((verdict, said.code), ("fail", 69));
    assert!(
        found.contains("cuda:7") && found.contains("cuda:2"),
        "{found}"
    );
}

#[test]
fn what_is_wrong_with_a_gpu_only_warns_who_serves_from_the_cpu() {
    let driver = "gpus=2,memory=128MiB,attribute.HostRegister=0";
    for flags in [&[][..], &["--device", "cpu"]] {
        let said = doctor("flextensord-on-fake", driver, flags, &[]);
        let verdicts: Vec<&str> = said.of("GPU").iter().map(|check| check[0]).collect();
        assert_eq!((verdicts, said.code), (vec!["warn", "warn"], 0));
    }
}

#[test]
fn no_driver_fails_only_who_asks_for_a_gpu() {
    // a text that is no description: the stand-in has no driver then
    let said = doctor("flextensord-on-fake", "none", &[], &[]);
    let [verdict, found, _] = said.one("CUDA driver");
    assert_eq!((verdict, said.code), ("ok", 0));
    assert!(found.contains("--device cuda will not work"), "{found}");
    let said = doctor("flextensord-on-fake", "none", &["--device", "cuda"], &[]);
    let [verdict, found, remedy] = said.one("CUDA driver");
    assert_eq!((verdict, said.code), ("fail", 69));
    assert!(found.contains("no CUDA driver"), "{found}");
    assert!(remedy.contains("--gpus all"), "{remedy}");
}

#[test]
fn no_gpu_is_told_with_the_list_that_hides_them() {
    let visible = [("CUDA_VISIBLE_DEVICES", "5")];
    let driver = "gpus=1,memory=128MiB,visible=5";
    let flags = ["--device", "cuda"];
    let said = doctor("flextensord-on-fake", driver, &flags, &visible);
    let [verdict, found, remedy] = said.one("CUDA driver");
    assert_eq!((verdict, said.code), ("fail", 69));
    assert!(found.contains("CUDA_VISIBLE_DEVICES=5"), "{found}");
    assert!(remedy.contains("nvidia-smi -L"), "{remedy}");
}

#[test]
fn an_mps_server_warns_about_clients_of_other_users() {
    let pipe = directory().unwrap();
    let path = pipe.path().to_str().unwrap();
    let environment = [("CUDA_MPS_PIPE_DIRECTORY", path)];
    let run = || doctor("flextensord-on-fake", FIT, &[], &environment);
    assert_eq!(run().one("MPS")[0], "ok");
    fs::write(pipe.path().join("control"), "").unwrap();
    let said = run();
    let [verdict, found, remedy] = said.one("MPS");
    assert_eq!(verdict, "warn");
    assert!(
        found.contains("another uid") && found.contains(path),
        "{found}"
    );
    assert!(remedy.contains("-multiuser-server"), "{remedy}");
}
