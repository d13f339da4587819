//! What the first scan finds: GPUs that do not answer every call, and GPUs that are bad already. Each is listed or
//! named, and counted, everywhere. The first two tests print a table (`--nocapture`).

use crate::gpus::mig::Rig;
use crate::support::gpus::WHOLE;
use crate::support::process_node::{DaemonProcess, ProcessNode, berth, ended};
use crate::support::wait::{SOON, until};
use berth_gpus::nvml::{NvmlGpus, NvmlOptions};
use berth_kernel::hardware::gpu::Inventory;
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::Command;
use berth_kernel::node::decide::decide;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::Gpus;
use fake_nvml::{Code, Fabric, FabricState, Fault, Installed, RecoveryAction, State};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Stdio;
use tempfile::TempDir;

/// A folder with the fake NVML, for one first scan after the other.
struct NvmlFolder {
    installed: Installed,
    folder: TempDir,
}

impl NvmlFolder {
    fn new(state: &State) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let installed = Installed::new(folder.path(), state).expect("the fake is built");
        Self { installed, folder }
    }

    /// The first scan after NVML was opened.
    fn first_scan(&self) -> Result<Inventory, String> {
        let gpus = NvmlGpus::open(NvmlOptions {
            library: Some(self.installed.library().to_owned()),
            sysfs: self.folder.path().to_owned(),
            attached: self.folder.path().join("attached"),
            deadline: SOON,
            ..NvmlOptions::default()
        });
        gpus.and_then(|gpus| gpus.scan()).map_err(|error| error.to_string())
    }
}

fn ledger_of(inventory: &Inventory) -> Ledger {
    let (mut ledger, at) = (Ledger::default(), Now { wall_ms: 1, mono_ms: 1 });
    let scan = Command::RecordScan(inventory.clone());
    ledger.apply(&decide(&ledger, &scan, at).entry);
    ledger
}

/// The outcome of a scan: how the second GPU is listed, the working and the counted GPUs; and the message about it.
fn outcome(inventory: &Inventory, second: &str) -> (String, String) {
    let ledger = ledger_of(inventory);
    let works = ledger.gpus.values().filter(|gpu| gpu.health.state.is_usable()).count();
    let counted = format!("{works} of {}", ledger.gpu_count());
    let id = GpuId::parse(second).expect("a UUID");
    let (listed, message) = match (ledger.gpus.get(&id), inventory.unidentified.as_slice()) {
        (Some(gpu), []) => (gpu.health.state.as_str().to_owned(), gpu.health.reason.clone()),
        (None, [gpu]) => ("named".to_owned(), format!("{gpu}: {}", gpu.reason)),
        (listed, unidentified) => panic!("{listed:?} {unidentified:?} {second}: {:?}", inventory.parts),
    };
    (format!("{listed}, {counted}"), message)
}

/// By call and outcome (listed and counted, message): the return codes.
type Outcomes = BTreeMap<String, BTreeMap<(String, String), Vec<u32>>>;

/// Fails each call that the first scan makes, on the second of three GPUs or, if it names no GPU, as a whole, once with
/// each return code. Returns the outcomes with the codes, by call.
fn fail_each_call(state: &State) -> Outcomes {
    let second = state.gpus[1].uuid.clone();
    let parts = |gpu: usize| {
        let instances = state.gpus[gpu].mig.iter().flat_map(|mig| &mig.instances).map(|one| one.uuid.clone());
        instances.chain([state.gpus[gpu].uuid.clone()]).collect::<BTreeSet<_>>()
    };
    let mut logged = state.clone();
    let log = tempfile::NamedTempFile::new().expect("a file");
    logged.call_log = Some(log.path().to_owned());
    let whole = NvmlFolder::new(&logged).first_scan().expect("a scan");
    assert_eq!(outcome(&whole, &second).0, "healthy, 3 of 3");
    let calls: BTreeSet<(String, bool)> = fs::read_to_string(log.path())
        .expect("the calls")
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(_, gpu)| *gpu == "-" || parts(1).contains(*gpu))
        .map(|(call, gpu)| (call.to_owned(), gpu != "-"))
        // Not of the scan: events, and the end.
        .filter(|(call, _)| !call.starts_with("nvmlEventSet") && call != "nvmlShutdown")
        .collect();
    assert!(calls.len() > 20, "{calls:?}");
    let mut table = Outcomes::new();
    let nvml = NvmlFolder::new(state);
    for (call, is_of_gpu) in calls {
        for code in (1..=30).chain([999]).filter_map(Code::from_number) {
            let fault = Fault::fail(&call, code);
            let fault = if is_of_gpu { fault.of_gpu(&second) } else { fault };
            nvml.installed.change(|state| state.faults = vec![fault]).expect("a change");
            let (listed, message) = match nvml.first_scan() {
                // The name of the code is beside it.
                Err(error) => ("nothing can be read".to_owned(), error),
                Ok(inventory) => outcome(&inventory, &second),
            };
            check(&call, is_of_gpu, code, &listed, &message);
            let message = message.split(" (").next().unwrap_or_default().to_owned();
            let message = if listed == "nothing can be read" { String::new() } else { message };
            table.entry(call.clone()).or_default().entry((listed, message)).or_default().push(code.number());
        }
    }
    table
}

