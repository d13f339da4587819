//! Berth's own CDI specification, compared with that of nvidia-ctk for the same driver, and `berth cdi check`.

use crate::gpus::mig::{Rig, nvidia_runtime};
use crate::support::gpus::WHOLE;
use crate::support::process_node::ended;
use crate::support::wait::{SOON, until};
use berth_gpus::cdi::{Driver, Spec, compare, fingerprint, generate};
use berth_kernel::hardware::device_nodes::HostFolder;
use berth_kernel::hardware::gpu::{Mig, Part};
use berth_kernel::ids::names::{GpuId, PartId};
use berth_kernel::ids::pci::PciBusId;
use disk_faults::{Fault as DiskFault, Faults};
use fake_nvml::State;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// What nvidia-ctk 1.20.2 made of the driver root of tests/e2e/driver_root.py; `just cdi-compare --update` writes it
/// again.
const GOLDEN: &str = include_str!("../data/cdi/nvidia-ctk-1.20.2.json");
/// The driver's version there.
const VERSION: &str = "570.172.08";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// Base of the name, soname, and links beside the library, as in driver_root.py.
const NAMES: [(&str, &str, &[&str]); 7] = [
    ("libcuda.so", "libcuda.so.1", &["libcuda.so.1", "libcuda.so"]),
    ("libnvidia-ml.so", "", &["libnvidia-ml.so.1"]),
    ("libnvidia-ptxjitcompiler.so", "libnvidia-ptxjitcompiler.so.1", &["libnvidia-ptxjitcompiler.so.1"]),
    ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1", &["libnvidia-opticalflow.so.1"]),
    ("libnvidia-gpucomp.so", "", &[]),
    ("libGLX_nvidia.so", "libGLX_nvidia.so.0", &["libGLX_nvidia.so.0"]),
    ("vdpau/libvdpau_nvidia.so", "libvdpau_nvidia.so.1", &["libvdpau_nvidia.so.1"]),
];

/// The same driver, with plain files for device nodes.
struct DriverRoot(tempfile::TempDir);

