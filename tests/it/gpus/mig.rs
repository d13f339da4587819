//! MIG by strategy and MPS by configuration: the real binary over the fake NVML, with the stand-in kubelet.

use crate::support::gpus::{SHARED, WHOLE};
use crate::support::process_node::{DaemonProcess, ProcessNode};
use crate::support::wait::{SOON, until};
use fake_nvml::{Installed, State};
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::path::Path;
use tempfile::TempDir;

const SMALL: &str = "nvidia.com/mig-1g.10gb";
const MEDIUM: &str = "nvidia.com/mig-2g.20gb.me";
const LARGE: &str = "nvidia.com/mig-3g.40gb";

/// The setting with the configuration of a containerd without CDI whose default runtime is NVIDIA's, in this folder.
pub(crate) fn nvidia_runtime(folder: &Path) -> String {
    let file = folder.join("config.toml");
    let section = "[plugins.\"io.containerd.grpc.v1.cri\".containerd]";
    std::fs::write(&file, format!("version = 2\n{section}\ndefault_runtime_name = \"nvidia\"\n")).unwrap();
    format!("containerRuntime: {{configFiles: [{}]}}", file.display())
}

/// A [`ProcessNode`] whose driver is the fake NVML.
pub(crate) struct Rig {
    pub(crate) node: ProcessNode,
    pub(crate) nvml: Installed,
    pub(crate) folder: TempDir,
}

impl Rig {
    pub(crate) async fn new(state: &State, settings: &str) -> Self {
        Self::with_runtime(state, settings, nvidia_runtime).await
    }

    /// `runtime` is called with a folder and returns the setting with the container runtime's configuration.
    pub(crate) async fn with_runtime(state: &State, settings: &str, runtime: fn(&Path) -> String) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let nvml = Installed::new(folder.path(), state).unwrap();
        let library = nvml.library().display();
        let runtime = runtime(folder.path());
        let node =
            ProcessNode::new(&format!("gpus: nvml\nnvmlLibrary: {library}\n{runtime}\n{settings}")).await;
        Self { node, nvml, folder }
    }

    pub(crate) async fn allocatable(&self, expected: &[(&str, usize)]) {
        for (resource, count) in expected {
            self.node.kubelet.wait_allocatable(resource, *count, SOON).await.unwrap();
        }
    }

    fn visible(&self, uid: &str) -> String {
        self.node.kubelet.view(uid, "main").unwrap().envs["NVIDIA_VISIBLE_DEVICES"].clone()
    }

    fn listed(&self, resource: &str) -> BTreeMap<String, String> {
        self.node.kubelet.listed(resource)
    }
}

/// What `/node` says of MIG: whether it is well, and why not.
fn mig_check(daemon: &DaemonProcess) -> (bool, String) {
    let node = daemon.call("GET", "/node", &Value::Null);
    let checks = node["checks"].as_array().unwrap();
    let mig = checks.iter().find(|check| check["name"] == "mig").unwrap();
    (mig["ok"].as_bool().unwrap(), mig["detail"].as_str().unwrap_or_default().to_owned())
}

/// A GPU outside of MIG mode, one with three instances, and one whose instance has media extensions.
fn split_node() -> State {
    let mut state = State::h100(3);
    state.split(1, &[1, 1, 3]);
    state.split(2, &[2]);
    state.gpus[2].mig.as_mut().unwrap().instances[0].profile += "+me";
    state
}

