use std::{collections::BTreeMap, fs, time::Duration};

use super::{environment::NotUnicode, *};

#[derive(Default)]
struct Variables(BTreeMap<String, Option<String>>);

impl Environment for Variables {
    fn get(&self, name: &str) -> Result<Option<String>, NotUnicode> {
        match self.0.get(name) {
            Some(None) => Err(NotUnicode),
            Some(Some(text)) => Ok(Some(text.clone())),
            None => Ok(None),
        }
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}

/// A machine with its own `/etc`, environment and command line.
struct Machine {
    etc: tempfile::TempDir,
    variables: Variables,
    flags: Flags,
    uid: u32,
}

impl Machine {
    fn new() -> Self {
        let device = Some("cpu".to_owned());
        Self {
            etc: tempfile::tempdir().unwrap(),
            variables: Variables::default(),
            flags: Flags {
                device,
                ..Flags::default()
            },
            uid: 0,
        }
    }

    fn file(self, name: &str, text: &str) -> Self {
        fs::write(self.etc.path().join(name), text).unwrap();
        self
    }

    fn variable(mut self, name: &str, text: &str) -> Self {
        self.variables.0.insert(name.into(), Some(text.into()));
        self
    }

    fn flag(mut self, set: impl FnOnce(&mut Flags)) -> Self {
        set(&mut self.flags);
        self
    }

    fn load(&self) -> Result<Settings, ConfigurationError> {
        load(&Sources {
            flags: &self.flags,
            environment: &self.variables,
            etc: self.etc.path().to_owned(),
            uid: self.uid,
            cores: 64,
        })
    }

