use super::checks::bad;
use super::*;
use proptest::prelude::*;

fn merged(yaml: &str) -> Result<Config, BadSettings> {
    let file = FileConfig::parse(yaml).map_err(|problems| bad("file", yaml, problems.to_string()))?;
    Config::merge(&ServeArgs::default(), file)
}

#[test]
fn an_empty_file_means_defaults() {
    let config = merged("").unwrap();
    assert_eq!(config.kubelet.device_plugins_dir, PathBuf::from("/var/lib/kubelet/device-plugins"));
    assert_eq!(config.kubelet.root_dir, PathBuf::from("/var/lib/kubelet"));
    assert_eq!(config.admin.token_file, PathBuf::from("/var/lib/berth/token"));
    let claim_grants = Some("/var/lib/kubelet/plugins/gpu.nvidia.com/grants".into());
    assert_eq!(config.rules, Rules { claim_grants, ..Rules::default() });
    assert_eq!(config.gpus.source, GpuSource::Nvml { library: None, driver_root: None });
}

#[test]
fn flags_take_precedence_over_the_file() {
    let args = ServeArgs { gpus: Some("sim:2xt4".into()), ..ServeArgs::default() };
    let file = FileConfig::parse("gpus: nvml\nnodeName: n1").unwrap();
    let config = Config::merge(&args, file).unwrap();
    assert_eq!(config.gpus.source, GpuSource::Sim("2xt4".into()));
    assert_eq!(config.node.name, "n1");
}

#[test]
fn an_empty_variable_counts_as_not_set() {
    let empty = || Some(PathBuf::new());
    let nvidia = NvidiaArgs { dev_root: empty(), driver_root_ctr_path: empty(), ..NvidiaArgs::default() };
    let mut args = ServeArgs { nvidia, ..ServeArgs::default() };
    args.edits.nvidia_driver_root = empty();
    let file = "containerEdits: { nvidiaDriverRoot: /driver, nvidiaDevRoot: /dev-root }";
    let config = Config::merge(&args, FileConfig::parse(file).unwrap()).unwrap();
    assert_eq!(config.containers.edits.driver_root, PathBuf::from("/driver"));
    assert_eq!(config.containers.edits.dev_root, Some(PathBuf::from("/dev-root")));
    assert_eq!(config.gpus.source, GpuSource::Nvml { library: None, driver_root: Some("/driver".into()) });
}

#[test]
fn relative_folders_are_relative_to_the_current_folder() {
    let current = std::env::current_dir().unwrap();
    let config = merged("stateDir: st\nkubeletDir: ./k\n").unwrap();
    assert_eq!(config.node.state_dir, current.join("st"));
    assert_eq!(config.admin.token_file, current.join("st/token"));
    assert_eq!(config.kubelet.device_plugins_dir, current.join("k/device-plugins"));
    assert_eq!(config.kubelet.root_dir, current.join("k"));
    assert_eq!(merged("tokenFile: t").unwrap().admin.token_file, current.join("t"));
}

#[test]
fn the_kubelets_two_folders_are_set_apart_or_by_their_common_parent() {
    let folders = |yaml: &str, args: &ServeArgs| {
        let config = Config::merge(args, FileConfig::parse(yaml).unwrap()).unwrap();
        [config.kubelet.device_plugins_dir, config.kubelet.root_dir].map(|path| path.display().to_string())
    };
    let none = ServeArgs::default();
    assert_eq!(folders("kubeletDir: /k", &none), ["/k/device-plugins", "/k"]);
    let root = "kubeletRootDir: /var/lib/k0s/kubelet";
    assert_eq!(folders(root, &none), ["/var/lib/kubelet/device-plugins", "/var/lib/k0s/kubelet"]);
    assert_eq!(folders("kubeletDir: /k\ndevicePluginsDir: /p", &none), ["/p", "/k"]);
    let flags = ServeArgs {
        kubelet_dir: Some("/f".into()),
        device_plugins_dir: Some("/g".into()),
        ..ServeArgs::default()
    };
    assert_eq!(folders("devicePluginsDir: /p\nkubeletRootDir: /r", &flags), ["/g", "/r"]);
}

