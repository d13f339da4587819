use super::*;
use berth_config::{FileConfig, ServeArgs};
use berth_gpus::cdi::Spec;
use berth_kernel::hardware::gpu::{MIG_INDEX, Mig};
use berth_kernel::ids::names::{GpuId, PartId};
use berth_kernel::ids::pci::PciBusId;
use std::fs;

/// A node with containerd 2, a driver and GPU 0.
struct TestNode {
    root: tempfile::TempDir,
    parts: Vec<Part>,
    held: BTreeSet<String>,
}

impl TestNode {
    fn new() -> Self {
        let node =
            Self { root: tempfile::tempdir().unwrap(), parts: vec![part("GPU-0", 0)], held: BTreeSet::new() };
        node.write("etc/containerd/config.toml", "version = 3\n");
        for file in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"] {
            node.write(&format!("driver/dev/{file}"), "");
        }
        node.write("driver/usr/lib64/libcuda.so.580.1", "");
        node
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        fs::write(self.path(path), text).unwrap();
    }

    fn write_nvidias(&self, devices: &[&str]) {
        let devices: Vec<_> = devices.iter().map(|name| format!("{{name: \"{name}\"}}")).collect();
        let text = format!("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{}]\n", devices.join(", "));
        self.write("var/run/cdi/nvidia.yaml", &text);
    }

    fn finder(&self, more: &str) -> StrategyFinder {
        let driver = self.path("driver");
        self.configured_finder(&format!("containerEdits: {{nvidiaDriverRoot: {}}}\n{more}", driver.display()))
    }

    fn configured_finder(&self, yaml: &str) -> StrategyFinder {
        let mut config = Config::merge(&ServeArgs::default(), FileConfig::parse(yaml).unwrap()).unwrap();
        config.containers.edits.driver_root_in_container = self.path("driver");
        StrategyFinder::new(&config, self.root.path(), false)
    }

    fn find(&self, finder: &mut StrategyFinder, access: Access) -> Strategy {
        let parts: Vec<&Part> = self.parts.iter().collect();
        finder.find_for(&parts, &self.held, &NodeVersions::default(), access)
    }

    fn own_file(&self) -> PathBuf {
        self.path("var/run/cdi/berth-gpu.json")
    }

    /// The devices of our own specification.
    fn names(&self) -> Vec<String> {
        Spec::read(&self.own_file()).unwrap().devices.into_iter().map(|device| device.name).collect()
    }
}

fn part(id: &str, index: u32) -> Part {
    Part {
        minor: Some(index),
        pci_bus: PciBusId::parse(&format!("00000000:0{index}:00.0")).ok(),
        ..Part::whole_gpu(GpuId::parse(id).unwrap(), index)
    }
}

fn kind(strategy: &Strategy) -> Option<&str> {
    match &strategy.resolution {
        Resolution::Works { cdi_kind, .. } => cdi_kind.as_deref(),
        Resolution::NoStrategy(error) => panic!("{error}"),
    }
}

#[test]
fn our_own_specification_is_made_where_no_other_names_every_part() {
    let mut node = TestNode::new();
    let mut finder = node.finder("");
    let found = node.find(&mut finder, Access::Write);
    assert_eq!(kind(&found), Some(OWN_KIND));
    assert_eq!(node.names(), ["0", "GPU-0"]);
    assert!(found.warnings[0].contains("nvidia-cdi-hook"), "{:?}", found.warnings);
    // Another one that names every part is used, and ours stays for the containers that were given its names.
    node.write_nvidias(&["GPU-0"]);
    assert_eq!(kind(&node.find(&mut finder, Access::Write)), Some("nvidia.com/gpu"));
    assert!(node.own_file().exists());
    // One that is out of date is not used.
    node.parts.push(part("GPU-1", 1));
    assert_eq!(kind(&node.find(&mut finder, Access::Write)), Some(OWN_KIND));
    assert_eq!(node.names(), ["0", "1", "GPU-0", "GPU-1"]);
}

