use super::args::unused_environment_notices;
use super::*;
use crate::{Config, FileConfig, NvidiaArgs, ServeArgs, StackEntryConfig};

fn document(text: &str) -> Document {
    Document::parse(text).unwrap()
}

fn translated(text: &str) -> Translated {
    translate(&document(text)).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn keys(text: &str) -> Vec<String> {
    translated(text).findings.iter().map(|finding| finding.key.clone()).collect()
}

fn shared(sharing: &str) -> String {
    format!("version: v1\nsharing:\n  timeSlicing: {sharing}\n")
}

/// Policy and parameters of each entry.
fn stack(text: &str) -> Vec<(String, String)> {
    let entries = translated(text).file.stack.unwrap_or_default();
    let entry = |e: StackEntryConfig| (e.policy, serde_json::to_string(&e.parameters).unwrap());
    entries.into_iter().map(entry).collect()
}

#[test]
fn a_file_is_nvidias_by_its_version_or_by_its_keys_alone() {
    for text in ["version: v1", "Version: v1\ngpus: nvml", "{\"flags\": {}}", "sharing: null", "version: v2"]
    {
        assert!(is_nvidia(&document(text)), "{text}");
    }
    for text in ["", "# nothing\n", "{}", "gpus: nvml", "gpus: nvml\nresources: {}", ": :", "[version]"] {
        assert!(!is_nvidia(&document(text)), "{text}");
    }
}

#[test]
fn every_flag_becomes_the_setting_of_the_same_meaning() {
    let text = "
version: v1
flags:
  migStrategy: mixed
  failOnInitError: false
  nvidiaDriverRoot: /run/nvidia/driver
  nvidiaDevRoot: /dev-root
  gdrcopyEnabled: true
  gdsEnabled: yes
  mofedEnabled: false
  deviceDiscoveryStrategy: auto
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [envvar, volume-mounts]
    deviceIDStrategy: index
    cdiAnnotationPrefix: cdi.nvidia.com/
    sharedDevicesAllocationPolicy: packed
";
    let berth = "\
migStrategy: \"mixed\"
failOnInitError: false
containerEdits:
  nvidiaDriverRoot: \"/run/nvidia/driver\"
  nvidiaDevRoot: \"/dev-root\"
  gdrcopyEnabled: true
  gdsEnabled: true
  mofedEnabled: false
  passDeviceSpecs: true
  deviceListStrategy: [\"envvar\",\"volume-mounts\"]
  deviceIdStrategy: \"index\"
  cdiAnnotationPrefix: \"cdi.nvidia.com/\"
stack:
  - policy: binpack
";
    let Translated { yaml, file, findings, .. } = translated(text);
    assert_eq!((yaml.as_str(), findings), (berth, Vec::new()));
    let config = Config::merge(&ServeArgs::default(), file).unwrap();
    let variables: Vec<_> =
        config.containers.edits.features.iter().map(|feature| feature.variable()).collect();
    assert_eq!(variables, ["NVIDIA_GDRCOPY", "NVIDIA_GDS"]);
    assert_eq!(config.containers.edits.dev_root, Some("/dev-root".into()));
    assert!(config.containers.edits.pass_device_specs && !config.gpus.fail_on_init_error);
}

#[test]
fn time_slicing_becomes_a_stack() {
    for (sharing, expected) in [
        (
            "{resources: [{name: nvidia.com/gpu, replicas: 10}]}",
            r#"{"resources":[{"name":"nvidia.com/gpu","replicas":10}]}"#,
        ),
        (
            "{resources: [{name: gpu, replicas: 2}]}",
            r#"{"resources":[{"name":"nvidia.com/gpu","replicas":2}]}"#,
        ),
        (
            "{renameByDefault: true, resources: [{name: gpu, replicas: 2}]}",
            r#"{"resources":[{"name":"nvidia.com/gpu","rename":"nvidia.com/gpu.shared","replicas":2}]}"#,
        ),
        (
            "{failRequestsGreaterThanOne: true, resources: [{name: gpu, replicas: 2, devices: all}]}",
            r#"{"failRequestsGreaterThanOne":true,"resources":[{"name":"nvidia.com/gpu","replicas":2}]}"#,
        ),
        (
            "{renameByDefault: true, resources: [{name: gpu, replicas: 2}, {name: mig-1g.5gb, replicas: 3}]}",
            r#"{"resources":[{"name":"nvidia.com/gpu","rename":"nvidia.com/gpu.shared","replicas":2},{"name":"nvidia.com/mig-1g.5gb","rename":"nvidia.com/mig-1g.5gb.shared","replicas":3}]}"#,
        ),
    ] {
        assert_eq!(stack(&shared(sharing)), [("timeslice".to_owned(), expected.to_owned())], "{sharing}");
        assert_eq!(keys(&shared(sharing)), [""; 0], "{sharing}");
    }
}

#[test]
fn a_setting_without_an_equal_is_reported_with_its_replacement() {
    let one = "{name: gpu, replicas: 2";
    for (text, key, expected) in [
        ("flags: {mpsRoot: /run/nvidia/mps}", "flags.mpsRoot", "containerEdits.resources.<resource>.mps"),
        ("flags: {useNodeFeatureAPI: true}", "flags.useNodeFeatureAPI", "labels.node"),
        ("flags: {migstrategi: none}", "flags.migstrategi", "correct or remove it"),
        (
            "flags: {plugin: {nvidiaCTKPath: /usr/bin/nvidia-ctk}}",
            "flags.plugin.nvidiaCTKPath",
            "makes its own without this program",
        ),
        (
            "flags: {plugin: {containerDriverRoot: /d}}",
            "flags.plugin.containerDriverRoot",
            "DRIVER_ROOT_CTR_PATH",
        ),
        ("flags: {gfd: {oneshot: true}}", "flags.gfd.oneshot", "as long as the daemon runs"),
        ("flags: {gfd: {outputFile: /gfd}}", "flags.gfd.outputFile", "labels.nfdFile"),
        (
            "resources: {gpus: [{pattern: \"*A100*\", name: a100}]}",
            "resources.gpus[0]",
            "resource: nvidia.com/a100",
        ),
        ("resources: {mig: [{pattern: 1g.5gb, name: small}]}", "resources.mig[0]", "usual names"),
        (
            &shared(&format!(
                "{{resources: [{one}, devices: [0, GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c]}}]}}"
            )),
            "sharing.timeSlicing.resources[0].devices",
            "`devices: [0,\"GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c\"]`",
        ),
        (
            &shared(&format!("{{resources: [{one}, devices: 2}}]}}")),
            "sharing.timeSlicing.resources[0].devices",
            "`devices: 2`",
        ),
        (
            &shared(&format!("{{resources: [{one}, rename: slow}}]}}")),
            "sharing.timeSlicing.resources[0].rename",
            "rename: nvidia.com/slow",
        ),
        ("imex: {channelIDs: [0]}", "imex.channelIDs", "no IMEX channels"),
    ] {
        let translated = translated(text);
        let [finding] = &translated.findings[..] else { panic!("{text}: {:?}", translated.findings) };
        assert_eq!((finding.key.as_str(), finding.refused), (key, false), "{text}");
        assert!(finding.note.contains(expected), "{text}: {}", finding.note);
        assert!(translated.yaml.contains(&format!("# set, not used: {key}: ")), "{}", translated.yaml);
        assert!(translated.refusal.is_empty());
    }
}

#[test]
fn a_setting_that_containers_need_is_refused_with_its_replacement() {
    for (text, expected) in [
        ("sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}", "nvidia-cuda-mps-control"),
        ("imex: {channelIDs: [0], required: true}", "leave NVIDIA's plugin"),
        ("flags: {deviceDiscoveryStrategy: tegra}", "leave NVIDIA's plugin"),
        ("flags: {plugin: {deviceListStrategy: []}}", "write [envvar]"),
        (&shared("{resources: [{name: gpu, replicas: 129}]}"), "at most 128"),
    ] {
        let translated = translated(text);
        assert!(translated.yaml.contains("# not supported: "), "{}", translated.yaml);
        let error = translated.refusal.to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn yaml_merges_are_refused_at_every_level() {
    let text = "\
version: v1
base: &base {failOnInitError: false}
flags: {<<: *base, plugin: {<<: *base}}
sharing: {timeSlicing: {resources: [{<<: *base, name: gpu, replicas: 2}]}}
";
    let translated = translated(text);
    let merges = ["flags.<<", "flags.plugin.<<", "sharing.timeSlicing.resources[0].<<"];
    let refused = translated.findings.iter().filter(|finding| finding.refused);
    assert_eq!(refused.map(|finding| finding.key.as_str()).collect::<Vec<_>>(), merges);
    let refused = translated.refusal.to_string();
    assert!(
        refused.contains("line 3, column 8: flags.<<: ") && refused.contains("write the keys"),
        "{refused}"
    );
    // The unresolved merge is reported with the error that it causes.
    let error = translate(&document("base: &base {}\nsharing: {timeSlicing: {<<: *base}}\n")).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("names no resource") && error.contains("timeSlicing.<<"), "{error}");
}

#[test]
fn an_error_of_nvidias_plugin_is_an_error_with_its_line() {
    let one = |text: &str| shared(&format!("{{resources: [{text}]}}"));
    for (text, expected) in [
        ("version: v2", "version: unknown version \"v2\""),
        ("flags: {migStrategy: both}", "flags.migStrategy: \"both\" is not one of"),
        ("flags: {failOnInitError: maybe}", "flags.failOnInitError: must be true or false"),
        ("flags: []", "flags: must be a mapping"),
        ("flags: {deviceDiscoveryStrategy: x}", "flags.deviceDiscoveryStrategy"),
        ("flags: {plugin: {deviceListStrategy: env}}", "flags.plugin.deviceListStrategy: env is not one of"),
        ("flags: {plugin: {deviceListStrategy: \"envvar,cdi-cri\"}}", "flags.plugin.deviceListStrategy"),
        ("flags: {plugin: {deviceIDStrategy: name}}", "neither uuid nor index"),
        ("flags: {plugin: {sharedDevicesAllocationPolicy: x}}", "neither distributed nor packed"),
        ("resources: {gpus: [{pattern: x}]}", "resources.gpus[0]: needs `pattern` and `name`"),
        ("sharing: {timeSlicing: {}}", "sharing.timeSlicing.resources: names no resource"),
        ("sharing: {timeSlicing: null}", "names no resource"),
        ("sharing: {mps: {resources: []}}", "sharing.mps.resources: names no resource"),
        (&one("{replicas: 2}"), "resources[0]: needs a `name`"),
        (&one("{name: gpu}"), "resources[0].replicas: must be a number, 2 or more"),
        (&one("{name: gpu, replicas: 1}"), "2 or more"),
        (&one("{name: gpu, replicas: -1}"), "2 or more"),
        (&one("{name: \"4\", replicas: \"4\"}"), "2 or more"),
        (&one("{name: $invalid$, replicas: 2}"), "is not a resource name"),
        (&one("{name: gpu, replicas: 2, rename: $invalid$}"), "resources[0].rename"),
        (&one(&format!("{{name: {}, replicas: 2}}", "g".repeat(53))), "at most 63"),
        (&one("{name: gpu, replicas: 2, devices: some}"), "resources[0].devices: must be `all`"),
        (&one("{name: gpu, replicas: 2, devices: -2}"), "devices"),
        (&one("{name: gpu, replicas: 2, devices: 2.5}"), "devices"),
        (&one("{name: gpu, replicas: 2, devices: [-1]}"), "devices"),
        (&one("{name: gpu, replicas: 2, devices: [GPU-UUID]}"), "devices"),
        (
            &one("{name: gpu, replicas: 2, devices: [MIG-GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c]}"),
            "devices",
        ),
        ("imex: {channelIDs: [1]}", "imex.channelIDs: must be [] or [0]"),
    ] {
        let error = translate(&document(text)).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let both = translate(&document("version: v2\nflags: {migStrategy: both}")).unwrap_err().to_string();
    for line in [
        "line 1, column 10: version: unknown version \"v2\"",
        "line 2, column 22: flags.migStrategy: \"both\"",
    ] {
        assert!(both.contains(line), "all errors are reported, with lines: {both}");
    }
}

#[test]
fn every_form_of_a_device_is_accepted() {
    for device in [
        "all",
        "2",
        "[0]",
        "[\"0\"]",
        "[\"0:1\"]",
        "[GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c]",
        "[MIG-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c]",
        "[MIG-GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c/0/0]",
    ] {
        let text = shared(&format!("{{resources: [{{name: gpu, replicas: 2, devices: {device}}}]}}"));
        assert_eq!(stack(&text).len(), 1, "{device}");
    }
}

#[test]
fn a_key_with_line_ends_becomes_a_comment_of_one_line() {
    let text = "flags: {\"a\\nstack: [{policy: exclusive}]\\n\": 1}";
    let translated = translated(text);
    assert_eq!(translated.yaml.lines().count(), 1, "{}", translated.yaml);
    assert_eq!(translated.file.stack, None);
}

#[test]
fn flags_win_over_the_file() {
    let policies = |policy: &str, text: &str| {
        let args =
            NvidiaArgs { shared_devices_allocation_policy: Some(policy.into()), ..NvidiaArgs::default() };
        let args = ServeArgs { nvidia: args, ..ServeArgs::default() };
        let config = Config::merge(&args, translated(text).file).unwrap();
        config.offers.stack.iter().map(|entry| entry.policy.clone()).collect::<Vec<_>>()
    };
    let text = shared("{resources: [{name: gpu, replicas: 2}]}");
    assert_eq!(policies("packed", &text), ["binpack", "timeslice"]);
    let packed = "flags: {plugin: {sharedDevicesAllocationPolicy: packed}}";
    assert_eq!(policies("packed", packed), ["binpack"]);
    assert_eq!(policies("distributed", packed), [""; 0]);
}

#[test]
fn unused_variables_are_reported() {
    let set = |name: &str| ["GFD_ONESHOT", "NVIDIA_CTK_PATH"].contains(&name).then(|| "x".to_owned());
    let lines = unused_environment_notices(set);
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines.iter().all(|line| line.starts_with("set, not used: ") && line.contains("=\"x\": ")));
    assert!(unused_environment_notices(|_| Some(String::new())).is_empty());
}

#[test]
fn unused_flags_of_nvidias_are_reported_and_needed_ones_are_refused() {
    let with = |args: NvidiaArgs| ServeArgs { nvidia: args, ..ServeArgs::default() };
    let load = |args: NvidiaArgs| Config::merge(&with(args), FileConfig::default());
    let zero = || vec!["0".to_owned()];
    let config = load(NvidiaArgs {
        kubelet_socket: Some("/run/kubelet.sock".into()),
        mps_root: Some("/run/nvidia/mps".into()),
        imex_channel_ids: zero(),
        cdi_feature_flags: vec!["a".into(), "b".into()],
        ..NvidiaArgs::default()
    });
    let notices = config.unwrap().loaded.notices;
    for name in ["KUBELET_SOCKET", "IMEX_CHANNEL_IDS=\"0\"", "MPS_ROOT", "CDI_FEATURE_FLAGS=\"a,b\""] {
        assert!(
            notices.iter().any(|line| line.starts_with(&format!("set, not used: {name}"))),
            "{notices:?}"
        );
    }
    let required =
        load(NvidiaArgs { imex_channel_ids: zero(), imex_required: Some(true), ..NvidiaArgs::default() });
    assert!(required.unwrap_err().to_string().contains("leave NVIDIA's plugin"));
    let wrong = load(NvidiaArgs { imex_channel_ids: vec!["1".into()], ..NvidiaArgs::default() });
    assert!(wrong.unwrap_err().to_string().contains("an empty value or 0"));
    let socket = "/k/device-plugins/kubelet.sock";
    let by_socket = || NvidiaArgs { kubelet_socket: Some(socket.into()), ..NvidiaArgs::default() };
    let config = load(by_socket()).unwrap();
    assert_eq!(config.kubelet.device_plugins_dir.to_str(), Some("/k/device-plugins"));
    assert_eq!(config.loaded.notices.len(), 0);
    let empty = load(NvidiaArgs { kubelet_socket: Some("".into()), ..NvidiaArgs::default() }).unwrap();
    assert_eq!(empty.loaded.notices, [""; 0]);

    // Berth's own flags are set, too.
    let nvidia = NvidiaArgs { config_file: Some("/n.yaml".into()), ..by_socket() };
    let notices = |config: &str, kubelet: &str| {
        let (config, kubelet_dir) = (Some(config.into()), Some(kubelet.into()));
        let args = ServeArgs { config, kubelet_dir, ..with(nvidia.clone()) };
        Config::merge(&args, FileConfig::default()).unwrap().loaded.notices
    };
    assert_eq!(notices("/n.yaml", "/k"), [""; 0]);
    let notices = notices("/c.yaml", "/j");
    assert_eq!(notices.len(), 2, "{notices:?}");
    assert!(notices[0].starts_with("set, not used: CONFIG_FILE=\"/n.yaml\": --config is set, too"));
    assert!(notices[1].starts_with(&format!("set, not used: KUBELET_SOCKET=\"{socket}\": --kubelet-dir is")));
}
