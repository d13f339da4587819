use super::*;

fn merged(yaml: &str) -> Result<Config, ConfigError> {
    Config::merge(&ServeArgs::default(), FileConfig::parse(yaml).map_err(|what| bad("file", yaml, what))?)
}

#[test]
fn an_empty_file_is_the_defaults() {
    let config = merged("").unwrap();
    assert_eq!(config.kubelet_dir, PathBuf::from("/var/lib/kubelet"));
    assert_eq!(config.token_file, PathBuf::from("/var/lib/berth/token"));
    assert_eq!(config.rules, Rules::default());
    assert_eq!(config.gpus, GpuSource::Nvml { library: None, driver_root: None });
}

#[test]
fn flags_win_over_the_file() {
    let args = ServeArgs { gpus: Some("sim:2xt4".into()), ..ServeArgs::default() };
    let file = FileConfig::parse("gpus: nvml\nnodeName: n1").unwrap();
    let config = Config::merge(&args, file).unwrap();
    assert_eq!(config.gpus, GpuSource::Sim("2xt4".into()));
    assert_eq!(config.node_name, "n1");
}

#[test]
fn relative_folders_are_meant_from_where_berth_was_started() {
    let here = std::env::current_dir().unwrap();
    let config = merged("stateDir: st\nkubeletDir: ./k\n").unwrap();
    assert_eq!(config.state_dir, here.join("st"));
    assert_eq!(config.token_file, here.join("st/token"));
    assert_eq!(config.kubelet_dir, here.join("k"));
    assert_eq!(merged("tokenFile: t").unwrap().token_file, here.join("t"));
}

#[test]
fn wrong_settings_say_which_and_what_to_do() {
    for (yaml, says) in [
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
        let said = merged(yaml).unwrap_err().to_string();
        assert!(said.contains(says), "{yaml}: {said}");
    }
}

#[test]
fn what_is_enabled_wins_over_what_is_disabled() {
    let args = ServeArgs {
        disable_healthchecks: Some("79, 48".into()),
        enable_healthchecks: Some("48,13".into()),
        ..ServeArgs::default()
    };
    let config = Config::merge(&args, FileConfig::default()).unwrap();
    assert_eq!(config.ignored_xids, [31, 43, 45, 68, 79, 109]);
}