#[test]
fn no_specification_is_made_where_another_names_every_part() {
    let node = TestNode::new();
    node.write_nvidias(&["GPU-0"]);
    assert_eq!(kind(&node.find(&mut node.finder(""), Access::Write)), Some("nvidia.com/gpu"));
    assert!(!node.own_file().exists());
    assert_eq!(kind(&node.find(&mut node.finder("cdi: {generate: always}"), Access::Write)), Some(OWN_KIND));
}

#[test]
fn a_deleted_or_changed_file_is_written_again() {
    let node = TestNode::new();
    let mut finder = node.finder("");
    node.find(&mut finder, Access::Write);
    let written = fs::read_to_string(node.own_file()).unwrap();
    fs::remove_file(node.own_file()).unwrap();
    node.find(&mut finder, Access::Write);
    assert_eq!(fs::read_to_string(node.own_file()).unwrap(), written);
    fs::write(node.own_file(), "{}").unwrap();
    node.find(&mut finder, Access::Write);
    assert_eq!(fs::read_to_string(node.own_file()).unwrap(), written);
    // After a restart the file has it already.
    let before = fs::metadata(node.own_file()).unwrap().modified().unwrap();
    node.find(&mut node.finder(""), Access::Write);
    assert_eq!(fs::metadata(node.own_file()).unwrap().modified().unwrap(), before);
}

#[test]
fn another_driver_and_other_instances_change_the_file() {
    let mut node = TestNode::new();
    let mut finder = node.finder("");
    let gpu = Part { mig_enabled: true, ..part("GPU-1", 1) };
    let instance = Part {
        gpu: gpu.gpu.clone(),
        mig: Some(Mig { profile: "1g.10gb".into(), gpu_instance: 7, compute_instance: 0 }),
        attributes: BTreeMap::from([(MIG_INDEX.to_owned(), "2".to_owned())]),
        ..part("MIG-1", 1)
    };
    node.parts.extend([gpu, instance]);
    node.find(&mut finder, Access::Write);
    assert_eq!(node.names(), ["0", "1:2", "GPU-0", "MIG-1"]);
    // The instance is gone; the name that a container holds stays.
    node.parts.pop();
    node.held.insert("MIG-1".into());
    node.find(&mut finder, Access::Write);
    assert_eq!(node.names(), ["0", "GPU-0", "MIG-1"]);
    fs::rename(
        node.path("driver/usr/lib64/libcuda.so.580.1"),
        node.path("driver/usr/lib64/libcuda.so.590.2"),
    )
    .unwrap();
    node.find(&mut finder, Access::Write);
    let mounts = Spec::read(&node.own_file()).unwrap().container_edits.mounts;
    assert!(mounts.iter().any(|mount| mount.container_path == "/usr/lib64/libcuda.so.590.2"), "{mounts:?}");
    assert!(mounts.iter().all(|mount| !mount.container_path.contains("580")), "{mounts:?}");
}

/// What may be granted.
fn named(strategy: &Strategy) -> Option<Vec<&str>> {
    Some(strategy.named_parts.as_ref()?.iter().map(PartId::as_str).collect())
}