/// The rule for each outcome.
fn check(call: &str, is_of_gpu: bool, code: Code, listed: &str, message: &str) {
    let is_named = call.contains("HandleByIndex") && !call.contains("Mig") || call == "nvmlDeviceGetUUID";
    let is_of_driver =
        matches!(code, Code::Uninitialized | Code::DriverNotLoaded | Code::LibRmVersionMismatch);
    match listed {
        // The call is not needed, or the model, the driver or the daemon's rights do not support it.
        "healthy, 3 of 3" => assert!(message.is_empty(), "{call} {code:?}: {message}"),
        "unhealthy, 2 of 3" => {
            let names_call = message.contains(call.trim_end_matches("_v2")) || message.contains(call);
            assert!(is_of_gpu && names_call && !is_named, "{call} {code:?}: {message}");
        }
        "named, 2 of 3" => {
            assert!(is_named && message.starts_with("GPU 1"), "{call} {code:?}: {message}");
            assert!(message.contains("nvmlDeviceGet"), "{call} {code:?}: {message}");
        }
        "nothing can be read" => assert!(!is_of_gpu || is_of_driver, "{call} {code:?}: {message}"),
        other => panic!("{call} {code:?}: {other}: {message}"),
    }
}

/// The outcomes as a table.
fn as_text(title: &str, table: &Outcomes) -> String {
    let mut text =
        format!("\n{title}\n| call | codes | GPU 1, works of counted | message |\n|---|---|---|---|\n");
    for (call, outcomes) in table {
        for ((listed, message), codes) in outcomes {
            let codes: Vec<_> = codes.iter().map(u32::to_string).collect();
            text += &format!("| {call} | {} | {listed} | {message} |\n", codes.join(" "));
        }
    }
    text
}

/// NVML with three GPUs whose waits for events end at once, so that a session ends at once.
fn three_gpus() -> State {
    let mut state = State::h100(3);
    (state.supported_events, state.empty_wait_at_once) = (Some(0), true);
    state.gpus.iter_mut().for_each(|gpu| gpu.nvlinks.truncate(2));
    state
}

/// NVML answers a call of one GPU with an error as the plugin starts.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/338
#[test]
fn a_gpu_whose_first_scan_fails_is_listed_or_named_and_counted_whatever_call_and_code() {
    println!("{}", as_text("three GPUs", &fail_each_call(&three_gpus())));
}

#[test]
fn a_gpu_in_mig_mode_whose_first_scan_fails_is_listed_or_named_and_counted() {
    let mut state = three_gpus();
    state.split(1, &[1, 2]);
    println!("{}", as_text("three GPUs, GPU 1 split", &fail_each_call(&state)));
}