impl DriverRoot {
    fn new() -> Self {
        let root = Self(tempfile::tempdir().unwrap());
        for (base, soname, links) in NAMES {
            let path = root.path(&format!("driver/{LIBRARIES}/{base}.{VERSION}"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let mut compiler = Command::new("cc");
            compiler.args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-o"]).arg(&path);
            if !soname.is_empty() {
                compiler.arg(format!("-Wl,-soname,{soname}"));
            }
            assert!(compiler.status().unwrap().success());
            for link in links {
                let target = if link.ends_with(".so") {
                    Path::new(soname)
                } else {
                    path.file_name().unwrap().as_ref()
                };
                symlink(target, path.with_file_name(link)).unwrap();
            }
        }
        let programs = [
            "nvidia-smi",
            "nvidia-debugdump",
            "nvidia-persistenced",
            "nvidia-cuda-mps-control",
            "nvidia-cuda-mps-server",
        ];
        for program in programs {
            root.write(&format!("driver/usr/bin/{program}"), "");
        }
        for node in ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia0", "nvidia1"] {
            root.write(&format!("driver/dev/{node}"), "");
        }
        root.write("driver/run/nvidia-persistenced/socket", "");
        root.write(&format!("driver/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"), "");
        root.write("driver/etc/vulkan/icd.d/nvidia_icd.json", "{}");
        root.write(
            "nvidia-cdi-hook",
            "enable-cuda-compat disable-device-node-modification update-application-profile apply-cuda-memory-limits",
        );
        root
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        fs::write(self.path(path), text).unwrap();
    }

    fn driver(&self, hook: Option<&str>) -> Driver {
        let root = HostFolder::same(self.path("driver"));
        Driver {
            nodes: vec![root.clone()],
            root,
            hook: hook.map(|hook| self.path(hook)),
            sysfs: self.path("sys"),
            capabilities: self.path("mig-minors"),
        }
    }

    /// nvidia-ctk's specification for this folder.
    fn golden(&self) -> Spec {
        let root = self.path("driver").display().to_string();
        serde_json::from_str(&GOLDEN.replace("@ROOT@", &root)).unwrap()
    }
}

fn gpus() -> Vec<Part> {
    let gpu = |n: u32| Part {
        minor: Some(n),
        pci_bus: PciBusId::parse(&format!("00000000:0{}:00.0", n + 1)).ok(),
        ..Part::whole_gpu(GpuId::parse(&format!("GPU-{n:08x}-e2e0-4e2e-8e2e-000000000e2e")).unwrap(), n)
    };
    vec![gpu(0), gpu(1)]
}

fn ours(driver: &Driver) -> Spec {
    let parts = gpus();
    generate(&parts.iter().collect::<Vec<_>>(), driver).unwrap().spec
}

#[test]
fn the_specification_equals_that_of_nvidia_ctk_but_for_the_listed_items() {
    let root = DriverRoot::new();
    let (ours, theirs) = (ours(&root.driver(Some("nvidia-cdi-hook"))), root.golden());
    let found = compare(&ours, &theirs);
    assert!(found.is_equal(), "missing {:#?}, extra {:#?}", found.missing, found.extra);
    assert_eq!(
        found.left_out,
        [
            "every container: mount /etc/vulkan/icd.d/nvidia_icd.json".to_owned(),
            format!("every container: mount /lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"),
            "every container: mount /usr/share/glvnd/egl_vendor.d/10_nvidia.json".to_owned(),
            "devices: device all".to_owned(),
        ]
    );
    assert_eq!((ours.cdi_version.as_str(), ours.kind.as_str()), (theirs.cdi_version.as_str(), "berth/gpu"));
    // Mounts with their options, paths on the host and order.
    let kept: Vec<_> = theirs
        .container_edits
        .mounts
        .into_iter()
        .filter(|mount| !found.left_out.iter().any(|item| item.ends_with(&mount.container_path)))
        .collect();
    assert_eq!(ours.container_edits.mounts, kept);
    // Nodes with their paths on the host and order; plain files have no numbers.
    let nodes = |spec: &Spec, n: usize| -> Vec<_> {
        let edits = spec.all_edits().nth(n).unwrap();
        edits.device_nodes.iter().map(|node| (node.path.clone(), node.host_path.clone())).collect()
    };
    let theirs = root.golden();
    for n in 0..ours.all_edits().count() {
        assert_eq!(nodes(&ours, n), nodes(&theirs, n));
    }
    let names: Vec<_> = ours.devices.iter().map(|device| device.name.as_str()).collect();
    let all: Vec<_> =
        theirs.devices.iter().map(|device| device.name.as_str()).filter(|name| *name != "all").collect();
    assert_eq!(names, all);
}

/// The specification is made again when this text changes.
#[test]
fn nodes_libraries_and_hooks_that_change_later_change_what_the_specification_depends_on() {
    let root = DriverRoot::new();
    let driver = root.driver(Some("nvidia-cdi-hook"));
    let [gpu, _] = &gpus()[..] else { panic!("two GPUs") };
    let instance = Part {
        id: PartId::parse("MIG-1").unwrap(),
        gpu: gpu.gpu.clone(),
        mig: Some(Mig { profile: "1g.10gb".into(), gpu_instance: 7, compute_instance: 0 }),
        ..gpu.clone()
    };
    root.write("mig-minors", "gpu0/gi7/access 66\ngpu0/gi7/ci0/access 67\n");
    let text = || fingerprint(&[gpu, &instance], &driver).unwrap();
    let mut last = text();
    assert_eq!(text(), last);
    for (file, content) in [
        ("driver/dev/nvidia-caps/nvidia-cap66", ""),
        (&*format!("driver/{LIBRARIES}/libnvidia-encode.so.{VERSION}"), ""),
        ("nvidia-cdi-hook", "enable-cuda-compat"),
    ] {
        root.write(file, content);
        let now = text();
        assert_ne!(now, last, "{file}");
        last = now;
    }
}

#[test]
fn an_older_toolkit_gets_only_the_hooks_that_it_has() {
    let root = DriverRoot::new();
    root.write("nvidia-cdi-hook", "enable-cuda-compat");
    let spec = ours(&root.driver(Some("nvidia-cdi-hook")));
    let hooks: Vec<_> = spec.container_edits.hooks.iter().map(|hook| hook.args[1].as_str()).collect();
    assert_eq!(hooks, ["create-symlinks", "enable-cuda-compat", "update-ldcache"]);
    assert!(spec.devices.iter().all(|device| device.container_edits.hooks.is_empty()));
}

#[test]
fn without_the_toolkit_each_library_is_a_file_under_its_soname() {
    let root = DriverRoot::new();
    let (spec, parts) = (ours(&root.driver(None)), gpus());
    assert!(spec.all_edits().all(|edits| edits.hooks.is_empty()));
    let host = |path: &str| {
        let mount = spec.container_edits.mounts.iter().find(|mount| mount.container_path == path);
        mount.map(|mount| mount.host_path.clone())
    };
    let library =
        |name: &str| root.path(&format!("driver/{LIBRARIES}/{name}.{VERSION}")).display().to_string();
    for link in ["libcuda.so.1", "libcuda.so"] {
        assert_eq!(host(&format!("/{LIBRARIES}/{link}")), Some(library("libcuda.so")), "{link}");
    }
    assert_eq!(host(&format!("/{LIBRARIES}/libnvidia-gpucomp.so")), None, "it has no soname");
    let found = compare(&spec, &root.golden());
    assert!(found.extra.is_empty(), "{:?}", found.extra);
    assert!(found.missing.iter().all(|item| item.contains(" hook ")), "{:?}", found.missing);
    assert!(!found.soname_files.is_empty());
    let warnings = generate(&parts.iter().collect::<Vec<_>>(), &root.driver(None)).unwrap().warnings;
    assert!(warnings.iter().any(|warning| warning.contains("nvidia-cdi-hook was not found")), "{warnings:?}");
}

#[test]
fn berth_cdi_check_compares_two_files() {
    let root = DriverRoot::new();
    let (own, theirs) = (root.path("own.json"), root.path("theirs.json"));
    ours(&root.driver(Some("nvidia-cdi-hook"))).write(&own).unwrap();
    root.golden().write(&theirs).unwrap();
    let check = |a: &Path, b: &Path, more: &[&str]| {
        ended(
            crate::support::process_node::berth()
                .args(["cdi", "check"])
                .arg(a)
                .arg("--against")
                .arg(b)
                .args(more),
        )
    };
    let (code, text) = check(&own, &theirs, &[]);
    assert_eq!(code, Some(0), "{text}");
    let (code, _) = check(&theirs, &own, &["--without-files"]);
    assert_eq!(code, Some(1), "the other way round graphics is extra");
    fs::remove_file(root.path("driver/usr/bin/nvidia-smi")).unwrap();
    let (code, _) = check(&own, &theirs, &[]);
    assert_eq!(code, Some(1), "a path does not exist");
    let (code, _) = check(&own, &theirs, &["--without-files"]);
    assert_eq!(code, Some(0));
    let (code, text) = check(&own, &root.path("none.json"), &[]);
    assert_eq!(code, Some(1));
    assert!(text.contains("none.json"), "{text}");
    let (code, _) = ended(crate::support::process_node::berth().args(["cdi", "check"]).arg(&own));
    assert_eq!(code, Some(2), "--against is required");
}

/// The whole daemon: none, then nvidia.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_strategy_nothing_is_offered_until_one_can_work() {
    let without_cdi = |folder: &Path| {
        let file = folder.join("config.toml");
        fs::write(&file, "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = false\n")
            .unwrap();
        format!("containerRuntime: {{configFiles: [{}]}}", file.display())
    };
    let rig = Rig::with_runtime(&State::h100(2), "", without_cdi).await;
    let (daemon, kubelet) = (rig.node.serve(), &rig.node.kubelet);
    until("the GPUs are listed", || kubelet.listed(WHOLE).len() == 2);
    assert!(kubelet.listed(WHOLE).values().all(|health| health == "Unhealthy"));
    let ids: Vec<String> = kubelet.listed(WHOLE).into_keys().take(1).collect();
    let refusal = kubelet.call_plugin_allocate(WHOLE, &ids).await.unwrap_err().message().to_owned();
    // containerd 2.4 ignores the setting, and the version is not known here.
    let what = "no device list strategy can work on this node: whether containerd has CDI on by";
    assert!(refusal.contains(what) && refusal.contains("let Berth use the API server"), "{refusal}");
    let shown = daemon.call("GET", "/node", &Value::Null)["deviceListStrategy"].clone();
    assert_eq!((&shown["auto"], &shown["strategies"]), (&json!(true), &json!([])));
    assert!(shown["reason"].as_str().unwrap().contains(what), "{shown}");
    assert!(
        daemon.line(|line| line.contains("no device is offered: no device list strategy")).contains("WARN")
    );
    nvidia_runtime(rig.folder.path());
    kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let answer = kubelet.call_plugin_allocate(WHOLE, &ids).await.unwrap();
    assert_eq!(answer.envs["NVIDIA_VISIBLE_DEVICES"], ids[0]);
    let shown = daemon.call("GET", "/node", &Value::Null)["deviceListStrategy"].clone();
    assert_eq!(shown["strategies"], json!(["envvar"]));
}