#[test]
fn an_error_names_the_setting_and_the_rule() {
    for (yaml, expected) in [
        ("gpuss: nvml", "gpuss"),
        ("gpus: amd", "sim:8xh100"),
        ("adminListen: 0.0.0.0:1", "loopback"),
        ("memoryOvercommit: 0.5", "1.0 to 16.0"),
        ("history: {allocations: 10001}", "64 to 10000"),
        ("history: {allocations: 0}", "64 to 10000"),
        ("decisions: {maxMiB: 7}", "0 (no journal), or 8 to 4096"),
        ("decisions: {maxAgeDays: 0}", "1 to 365"),
        ("processes: {ignore: [/usr/bin/dcgmi]}", "without a path"),
        ("resource: gpu", "a domain"),
        ("migStrategy: both", "none, single or mixed"),
        ("stack: [{policy: mixed, parameterss: {}}]", "parameterss"),
        ("containerEdits: {deviceListStrategy: [env]}", "envvar"),
    ] {
        let error = merged(yaml).unwrap_err().to_string();
        assert!(error.contains(expected), "{yaml}: {error}");
    }
}

#[test]
fn enabled_xids_take_precedence_over_disabled_ones() {
    let args = ServeArgs {
        disable_healthchecks: Some("79, 48".into()),
        enable_healthchecks: Some("48,13".into()),
        ..ServeArgs::default()
    };
    let config = Config::merge(&args, FileConfig::default()).unwrap();
    let XidRules { ignored, counted } = config.health.xids;
    assert!(
        ignored.contains(&79) && ignored.contains(&31) && !ignored.contains(&13) && !ignored.contains(&48)
    );
    assert_eq!(counted, [48, 13]);
}

/// A configuration with every kind of value.
const COMPLETE: &str = "
nodeName: n1
gpus: sim:8xh100
apiServer: off
adminListen: 127.0.0.1:9470
admin:
  socket: /run/berth/admin.sock
  tokens: [{ name: grafana, file: /etc/berth/grafana, right: read }]
  limits: { readsPerSecond: 100, changesPerSecond: 7 }
  kubernetes: { audiences: [berth] }
log: json
tracing: { endpoint: 'http://collector:4317', sampleRatio: 0.5 }
resource: nvidia.com/gpu
migStrategy: mixed
memoryOvercommit: 1.5
health: { pollSeconds: 0.5, quietSeconds: 60, ignoredXids: [13, 31] }
decisions: { maxMiB: 64, maxAgeDays: 7 }
processes: { ignore: [dcgmi] }
labels: { node: true }
containerEdits:
  deviceListStrategy: [envvar, cdi-cri]
  deviceIdStrategy: uuid
  resources:
    nvidia.com/gpu:
      mounts: [{ hostPath: /opt/lib, containerPath: /opt/lib }]
      devices: [{ hostPath: /dev/x, permissions: rw }]
rounds: { listEveryMs: 2000 }
stack:
- policy: mixed
  parameters: { replicas: 4, nested: { list: [1, two, 3.0] } }
  permissions: { shareMax: 16, resources: [nvidia.com/gpu] }
  onFault: deny
- policy: exclusive
";

#[test]
fn the_configuration_of_the_mutation_test_is_valid() {
    assert!(settings(COMPLETE).0.is_some() && settings(COMPLETE).1.is_empty(), "{}", settings(COMPLETE).1);
}

fn settings(text: &str) -> (Option<Config>, berth_files::yaml::Problems) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    std::fs::write(&file, text).unwrap();
    match Source::read(&file) {
        Ok(source) => source.settings(&ServeArgs::default()),
        Err(ConfigError::Wrong { problems, .. }) => (None, problems),
        Err(other) => panic!("{other}"),
    }
}

/// The texts that a mutation inserts.
const PIECES: [&str; 24] = [
    "", " ", "\n", "\n  ", ":", ": ", "- ", "[", "]", "{", "}", "'", "\"", "#", "&a ", "*a", "|", "~", "-1",
    "1e999", ".nan", "\"\\0\"", "true", "é\u{7f}",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Every file gives settings, or errors that all have a line.
    #[test]
    fn a_mutated_configuration_gives_settings_or_errors_with_lines(
        mutations in prop::collection::vec((0..COMPLETE.len(), 0..20_usize, 0..PIECES.len()), 1..6),
    ) {
        let mut text: Vec<char> = COMPLETE.chars().collect();
        for (at, removed, piece) in mutations {
            let from = at.min(text.len());
            let to = (from + removed).min(text.len());
            text.splice(from..to, PIECES[piece].chars());
        }
        let text: String = text.into_iter().collect();
        let start = std::time::Instant::now();
        let (config, problems) = settings(&text);
        prop_assert!(config.is_some() || !problems.is_empty(), "{text}");
        for problem in problems.iter() {
            prop_assert!(problem.place.is_some(), "{text}\n{problem}");
            prop_assert!(problem.to_string().len() < 1500, "{text}\n{problem}");
        }
        prop_assert!(start.elapsed().as_secs() < 5, "{text}");
    }
}