#[test]
fn a_gpu_that_nvml_does_not_list_is_named_by_its_bus_id() {
    let state = three_gpus();
    let nvml = NvmlFolder::new(&state);
    let attached = nvml.folder.path().join("attached");
    for gpu in &state.gpus {
        // As procfs spells it.
        fs::create_dir_all(attached.join(gpu.pci_bus_id[4..].to_lowercase())).expect("a folder");
    }
    // It fell off the bus before NVML was opened, and NVML no longer counts it.
    let gone = nvml.installed.change(|state| state.gpus.pop()).expect("a change").expect("a GPU");
    let inventory = nvml.first_scan().expect("a scan");
    let [unlisted] = inventory.unidentified.as_slice() else { panic!("{:?}", inventory.unidentified) };
    assert_eq!((unlisted.index, unlisted.to_string()), (None, format!("the GPU at {}", gone.pci_bus_id)));
    assert_eq!(ledger_of(&inventory).gpu_count(), 3);
    // One that NVML lists and that does not answer at all has the bus id that remains.
    nvml.installed
        .change(|state| {
            state.gpus.push(gone.clone());
            state.gpus[2].lost = true;
        })
        .expect("a change");
    let inventory = nvml.first_scan().expect("a scan");
    let [lost] = inventory.unidentified.as_slice() else { panic!("{:?}", inventory.unidentified) };
    assert_eq!(lost.to_string(), format!("GPU 2 ({})", gone.pci_bus_id));
    assert!(lost.reason.contains("fell off the bus"), "{lost:?}");
    assert_eq!(ledger_of(&inventory).gpu_count(), 3);
}

#[test]
fn two_gpus_with_one_uuid_are_two() {
    let mut state = three_gpus();
    state.gpus[1].uuid = state.gpus[0].uuid.to_uppercase().replace("GPU", "gpu");
    let inventory = NvmlFolder::new(&state).first_scan().expect("a scan");
    let [twice] = inventory.unidentified.as_slice() else { panic!("{:?}", inventory.unidentified) };
    assert_eq!(twice.index, Some(1));
    assert!(twice.reason.contains("the same UUID"), "{twice:?}");
    assert_eq!(ledger_of(&inventory).gpu_count(), 3);
}

/// The output of `berth node check` of this node.
fn node_check(rig: &Rig) -> String {
    let config = rig.folder.path().join("check.yaml");
    fs::write(&config, &rig.node.settings).unwrap();
    let mut command = berth();
    command.args(["node", "check", "--config"]).arg(config).stdout(Stdio::piped());
    String::from_utf8(command.output().unwrap().stdout).unwrap()
}