    fn refusal(&self) -> String {
        self.load().unwrap_err().to_string()
    }
}

#[test]
fn nothing_given_but_the_device_means_the_documented_defaults() {
    let settings = Machine::new().load().unwrap();
    assert_eq!(settings.instance, "default");
    let socket = "/run/flextensord/default/flextensord.sock";
    assert_eq!(settings.grpc_socket(), Path::new(socket));
    assert_eq!(settings.shm_dir, Path::new("/dev/shm"));
    let cpu = CpuSettings {
        devices: 1,
        memory: 1 << 30,
        link: None,
    };
    assert_eq!(settings.cpu, cpu);
    assert_eq!((settings.load_threads, settings.max_managers), (16, 1024));
    assert_eq!(settings.resume_grace, Duration::from_secs(5));
    assert_eq!(settings.drain_grace, Duration::from_secs(10));
    assert_eq!(settings.client_patience, Duration::from_secs(30));
    assert!(settings.keep_on_stop && !settings.verify_adopted);
    assert_eq!(
        (settings.pinning.wanted, settings.host_memory),
        (None, None)
    );
}

#[test]
fn flags_win_over_environment_and_environment_over_the_file() {
    let settings = Machine::new()
        .file(
            "default.toml",
            "cpu_memory = '1MiB'\nmax_managers = 7\nresume_grace = '1s'\n",
        )
        .variable("FLEXTENSORD_CPU_MEMORY", "2MiB")
        .variable("FLEXTENSORD_MAX_MANAGERS", "8")
        .flag(|flags| flags.cpu_memory = Some("64MiB".into()))
        .load()
        .unwrap();
    assert_eq!(settings.cpu.memory, 64 << 20);
    assert_eq!(settings.max_managers, 8);
    assert_eq!(settings.resume_grace, Duration::from_secs(1));
    let origin = |key: Key| settings.origins[&key].to_string();
    assert_eq!(origin(Key::CpuMemory), "flag --cpu-memory");
    assert_eq!(
        origin(Key::MaxManagers),
        "environment FLEXTENSORD_MAX_MANAGERS"
    );
    assert!(origin(Key::ResumeGrace).ends_with("default.toml line 3"));
    assert_eq!(origin(Key::ShmDir), "default");
}

#[test]
fn the_device_has_no_default_and_a_list_of_gpus_is_checked_by_name() {
    let machine = Machine::new().flag(|flags| flags.device = None);
    assert!(machine.refusal().contains("device is not set"));
    for text in ["gpu", "cuda:", "cuda:x", "cuda:0,cpu", "cuda,cuda:1", ""] {
        let machine = Machine::new().flag(|flags| flags.device = Some(text.into()));
        assert!(machine.refusal().contains("cuda for all GPUs"), "{text}");
    }
    for text in ["cuda:0,cuda:00", "cuda:1, cuda:1", "GPU-0a,MIG-0A"] {
        let machine = Machine::new().flag(|flags| flags.device = Some(text.into()));
        assert!(machine.refusal().contains("name the same GPU"), "{text}");
    }
    let device = |text: &str| {
        let machine = Machine::new().flag(|flags| flags.device = Some(text.into()));
        machine.load().unwrap().device
    };
    assert_eq!(device("cuda"), DeviceKind::Cuda(Vec::new()));
    let list = ["cuda:1", "GPU-0a", "MIG-0b"].map(str::to_owned).to_vec();
    assert_eq!(device("cuda:1, GPU-0a,MIG-0b"), DeviceKind::Cuda(list));
}

#[test]
fn an_unknown_key_is_refused_with_its_line_and_the_nearest_name() {
    let machine = Machine::new().file(
        "default.toml",
        "# x\nmax_managers = 1\ncpu-memroy = '1MiB'\n",
    );
    let message = machine.refusal();
    assert!(message.contains("default.toml line 3"), "{message}");
    assert!(message.contains("did you mean cpu_memory?"), "{message}");
    let machine = Machine::new().file("default.toml", "[cpu]\nmemory = 1\n");
    assert!(machine.refusal().contains("line 1: unknown key \"cpu\""));
}

#[test]
fn an_unknown_variable_is_refused_with_the_nearest_name() {
    let message = Machine::new()
        .variable("FLEXTENSORD_CPU_MEM", "1")
        .refusal();
    assert!(message.contains("FLEXTENSORD_CPU_MEM;"), "{message}");
    assert!(
        message.contains("did you mean FLEXTENSORD_CPU_MEMORY?"),
        "{message}"
    );
}

#[test]
fn variables_of_clients_and_of_a_cluster_are_left_alone() {
    let machine = Machine::new()
        .variable("FLEXTENSORD_SOCKET", "/x")
        .variable("FLEXTENSORD_SERVICE_HOST", "10.0.0.1")
        .variable("FLEXTENSORD_PORT_80_TCP", "tcp://10.0.0.1:80")
        .variable("PATH", "/bin");
    assert!(machine.load().is_ok());
}

#[test]
fn a_value_that_is_no_text_names_its_variable() {
    let mut machine = Machine::new();
    machine.variables.0.insert("FLEXTENSORD_LOG".into(), None);
    assert!(machine.refusal().contains("FLEXTENSORD_LOG is not UTF-8"));
}

#[test]
fn bad_values_name_key_value_rule_and_origin() {
    let cases: &[(&str, &str, &str)] = &[
        ("instance", "a/b", "allowed are letters"),
        ("runtime_dir", "run", "absolute path"),
        ("shm_dir", "", "absolute path"),
        ("cpu_devices", "0", "1 to 32"),
        ("cpu_devices", "33", "1 to 32"),
        ("cpu_devices", "-1", "1 to 32"),
        ("cpu_memory", "0", "over 0"),
        ("cpu_memory", "lots", "such as 64MiB"),
        ("cpu_memory", "99999999EiB", "8EiB"),
        ("cpu_link", "8GB", "per second"),
        ("cpu_link", "8Gb/s", "bits"),
        ("cpu_link", "0B/s", "over 0"),
        ("pinned_memory", "yes", "true or false"),
        ("pinned_memory", "true", "no driver to pin memory for"),
        ("host_memory", "-1", "such as 64MiB"),
        ("load_threads", "257", "0 to 256"),
        ("max_managers", "0", "1 to 65536"),
        ("resume_grace", "5", "such as 5s"),
        ("drain_grace", "2h", "at most 1h"),
        ("client_patience", "2h", "at most 1h"),
        ("on_stop", "forget", "keep or remove"),
        ("verify_adopted", "no", "true or false"),
        ("log", "debgu", "must be a level"),
        ("log", "a=b=c", "must be a level"),
        ("log_format", "xml", "human or json"),
    ];
    for (name, text, rule) in cases {
        let variable = Key::named(name).unwrap().variable();
        let message = Machine::new().variable(&variable, text).refusal();
        for part in [
            *name,
            &format!("{text:?}"),
            &format!("environment {variable}"),
            rule,
        ] {
            assert!(message.contains(part), "{message:?} lacks {part:?}");
        }
    }
}

#[test]
fn values_of_a_file_have_the_same_rules() {
    let refusal = |text: &str| Machine::new().file("default.toml", text).refusal();
    assert!(refusal("cpu_devices = 99").contains("line 1"));
    assert!(refusal("cpu_devices = 1.5").contains("type float"));
    assert!(refusal("\ncpu_devices = [").contains("line 2"));
    assert!(refusal("log = 'info'\nlog = 'warn'").contains("line 2"));
    let text = "cpu_devices = 2\npinned_memory = false\ncpu_link = '8GB/s'\nlog_format = 'json'";
    let settings = Machine::new().file("default.toml", text).load().unwrap();
    assert_eq!(settings.cpu.devices, 2);
    assert_eq!(settings.cpu.link, Some(8_000_000_000));
    assert_eq!(settings.pinning.wanted, Some(false));
    assert_eq!(settings.log_format, LogFormat::Json);
}

#[test]
fn none_takes_back_a_limit_of_a_lower_layer() {
    let settings = Machine::new()
        .file("default.toml", "cpu_link = '8GB/s'\nhost_memory = '1GiB'")
        .variable("FLEXTENSORD_CPU_LINK", "none")
        .variable("FLEXTENSORD_HOST_MEMORY", "none")
        .load()
        .unwrap();
    assert_eq!((settings.cpu.link, settings.host_memory), (None, None));
}

#[test]
fn each_instance_has_its_file_and_a_named_file_must_exist() {
    let machine = Machine::new()
        .file("b.toml", "max_managers = 3")
        .variable("FLEXTENSORD_INSTANCE", "b");
    assert_eq!(machine.load().unwrap().max_managers, 3);
    let machine = machine.file("b.toml", "instance = 'c'");
    assert!(machine.refusal().contains("must be absent or \"b\""));
    let absent = machine.etc.path().join("absent.toml");
    let machine = machine.flag(|flags| flags.config = Some(absent));
    assert!(machine.refusal().contains("absent.toml"));
    let machine = Machine::new().file("x.toml", "instance = 'from-file'");
    let named = machine.etc.path().join("x.toml");
    let machine = machine.variable("FLEXTENSORD_CONFIG", named.to_str().unwrap());
    assert_eq!(machine.load().unwrap().instance, "from-file");
}

#[test]
fn a_user_without_a_runtime_directory_is_told_the_flag() {
    let mut machine = Machine::new();
    machine.uid = 1000;
    assert!(machine.refusal().contains("--runtime-dir"));
    let machine = machine.variable("XDG_RUNTIME_DIR", "/run/user/1000");
    let settings = machine.load().unwrap();
    assert_eq!(
        settings.directory(),
        Path::new("/run/user/1000/flextensord/default")
    );
}

#[test]
fn a_socket_path_over_the_limit_is_refused_with_path_and_length() {
    let room = 107 - "/default/flextensord.sock".len();
    let path = |bytes: usize| format!("/{}", "r".repeat(bytes - 1));
    let machine = |bytes| Machine::new().variable("FLEXTENSORD_RUNTIME_DIR", &path(bytes));
    assert!(machine(room).load().is_ok());
    let message = machine(room + 1).refusal();
    assert!(
        message.contains("has 108 bytes, over the limit of 107"),
        "{message}"
    );
    assert!(message.contains("flextensord.sock"), "{message}");
}

#[test]
fn what_is_shown_can_be_read_back_as_a_file() {
    let settings = Machine::new()
        .variable("FLEXTENSORD_CPU_MEMORY", "1000001")
        .variable("FLEXTENSORD_CPU_LINK", "8GB/s")
        .load()
        .unwrap();
    let shown = show::text(&settings);
    assert!(
        shown.contains("# environment FLEXTENSORD_CPU_MEMORY"),
        "{shown}"
    );
    let machine = Machine::new()
        .flag(|flags| flags.device = None)
        .file("default.toml", &shown);
    let again = machine.load().unwrap();
    assert_eq!((again.cpu, &again.log), (settings.cpu, &settings.log));
    assert_eq!(show::json(&settings)["cpu_memory"]["value"], "1000001B");
}