/// The settings of a node with containerd 2 and a driver whose files are in this folder; GPU 0 alone has a device node.
fn own_spec(folder: &Path) -> String {
    let write = |path: &str, text: &str| {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    for node in ["nvidiactl", "nvidia-uvm", "nvidia0"] {
        write(&format!("driver/dev/{node}"), "");
    }
    write(&format!("driver/{LIBRARIES}/libcuda.so.{VERSION}"), "");
    let folders = format!("cdi_spec_dirs = [\"{}/cdi\"]", folder.display());
    write("config.toml", &format!("version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\n{folders}\n"));
    let folder = folder.display();
    format!(
        "containerRuntime: {{configFiles: [{folder}/config.toml]}}\ncdi: {{folders: [{folder}/cdi]}}\n\
         containerEdits: {{nvidiaDriverRoot: {folder}/driver}}"
    )
}

/// A GPU is granted that no CDI specification names, and the container does not start.
/// Report: https://github.com/NVIDIA/nvidia-container-toolkit/issues/1239
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_appears_is_offered_once_the_specification_names_it() {
    let rig = Rig::with_runtime(&State::h100(1), "", own_spec).await;
    let (daemon, kubelet) = (rig.node.serve(), &rig.node.kubelet);
    kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    let second = State::h100(2).gpus.remove(1);
    let id = second.uuid.clone();
    rig.nvml.change(|state| state.gpus.push(second)).unwrap();
    until("it is listed", || kubelet.listed(WHOLE).contains_key(&id));
    // Its device node does not exist yet, so no specification can name it.
    until("the warning", || {
        let shown = daemon.call("GET", "/node", &Value::Null)["deviceListStrategy"]["warnings"].clone();
        shown.to_string().contains(&format!("{id}: /dev/nvidia1 does not exist"))
    });
    assert_eq!(kubelet.listed(WHOLE)[&id], "Unhealthy");
    let ids = [id.clone()];
    let refusal = kubelet.call_plugin_allocate(WHOLE, &ids).await.unwrap_err().message().to_owned();
    assert!(refusal.contains(&format!("no CDI specification names {id}")), "{refusal}");
    fs::write(rig.folder.path().join("driver/dev/nvidia1"), "").unwrap();
    kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let answer = kubelet.call_plugin_allocate(WHOLE, &ids).await.unwrap();
    assert_eq!(answer.cdi_devices[0].name, format!("berth/gpu={id}"));
    let spec = Spec::read(&rig.folder.path().join("cdi/berth-gpu.json")).unwrap();
    assert!(spec.devices.iter().any(|device| device.name == id), "{spec:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_leaves_the_specification_whole_and_is_shown_with_the_remedy() {
    let rig = Rig::with_runtime(&State::h100(1), "", own_spec).await;
    let file = rig.folder.path().join("cdi/berth-gpu.json");
    let faults = Faults::new(file.parent().unwrap(), &rig.folder.path().join("faults"));
    let daemon = rig.node.serve_as(rig.node.command().envs(faults.environment().unwrap()));
    let kubelet = &rig.node.kubelet;
    kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    let before = fs::read_to_string(&file).unwrap();
    // The draft can be made, but not be filled.
    faults.set(Some((DiskFault::NoData, 0))).unwrap();
    fs::write(rig.folder.path().join("driver/dev/nvidia1"), "").unwrap();
    rig.nvml.change(|state| state.gpus.push(State::h100(2).gpus.remove(1))).unwrap();
    let reason = || {
        let shown = daemon.call("GET", "/node", &Value::Null)["deviceListStrategy"]["reason"].clone();
        shown.as_str().unwrap().to_owned()
    };
    until("the error", || reason().contains("berth-gpu.json cannot be written (No space left on device"));
    assert!(reason().contains("free space for it"), "{}", reason());
    until("nothing is offered", || kubelet.listed(WHOLE).values().all(|health| health == "Unhealthy"));
    // The drafts that come and go are no reason to try again at once.
    let changed = || fs::metadata(file.parent().unwrap()).unwrap().modified().unwrap();
    let (end, mut last, mut changes) = (Instant::now() + Duration::from_secs(3), changed(), 0);
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
        changes += i32::from(std::mem::replace(&mut last, changed()) != last);
    }
    assert!(changes < 10, "{changes} in three seconds");
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    until("no draft is left", || fs::read_dir(file.parent().unwrap()).unwrap().count() == 1);
    faults.set(None).unwrap();
    kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(Spec::read(&file).unwrap().devices.len(), 4, "each by its index and its UUID");
}