fn line<'t>(text: &'t str, of: &str) -> &'t str {
    text.lines().find(|line| line.contains(of)).unwrap_or_else(|| panic!("no {of}: {text}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_place_that_counts_gpus_counts_those_that_do_not_answer() {
    let mut state = State::h100(8);
    let failing = state.gpus[2].uuid.clone();
    state.faults.push(Fault::fail("nvmlDeviceGetBrand", Code::Unknown).of_gpu(&failing));
    state.gpus[7].lost = true;
    let bus = state.gpus[7].pci_bus_id.clone();
    let rig = Rig::new(&state, "").await;
    let checked = node_check(&rig);
    let gpus = line(&checked, "  GPUs ");
    assert!(gpus.starts_with("WARN") && gpus.contains("6 of 8 GPUs work"), "{gpus}");
    assert!(gpus.contains("GPU 2 (") && gpus.contains("nvmlDeviceGetBrand"), "{gpus}");
    assert!(gpus.contains("GPU 7") && gpus.contains("nvmlDeviceGetHandleByIndex_v2"), "{gpus}");

    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 6)]).await;
    let node = daemon.call("GET", "/node", &Value::Null);
    let counts = &node["counts"];
    assert_eq!((&counts["gpus"], &counts["workingGpus"]), (&8.into(), &6.into()), "{counts}");
    assert_eq!(counts["unidentifiedGpus"], 1);
    let check = node["checks"].as_array().unwrap().iter().find(|check| check["name"] == "gpus").unwrap();
    assert!(check["detail"].as_str().unwrap().starts_with("1 of 8 GPUs cannot be offered"), "{check}");
    let list = daemon.call("GET", "/gpus", &Value::Null);
    let unidentified = &list["unidentified"][0];
    assert_eq!(unidentified["index"], 7, "{list}");
    assert!(unidentified["reason"].as_str().unwrap().contains("fell off the bus"), "{list}");
    let sick = list["items"].as_array().unwrap().iter().find(|gpu| gpu["uuid"] == failing).unwrap();
    assert_eq!(sick["health"]["state"], "unhealthy");
    assert!(sick["health"]["reason"].as_str().unwrap().contains("nvmlDeviceGetBrand"), "{sick}");
    // The name, which was read, is known; the memory, which was not, is not.
    assert_eq!(
        (&sick["model"], &sick["memoryMiB"]),
        (&"NVIDIA H100 80GB HBM3".into(), &Value::Null),
        "{sick}"
    );
    daemon.line(|line| {
        line.contains("found GPUs") && line.contains("gpus=8") && line.contains("unidentified=1")
    });
    daemon.line(|line| line.contains("GPU 7") && line.contains("nvmlDeviceGetHandleByIndex_v2"));
    let listed = daemon.printed(&["gpu", "list"]);
    assert!(line(&listed, "GPU 7").contains("is not identified: nvmlDeviceGetHandleByIndex_v2"), "{listed}");
    assert!(line(&daemon.printed(&["top", "--once"]), "UTC").contains("8 GPUs, 2 not healthy"));
    assert!(
        line(&daemon.printed(&["node", "show"]), "gpus").contains("8: 6 work, 0 cordoned, 1 not identified")
    );
    let metrics = metrics_of(&daemon);
    assert!(metrics.contains("berth_gpus_unidentified 1"), "{metrics}");
    assert!(metrics.contains("berth_check_warning{check=\"gpus\"} 1"));

    // Both answer again: all are counted, and nothing is left of the errors but the history.
    rig.nvml
        .change(|state| {
            state.faults.clear();
            state.gpus[7].lost = false;
        })
        .unwrap();
    rig.allocatable(&[(WHOLE, 8)]).await;
    until("all are known", || {
        let list = daemon.call("GET", "/gpus", &Value::Null);
        list["unidentified"].is_null() && list["items"].as_array().unwrap().len() == 8
    });
    // After a restart on which it is lost again, it is known to the store, and still one of eight.
    daemon.stop();
    rig.nvml.change(|state| state.gpus[7].lost = true).unwrap();
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 7)]).await;
    let counts = || daemon.call("GET", "/node", &Value::Null)["counts"].clone();
    until("the first scan", || counts()["unidentifiedGpus"] == 1);
    assert_eq!((&counts()["gpus"], &counts()["workingGpus"]), (&8.into(), &7.into()), "{bus}");
}

fn metrics_of(daemon: &DaemonProcess) -> String {
    let url = daemon.base.replace("/api/v1", "/metrics");
    crate::support::client::agent(SOON).get(&url).call().unwrap().body_mut().read_to_string().unwrap()
}