#[test]
fn only_parts_that_the_specification_names_may_be_granted() {
    let mut node = TestNode::new();
    let mut finder = node.finder("");
    assert_eq!(named(&node.find(&mut finder, Access::Write)), Some(vec!["GPU-0"]));
    // Its device node does not exist yet, so a container with its name would get nothing.
    node.parts.push(part("GPU-7", 7));
    let found = node.find(&mut finder, Access::Write);
    assert_eq!(named(&found), Some(vec!["GPU-0"]));
    assert!(found.warnings.iter().any(|text| text.contains("/dev/nvidia7")), "{:?}", found.warnings);
    node.write("driver/dev/nvidia7", "");
    assert_eq!(named(&node.find(&mut finder, Access::Write)), Some(vec!["GPU-0", "GPU-7"]));
    // The same without a change, and after a restart, when the file is as it should be.
    assert_eq!(named(&node.find(&mut finder, Access::Write)), Some(vec!["GPU-0", "GPU-7"]));
    assert_eq!(named(&node.find(&mut node.finder(""), Access::Write)), Some(vec!["GPU-0", "GPU-7"]));
    // No specification names a GPU in MIG mode as a whole.
    node.parts.push(Part { mig_enabled: true, ..part("GPU-1", 1) });
    for (strategy, is_offered) in [("none", true), ("mixed", false)] {
        let found = node.find(&mut node.finder(&format!("migStrategy: {strategy}")), Access::Write);
        assert_eq!(named(&found), Some(vec!["GPU-0", "GPU-7"]));
        let is_warned = found.warnings.iter().any(|text| text.contains("GPU-1 is in MIG mode"));
        assert_eq!(is_warned, is_offered, "{:?}", found.warnings);
    }
    node.parts.pop();
    // A strategy that was configured stays if a foreign specification lacks a GPU, which is then withheld.
    let configured = "containerEdits: {deviceListStrategy: [cdi-cri]}\ncdi: {generate: never}";
    node.write_nvidias(&["GPU-0"]);
    let found = node.find(&mut node.configured_finder(configured), Access::Write);
    assert_eq!(named(&found), Some(vec!["GPU-0"]));
    let Resolution::Works { warning: Some(warning), .. } = &found.resolution else { panic!("{found:?}") };
    assert!(warning.what.contains("nvidia.com/gpu=GPU-7"), "{warning}");
    // Its folder may be hidden from Berth, so nothing is known.
    fs::remove_file(node.path("var/run/cdi/nvidia.yaml")).unwrap();
    assert_eq!(named(&node.find(&mut node.configured_finder(configured), Access::Write)), None);
    // Without CDI no name is needed.
    let envvar = "containerEdits: {deviceListStrategy: [envvar]}";
    assert_eq!(named(&node.find(&mut node.configured_finder(envvar), Access::Write)), None);
}

#[test]
fn a_configuration_of_the_runtime_that_is_half_written_changes_nothing() {
    let node = TestNode::new();
    let mut finder = node.finder("");
    let mut find = || node.find(&mut finder, Access::Write);
    let nvidia = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = \"nvidia\"\n";
    assert_eq!(kind(&find()), Some(OWN_KIND));
    for half in ["", "version = 2\n[plu", nvidia] {
        node.write("etc/containerd/config.toml", half);
        assert_eq!(kind(&find()), Some(OWN_KIND), "{half}");
    }
    std::thread::sleep(settled::SETTLE_TIME);
    assert_eq!(kind(&find()), None, "the last one stayed");
}

#[test]
fn a_check_writes_nothing_and_a_node_without_a_strategy_is_told_why() {
    let node = TestNode::new();
    assert_eq!(kind(&node.find(&mut node.finder(""), Access::Read)), Some(OWN_KIND));
    assert!(!node.own_file().exists());
    let found = node.find(&mut node.finder("cdi: {generate: never}"), Access::Write);
    let Resolution::NoStrategy(error) = found.resolution else { panic!("{found:?}") };
    assert!(error.what.contains("no CDI specification of the kind nvidia.com/gpu"), "{error}");
    node.write("etc/containerd/config.toml", "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = \"nvidia\"\n");
    assert_eq!(kind(&node.find(&mut node.finder(""), Access::Write)), None);
    assert!(!node.own_file().exists(), "it is not needed");
    fs::remove_file(node.path("etc/containerd/config.toml")).unwrap();
    let found = node.find(&mut node.finder(""), Access::Write);
    assert!(matches!(found.resolution, Resolution::NoStrategy(_)));
}

/// Why no strategy works.
fn refusal(strategy: &Strategy) -> String {
    match &strategy.resolution {
        Resolution::NoStrategy(error) => error.to_string(),
        works => panic!("{works:?}"),
    }
}