fn instance(state: &State, gpu: usize, at: usize) -> String {
    state.gpus[gpu].mig.as_ref().unwrap().instances[at].uuid.clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_registers_every_profile_in_addition_to_whole_gpus() {
    let state = split_node();
    let rig = Rig::new(&state, "migStrategy: mixed").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 1), (SMALL, 2), (LARGE, 1), (MEDIUM, 1)]).await;
    assert_eq!(rig.node.kubelet.resources().len(), 4);
    let pod = rig.node.start("small", SMALL, 1).await.unwrap();
    let held = rig.node.kubelet.held(&pod, "main", SMALL).pop_first().unwrap();
    assert!([instance(&state, 1, 0), instance(&state, 1, 1)].contains(&held));
    assert_eq!(rig.visible(&pod), held);
    let pod = rig.node.start("medium", MEDIUM, 1).await.unwrap();
    assert_eq!(rig.visible(&pod), instance(&state, 2, 0));
    let pod = rig.node.start("whole", WHOLE, 1).await.unwrap();
    assert_eq!(rig.visible(&pod), state.gpus[0].uuid);
    // One instance held takes nothing from the others of its GPU.
    rig.node.start("large", LARGE, 1).await.unwrap();
    rig.node.start("second", SMALL, 1).await.unwrap();
    rig.node.start("third", SMALL, 1).await.unwrap_err();
    assert_eq!(mig_check(&daemon), (true, String::new()));
    assert_eq!(rig.node.kubelet.anomalies(), []);
}

/// The strategy single with different MIG layouts: the plugin panics.
/// Report: https://github.com/NVIDIA/gpu-operator/issues/460
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_lists_instances_as_gpus_and_refuses_mixed_layouts_with_a_message() {
    let mut state = State::h100(2);
    state.split(0, &[1, 1]);
    state.split(1, &[1, 1]);
    let rig = Rig::new(&state, "migStrategy: single\ncontainerEdits: {deviceIdStrategy: index}").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 4)]).await;
    assert_eq!(rig.node.kubelet.resources().len(), 1);
    let pod = rig.node.start("a", WHOLE, 1).await.unwrap();
    let held = rig.node.kubelet.held(&pod, "main", WHOLE).pop_first().unwrap();
    let place = (0..4).map(|n| (n / 2, n % 2)).find(|(gpu, at)| instance(&state, *gpu, *at) == held);
    let (gpu, at) = place.unwrap();
    assert_eq!(rig.visible(&pod), format!("{gpu}:{at}"));

    // The other GPU is partitioned differently.
    let other = 1 - gpu;
    rig.nvml
        .change(|state| {
            state.split(other, &[3]);
            let large = &mut state.gpus[other].mig.as_mut().unwrap().instances[0];
            large.uuid = "MIG-00000000-0000-4000-8000-000000000003".into();
        })
        .unwrap();
    until("a message about MIG", || !mig_check(&daemon).0);
    let words = mig_check(&daemon).1;
    assert!(words.contains(&format!("3g.40gb on GPU {other}")) && words.contains("mixed"), "{words}");
    until("the log's line", || daemon.log().contains("3g.40gb on GPU"));
    // The held device stays allocatable, and no other device is.
    rig.allocatable(&[(WHOLE, 1)]).await;
    assert_eq!(rig.listed(WHOLE)[&held], "Healthy");
    rig.node.start("b", WHOLE, 1).await.unwrap_err();

    rig.nvml.change(|state| drop(state.split(other, &[1, 1]))).unwrap();
    rig.allocatable(&[(WHOLE, 4)]).await;
    until("no error of MIG", || mig_check(&daemon).0);
    rig.node.start("c", WHOLE, 3).await.unwrap();
    assert_eq!(rig.node.kubelet.anomalies(), []);
}

/// A node of the strategy `mixed` with a pod that holds a small instance of GPU 1; the pod's UID and the instance.
async fn with_held_instance(state: &State) -> (Rig, DaemonProcess, String, String) {
    let rig = Rig::new(state, "migStrategy: mixed").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 1), (SMALL, 2), (LARGE, 1), (MEDIUM, 1)]).await;
    let pod = rig.node.start("small", SMALL, 1).await.unwrap();
    let held = rig.node.kubelet.held(&pod, "main", SMALL).pop_first().unwrap();
    (rig, daemon, pod, held)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_change_of_strategy_held_devices_stay_listed_until_they_are_free() {
    let state = split_node();
    let (rig, daemon, pod, held) = with_held_instance(&state).await;
    daemon.stop();

    let daemon = rig.node.serve_with(&["--mig-strategy", "none"]);
    // GPU 2 is whole now. GPU 1 is not allocatable while one of its instances is held (I2).
    rig.allocatable(&[(WHOLE, 2), (SMALL, 1)]).await;
    assert_eq!(rig.listed(WHOLE)[&state.gpus[1].uuid], "Unhealthy");
    assert_eq!(rig.listed(SMALL)[&held], "Healthy");
    assert!(mig_check(&daemon).1.contains("GPU 1 ("), "{:?}", mig_check(&daemon));
    rig.node.start("two", WHOLE, 2).await.unwrap();
    rig.node.start("three", WHOLE, 1).await.unwrap_err();

    rig.node.kubelet.delete(&pod);
    rig.allocatable(&[(WHOLE, 3), (SMALL, 0)]).await;
    let pod = rig.node.start("three", WHOLE, 1).await.unwrap();
    assert_eq!(rig.visible(&pod), state.gpus[1].uuid);
    daemon.stop();

    // With the former strategy again: the GPU is held as a whole, and so none of its instances is allocatable.
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 3), (SMALL, 0), (LARGE, 0)]).await;
    rig.node.kubelet.delete(&pod);
    rig.allocatable(&[(SMALL, 2), (LARGE, 1)]).await;
    assert_eq!(rig.node.kubelet.anomalies(), []);
    drop(daemon);
}