/// Each sign of a bad GPU, on a GPU of its own: the state that the baseline gives it.
fn bad_gpus() -> (State, Vec<(&'static str, &'static str, &'static str)>) {
    use RecoveryAction as Action;
    type Sign = (&'static str, &'static str, &'static str, fn(&mut fake_nvml::Gpu));
    let signs: [Sign; 13] = [
        ("none", "healthy", "", |_| {}),
        ("uncorrected volatile ECC errors", "degraded", "uncorrectable ECC errors", |gpu| {
            gpu.ecc.as_mut().unwrap().uncorrected_volatile = 3;
        }),
        ("a row waits for its remapping", "degraded", "row remapping pending", |gpu| {
            gpu.remapped_rows.as_mut().unwrap().pending = true;
        }),
        ("a row could not be remapped", "unhealthy", "row remapping failed", |gpu| {
            gpu.remapped_rows.as_mut().unwrap().failed = true;
        }),
        ("a page waits for its retirement", "degraded", "page retirement pending", |gpu| {
            gpu.retired_pages_pending = Some(true);
        }),
        ("recovery action 1", "unhealthy", "a reset of the GPU", |gpu| {
            gpu.recovery_action = Action::GpuReset;
        }),
        ("recovery action 2", "unhealthy", "a reboot of the node", |gpu| {
            gpu.recovery_action = Action::NodeReboot;
        }),
        ("recovery action 3", "unhealthy", "peer-to-peer", |gpu| gpu.recovery_action = Action::DrainP2p),
        ("recovery action 4", "unhealthy", "then a reset", |gpu| gpu.recovery_action = Action::DrainAndReset),
        ("recovery action 5", "degraded", "the IMEX domain", |gpu| gpu.recovery_action = Action::RecoverImex),
        ("recovery action 6", "unhealthy", "its PCIe bus", |gpu| gpu.recovery_action = Action::BusReset),
        ("recovery action 7", "unhealthy", "a reboot of the system", |gpu| {
            gpu.recovery_action = Action::SystemReboot;
        }),
        ("the fabric is not ready", "unhealthy", "NVLink fabric", |gpu| {
            gpu.fabric = Some(Fabric { state: FabricState::InProgress, status: 0 });
        }),
    ];
    let mut state = State::a100(signs.len());
    for (gpu, (.., make_bad)) in state.gpus.iter_mut().zip(&signs) {
        make_bad(gpu);
    }
    (state, signs.iter().map(|(sign, health, says, _)| (*sign, *health, *says)).collect())
}

/// A GPU with uncorrected ECC errors is offered as healthy.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/267
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/243
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_sign_of_a_bad_gpu_that_was_there_before_the_start_is_judged() {
    let (state, signs) = bad_gpus();
    // Long enough for a busy machine: within it, what came once is still shown.
    let rig = Rig::new(&state, "").await;
    let settings = rig.node.settings.replace("quietSeconds: 1", "quietSeconds: 600");
    let rig = Rig { node: ProcessNode { settings, ..rig.node }, ..rig };
    let checked = node_check(&rig);
    let gpus = line(&checked, "  GPUs ");
    let daemon = rig.node.serve();
    println!("\n| before the start | health | reason | heals by itself |\n|---|---|---|---|");
    for (gpu, (sign, expected, says)) in state.gpus.iter().zip(signs) {
        let health = || daemon.call("GET", &format!("/gpus/{}", gpu.uuid), &Value::Null)["health"].clone();
        until(&format!("{sign}: {expected}"), || health()["state"] == expected);
        let health = health();
        let reason = health["reason"].as_str().unwrap_or_default();
        assert!(reason.contains(says), "{sign}: {health}");
        println!("| {sign} | {expected} | {reason} | {} |", health["heals"]);
        if !says.is_empty() {
            assert!(gpus.contains(says), "node check: {sign}: {gpus}");
        }
    }
    assert!(gpus.starts_with("WARN"), "{gpus}");
    rig.allocatable(&[(WHOLE, 5)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_needs_a_reset_stays_out_until_the_driver_shows_one_or_an_operator_says_so() {
    let state = State::h100(3);
    let rig = Rig::new(&state, "").await;
    let mut daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 3)]).await;
    for gpu in &state.gpus {
        rig.nvml.change(|state| state.push_xid(&gpu.uuid, 48)).unwrap();
    }
    rig.allocatable(&[(WHOLE, 0)]).await;
    let health = |daemon: &DaemonProcess, gpu: usize| {
        daemon.call("GET", &format!("/gpus/{}", state.gpus[gpu].uuid), &Value::Null)["health"].clone()
    };
    for gpu in 0..3 {
        let health = health(&daemon, gpu);
        assert_eq!((&health["state"], &health["heals"]), (&"unhealthy".into(), &false.into()), "{health}");
    }
    // The API shows health before the store has it. An order is answered after that, even if it changes nothing.
    daemon.call("DELETE", &format!("/gpus/{}/cordon", state.gpus[0].uuid), &Value::Null);
    // Its quiet time of a second does not end it, nor does a restart.
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    let daemon = rig.node.serve();
    let scans = || metrics_of(&daemon).lines().find_map(scans_of);
    until("the first scan", || scans().is_some_and(|scans| scans > 0.0));
    let end = std::time::Instant::now() + std::time::Duration::from_secs(2);
    until("longer than the quiet time", || std::time::Instant::now() > end);
    rig.allocatable(&[(WHOLE, 0)]).await;
    // The driver requires a reset of GPU 0, and after it nothing.
    let action = |action| rig.nvml.change(|state| state.gpus[0].recovery_action = action).unwrap();
    action(RecoveryAction::GpuReset);
    until("the action", || {
        health(&daemon, 0)["reason"].as_str().unwrap_or_default().contains("recovery action 1")
    });
    action(RecoveryAction::None);
    rig.allocatable(&[(WHOLE, 1)]).await;
    // GPU 1 was reset: its driver, which knows no recovery action, counts its ECC errors from 0 again.
    let errors = |errors| {
        rig.nvml.change(|state| state.gpus[1].ecc.as_mut().unwrap().uncorrected_volatile = errors).unwrap();
    };
    errors(2);
    daemon.line(|line| line.contains("uncorrectable ECC errors"));
    errors(0);
    rig.allocatable(&[(WHOLE, 2)]).await;
    // An operator says that GPU 2 works.
    let operator = berth_api::MarkHealthy { state: berth_api::HealthState::Healthy, reason: "tested".into() };
    let body = serde_json::to_value(operator).unwrap();
    daemon.call("PUT", &format!("/gpus/{}/health", state.gpus[2].uuid), &body);
    rig.allocatable(&[(WHOLE, 3)]).await;
}

/// The number of scans in a line of the metrics.
fn scans_of(line: &str) -> Option<f64> {
    line.strip_prefix("berth_gpu_scans_total{outcome=\"answered\"} ")?.parse().ok()
}

/// The driver of WSL2 knows no device file of a GPU.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/332
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/646
#[test]
fn wsl2_is_reported_as_unsupported_and_offers_nothing() {
    let nvml = NvmlFolder::new(&three_gpus());
    let dxg = nvml.folder.path().join("dxg");
    fs::write(&dxg, "").expect("a file");
    let open = |driver_version: &str| {
        NvmlGpus::open(NvmlOptions {
            library: Some(nvml.installed.library().to_owned()),
            dxg: dxg.clone(),
            driver_version: nvml.folder.path().join(driver_version),
            ..NvmlOptions::default()
        })
    };
    let error = open("missing").err().expect("it does not open").to_string();
    assert!(error.contains("WSL2") && error.contains("/dev/dxg") && !error.contains("modprobe"), "{error}");
    // A machine with both is no WSL2.
    fs::write(nvml.folder.path().join("version"), "").expect("a file");
    assert!(open("version").is_ok());
}

/// Some GPUs of a node are not for Kubernetes.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/935
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/197
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/1503
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_excluded_gpu_is_offered_under_no_stack_and_shown_as_excluded() {
    let mut state = State::h100(4);
    state.gpus[3].name = "NVIDIA T400 4GB".into();
    state.split(2, &[1, 2]);
    let bus = &state.gpus[1].pci_bus_id[4..].to_lowercase();
    let uuid = state.gpus[2].uuid.to_uppercase();
    let exclude = format!("exclude: ['{bus}', {uuid}, 'NVIDIA T4*', 9]");
    let rig = Rig::new(&state, "migStrategy: mixed").await;
    let settings = rig.node.settings.replace("gpus: nvml", &format!("gpus: {{ source: nvml, {exclude} }}"));
    let rig = Rig { node: ProcessNode { settings, ..rig.node }, ..rig };
    let checked = node_check(&rig);
    let gpus = line(&checked, "  GPUs ");
    for index in 1..4 {
        let named = format!("GPU {index} ({}) is excluded", state.gpus[index].uuid);
        assert!(gpus.contains(&named), "{named}: {gpus}");
    }
    assert!(gpus.contains("gpus.exclude: no GPU of this node is 9"), "{gpus}");
    let daemon = rig.node.serve();
    let stacks = [
        ("exclusive", "{}", vec![(WHOLE, 1)]),
        ("timeslice", "{\"replicas\": 3}", vec![("nvidia.com/gpu.shared", 3)]),
    ];
    rig.allocatable(&[(WHOLE, 1)]).await;
    for (policy, parameters, offered) in stacks {
        let parameters: Value = serde_json::from_str(parameters).unwrap();
        let entry = serde_json::json!({"entries": [{"policy": policy, "parameters": parameters}]});
        daemon.call("PUT", "/stack", &entry);
        rig.allocatable(&offered).await;
        let list = daemon.call("GET", "/gpus", &Value::Null);
        let excluded: Vec<bool> =
            list["items"].as_array().unwrap().iter().map(|gpu| gpu["excluded"] == true).collect();
        assert_eq!(excluded, [false, true, true, true], "{list}");
    }
    let counts = &daemon.call("GET", "/node", &Value::Null)["counts"];
    assert_eq!((&counts["gpus"], &counts["excludedGpus"]), (&4.into(), &3.into()), "{counts}");
    let listed = daemon.printed(&["gpu", "list"]);
    assert_eq!(listed.matches(" excluded ").count(), 6, "a column and a reason each: {listed}");
    daemon.line(|line| line.contains("gpus.exclude: no GPU of this node is 9"));
}

#[test]
fn an_item_of_gpus_exclude_that_selects_nothing_is_refused_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("berth.yaml");
    fs::write(
        &file,
        "gpus:\n  source: sim:2xt4\n  exclude: [0, '*', MIG-8a56a4bc-e184-a047-2620-be19fdf913d5]\n",
    )
    .unwrap();
    let (code, error) = ended(berth().args(["config", "check"]).arg(&file));
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("gpus.exclude[1]") && error.contains("every GPU"), "{error}");
    assert!(
        error.contains("gpus.exclude[2]") && error.contains("exclude the GPU of this MIG instance"),
        "{error}"
    );
    fs::write(&file, "gpus:\n  sources: nvml\n").unwrap();
    let (_, error) = ended(berth().args(["config", "check"]).arg(&file));
    assert!(error.contains("line 2") && error.contains("did you mean `source`"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_vanished_is_distinguished_from_the_one_that_has_its_index_now() {
    let state = State::h100(2);
    let rig = Rig::new(&state, "").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 2)]).await;
    let former = state.gpus[1].uuid.clone();
    let new = "GPU-11111111-2222-3333-4444-555555555555";
    rig.nvml.change(|state| state.gpus[1].uuid = new.into()).unwrap();
    until("both", || daemon.call("GET", "/gpus", &Value::Null)["items"].as_array().unwrap().len() == 3);
    until("it is gone", || {
        daemon.call("GET", &format!("/gpus/{former}"), &Value::Null)["health"]["state"] == "vanished"
    });
    let listed = daemon.printed(&["gpu", "list"]);
    let names: Vec<_> =
        listed.lines().skip(1).take(3).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 3, "{listed}");
    assert!(names.contains(&&former[..12]), "{listed}");
    let title = format!("GPU {} (GPU 1 before): vanished", &former[..12]);
    assert!(listed.contains(&title), "{title}: {listed}");
    assert!(line(&daemon.printed(&["gpu", "show", &former]), "gpu").contains("another GPU now"));
    // The log and the events name it by its UUID.
    let gone = daemon.line(|line| line.contains("is gone"));
    assert!(gone.contains(&former), "{gone}");
    let metrics = metrics_of(&daemon);
    let one = |uuid: &str| {
        metrics
            .lines()
            .filter(|line| line.starts_with("berth_gpu_present") && line.contains(uuid))
            .collect::<String>()
    };
    assert!(one(new).contains("gpu=\"1\"") && one(&former).contains("gpu=\"\""), "{metrics}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_is_found_by_its_uuid_in_any_spelling() {
    let mut state = State::h100(2);
    let uuid = state.gpus[1].uuid.clone();
    // A driver that writes capitals.
    state.gpus[1].uuid = format!("GPU-{}", uuid[4..].to_uppercase());
    let rig = Rig::new(&state, "").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 2)]).await;
    for spelling in [uuid.clone(), uuid.to_uppercase(), uuid.to_lowercase()] {
        let gpu = daemon.call("GET", &format!("/gpus/{spelling}"), &Value::Null);
        assert_eq!(gpu["uuid"], uuid, "{spelling}");
        assert!(daemon.printed(&["gpu", "show", &spelling[..14]]).contains(&uuid), "{spelling}");
    }
    rig.nvml.change(|state| state.push_xid(&state.gpus[1].uuid.clone(), 79)).unwrap();
    rig.allocatable(&[(WHOLE, 1)]).await;
}