/// A CDI specification has no names by UUID, and no container starts.
/// Report: https://github.com/NVIDIA/nvidia-container-toolkit/issues/1895
#[test]
fn a_specification_that_names_gpus_by_index_alone_is_refused_with_the_setting_that_takes_it() {
    let node = TestNode::new();
    node.write_nvidias(&["0"]);
    let found = node.find(&mut node.finder("cdi: {generate: never}"), Access::Write);
    assert!(refusal(&found).contains("(set containerEdits.deviceIdStrategy: index)"), "{found:?}");
    let index = |driver: &Path| {
        format!(
            "containerEdits: {{nvidiaDriverRoot: {}, deviceIdStrategy: index}}\ncdi: {{generate: never}}",
            driver.display()
        )
    };
    let found = node.find(&mut node.configured_finder(&index(&node.path("driver"))), Access::Write);
    assert_eq!(kind(&found), Some("nvidia.com/gpu"), "the remedy works");
    node.write_nvidias(&["GPU-0"]);
    let found = node.find(&mut node.configured_finder(&index(&node.path("driver"))), Access::Write);
    assert!(refusal(&found).contains("(set containerEdits.deviceIdStrategy: uuid)"), "{found:?}");
}

#[test]
fn the_files_that_make_a_specification_useless_are_named() {
    let node = TestNode::new();
    node.write_nvidias(&["GPU-0"]);
    fs::copy(node.path("var/run/cdi/nvidia.yaml"), node.path("var/run/cdi/old.yaml")).unwrap();
    let never = || node.find(&mut node.finder("cdi: {generate: never}"), Access::Write);
    let text = refusal(&never());
    assert!(
        text.contains("nvidia.yaml and ") && text.contains("old.yaml both name it (delete one"),
        "{text}"
    );
    fs::remove_file(node.path("var/run/cdi/old.yaml")).unwrap();
    assert_eq!(kind(&never()), Some("nvidia.com/gpu"), "the remedy works");
    node.write("var/run/cdi/nvidia.yaml", "{");
    let text = refusal(&never());
    assert!(text.contains("nvidia.yaml is not a CDI specification: "), "{text}");
}

#[test]
fn specifications_count_only_in_folders_that_the_runtime_reads() {
    let node = TestNode::new();
    let settings = "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\ncdi_spec_dirs = ";
    node.write("etc/containerd/config.toml", &format!("{settings}[\"/run/cdi\"]\n"));
    node.write_nvidias(&["GPU-0"]);
    assert_eq!(
        kind(&node.find(&mut node.finder(""), Access::Write)),
        Some("nvidia.com/gpu"),
        "/var/run is /run"
    );
    fs::rename(node.path("var/run/cdi"), node.path("etc/cdi")).unwrap();
    assert_eq!(
        kind(&node.find(&mut node.finder(""), Access::Write)),
        Some(OWN_KIND),
        "no runtime reads /etc/cdi"
    );
    node.write("etc/containerd/config.toml", &format!("{settings}[\"/opt/cdi\"]\n"));
    let found = node.find(&mut node.finder(""), Access::Write);
    assert!(refusal(&found).contains("(set cdi.folders: [/opt/cdi])"), "{found:?}");
    let found = node.find(&mut node.finder("cdi: {folders: [/opt/cdi]}"), Access::Write);
    assert_eq!(kind(&found), Some(OWN_KIND), "the remedy works");
}

#[test]
fn missing_device_nodes_are_named_where_berth_passes_them() {
    let node = TestNode::new();
    fs::remove_file(node.path("driver/dev/nvidia-uvm")).unwrap();
    let found = node.find(&mut node.finder(""), Access::Write);
    // The machine's own /dev is searched, too.
    let is_missing = !Path::new("/dev/nvidia-uvm").exists();
    assert_eq!(found.missing_nodes.is_some_and(|text| text.contains("/dev/nvidia-uvm")), is_missing);
    node.write("etc/containerd/config.toml", "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = \"nvidia\"\n");
    assert_eq!(node.find(&mut node.finder(""), Access::Write).missing_nodes, None, "the runtime passes them");
}