/// The same change of strategy by the configuration file of a running daemon.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_strategy_that_the_file_changes_is_applied_while_an_instance_is_held() {
    let state = split_node();
    let (rig, daemon, pod, held) = with_held_instance(&state).await;
    let change = |strategy: &str| {
        let text = rig.node.settings.replace("migStrategy: mixed", &format!("migStrategy: {strategy}"));
        std::fs::write(rig.node.folder.path().join("config.yaml"), text).unwrap();
        daemon.signal("-HUP");
    };
    change("none");
    rig.allocatable(&[(WHOLE, 2), (SMALL, 1), (LARGE, 0), (MEDIUM, 0)]).await;
    assert_eq!(rig.listed(WHOLE)[&state.gpus[1].uuid], "Unhealthy");
    assert_eq!(rig.listed(SMALL)[&held], "Healthy");
    rig.node.kubelet.delete(&pod);
    rig.allocatable(&[(WHOLE, 3), (SMALL, 0)]).await;
    let pod = rig.node.start("three", WHOLE, 1).await.unwrap();
    change("mixed");
    rig.allocatable(&[(MEDIUM, 1)]).await;
    rig.node.kubelet.delete(&pod);
    rig.allocatable(&[(WHOLE, 1), (SMALL, 2), (LARGE, 1), (MEDIUM, 1)]).await;
    assert_eq!(rig.node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resource_with_mps_needs_its_daemon_and_containers_get_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let pipes = folder.path().join("pipe");
    std::fs::create_dir(&pipes).unwrap();
    let (pipe, shown) = (pipes.display(), pipes.to_str().unwrap());
    let rig = Rig::new(
        &State::h100(1),
        &format!(
            "stack: [{{ policy: timeslice, parameters: {{ replicas: 4 }} }}]\n\
             containerEdits: {{resources: {{{SHARED}: {{mps: {{pipeDirectory: {pipe}}}}}}}}}"
        ),
    )
    .await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(SHARED, 4)]).await;
    let refused = rig.node.start("early", SHARED, 1).await.unwrap_err();
    assert!(refused.contains("MPS") && refused.contains(shown), "{refused}");

    let _daemon = UnixListener::bind(pipes.join("control")).unwrap();
    let pod = rig.node.start("late", SHARED, 1).await.unwrap();
    let view = rig.node.kubelet.view(&pod, "main").unwrap();
    assert_eq!(view.envs["CUDA_MPS_PIPE_DIRECTORY"], shown);
    assert_eq!(view.envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], format!("0={}M", 81_559 / 4));
    assert_eq!(view.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], "25");
    let mounts: Vec<_> =
        view.mounts.iter().map(|m| (m.host_path.as_str(), m.container_path.as_str())).collect();
    assert_eq!(mounts, [(shown, shown), ("/dev/shm", "/dev/shm")]);
    // The API shows the same limit, and what enforces it.
    let limits = &daemon.live()[0]["limits"];
    assert_eq!(
        (&limits["memoryMiB"], &limits["enforcedBy"]),
        (&(81_559 / 4).into(), &"mps".into()),
        "{limits}"
    );
}
