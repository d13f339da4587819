//! Starts with problems: unreadable checkpoints, allocations of other plugins, policies of an older release, unusable
//! stores.

use crate::support::client::agent;
use crate::support::gated_node::create_gate;
use crate::support::gpus::WHOLE;
use crate::support::kept_compiler::VARIABLE;
use crate::support::process_node::{DaemonProcess, ProcessNode, berth, ended, without_override};
use crate::support::wait::{SOON, until, until_some};
use berth_kernel::node::ports::Store;
use berth_kernel::node::record::{Record, Write};
use berth_store::SledStore;
use hyper_util::rt::TokioIo;
use kubelet_standin::proto::v1::ListPodResourcesRequest;
use kubelet_standin::proto::v1::pod_resources_lister_client::PodResourcesListerClient;
use kubelet_standin::{Kubelet, Rpc, TinyPlugin};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tonic::transport::Endpoint;

const EXCLUSIVE: &[u8] = include_bytes!("../../../policies-wasm/prebuilt/exclusive.wasm");

/// Whether the daemon is ready, and the body of `/readyz`.
fn readiness(daemon: &DaemonProcess) -> (bool, Value) {
    let url = daemon.base.replace("/api/v1", "/readyz");
    let mut answer = agent(SOON).get(url).call().unwrap();
    let text = answer.body_mut().read_to_string().unwrap();
    (answer.status() == 200, serde_json::from_str(&text).unwrap())
}

/// The only line with this word.
fn line_of(message: &str, word: &str) -> String {
    let lines: Vec<&str> = message.lines().filter(|line| line.contains(word)).collect();
    assert_eq!(lines.len(), 1, "{word:?} is to be on one line: {message}");
    lines[0].to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_checkpoint_is_waited_for_before_the_first_registration() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let checkpoint = node.kubelet.checkpoint_path();
    std::fs::write(&checkpoint, "{\"Data\":").unwrap();
    let daemon = node.serve();
    let adoption = || {
        let (_, body) = readiness(&daemon);
        let checks = body["checks"].as_array().unwrap().clone();
        let check = checks.into_iter().find(|check| check["name"] == "adoption").unwrap();
        check["detail"].as_str().unwrap_or_default().to_owned()
    };
    until("the checkpoint's name", || adoption().contains(checkpoint.to_str().unwrap()));
    let words = adoption();
    assert!(words.contains("--skip-adoption") && !words.contains('\n'), "{words}");
    assert!(!readiness(&daemon).0);
    // It retries, and does not continue.
    until("the log's line", || daemon.log().contains("--skip-adoption"));
    let line = line_of(&daemon.log(), "--skip-adoption");
    assert!(line.contains("ERROR") && line.contains(checkpoint.to_str().unwrap()), "{line}");
    assert_eq!(node.kubelet.calls(Rpc::Register, WHOLE).count, 0);
    assert_eq!(node.sockets(), Vec::<String>::new());
    let mended = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":0}"#;
    std::fs::write(&checkpoint, mended).unwrap();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    // The kubelet counts the devices before the daemon records that it is registered.
    until("it is ready", || readiness(&daemon).0);
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_list_is_the_stacks_and_its_shares_are_packed_at_once() {
    for name in [WHOLE, "nvidia.com/gpu.tenth"] {
        let parameters = format!("{{ replicas: 10, resource: {name} }}");
        let permissions = format!("{{ shareMax: 10, resources: [{name}] }}");
        let stack = format!(
            "stack: [{{ policy: binpack }}, {{ policy: timeslice, parameters: {parameters}, permissions: {permissions} }}]"
        );
        let node = ProcessNode::of(&format!("gpus: sim:8xt4\n{stack}")).await;
        let _daemon = node.serve();
        let first = |k: &Kubelet| k.capacity(name).is_some_and(|devices| devices > 0);
        node.kubelet.wait_for("the first list", SOON, first).await.unwrap();
        assert_eq!(node.kubelet.capacity(name), Some(80));
        node.kubelet.wait_allocatable(name, 80, SOON).await.unwrap();
        let uid = node.start("a", name, 4).await.unwrap();
        let gpus: BTreeSet<String> =
            node.kubelet.held(&uid, "main", name).iter().map(|id| gpu_of(id)).collect();
        assert_eq!(gpus.len(), 1, "four shares of one GPU");
        assert_eq!(node.kubelet.capacity(name), Some(80));
        assert_eq!(node.kubelet.resources(), BTreeSet::from([name.to_owned()]));
        assert_eq!(node.kubelet.anomalies(), []);
    }
}

fn gpu_of(id: &str) -> String {
    id.split("::").next().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn skip_adoption_registers_despite_an_unreadable_checkpoint() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    std::fs::write(node.kubelet.checkpoint_path(), "{\"Data\":").unwrap();
    let daemon = node.serve_with(&["--skip-adoption"]);
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    // The kubelet counts the devices before the daemon records that it is registered.
    until("it is ready", || readiness(&daemon).0);
    daemon.line(|line| line.contains("--skip-adoption"));
    assert!(line_of(&daemon.log(), "--skip-adoption").contains("not adopted"));
    node.start("a", WHOLE, 1).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_of_another_plugin_are_adopted_into_an_existing_store() {
    let node = ProcessNode::new("gpus: sim:3xt4").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 3, SOON).await.unwrap();
    node.start("ours", WHOLE, 1).await.unwrap();
    daemon.until("its holder", |live| live.iter().all(|a| a["holder"]["podUid"].is_string()));
    let ours = daemon.live();
    let gpus = daemon.call("GET", "/gpus", &Value::Null);
    let uuids: Vec<String> =
        gpus["items"].as_array().unwrap().iter().map(|g| g["uuid"].as_str().unwrap().to_owned()).collect();
    daemon.stop();
    node.kubelet.wait_for("our end", SOON, |k| k.streams(WHOLE) == 0).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();

    let ids: Vec<&str> = uuids.iter().map(String::as_str).collect();
    let folder = node.folder.path().join("kubelet/device-plugins");
    let other = TinyPlugin::serve(&folder, "nvidia-gpu.sock", WHOLE, &ids).unwrap();
    other.register().await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 3, SOON).await.unwrap();
    let uid = node.start("theirs", WHOLE, 1).await.unwrap();
    let theirs: Vec<String> = node.kubelet.held(&uid, "main", WHOLE).into_iter().collect();
    drop(other);
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    node.kubelet.wait_for("its end", SOON, |k| k.streams(WHOLE) == 0).await.unwrap();

    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 3, SOON).await.unwrap();
    let live = daemon.live();
    assert_eq!(live.len(), 2, "{live:?}");
    assert!(live.iter().any(|a| a["id"] == ours[0]["id"]), "{live:?}");
    let adopted = live.iter().find(|a| a["id"] != ours[0]["id"]).unwrap();
    assert_eq!(adopted["devices"], json!(theirs));
    assert_eq!(adopted["holder"]["podUid"], json!(uid));
    daemon.until("both pods' names", |live| {
        live.len() == 2 && live.iter().all(|a| a["holder"]["pod"].is_string())
    });
    // The adopted allocation counts: one GPU is left. It ends like any other.
    node.start("last", WHOLE, 1).await.unwrap();
    node.start("late", WHOLE, 1).await.unwrap_err();
    node.kubelet.delete(&uid);
    daemon.until("the adopted one's end", |live| live.iter().all(|a| a["holder"]["pod"] != "theirs"));
    assert_eq!(daemon.live().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_that_an_older_release_shipped_stays_in_the_stack_and_loses_the_name() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let daemon = node.serve();
    // The same policy as other bytes: a section more that means nothing.
    let old = [EXCLUSIVE, &[0, 5, 3, b'o', b'l', b'd', 1]].concat();
    let digest = daemon.push(&old)["digest"].as_str().unwrap().to_owned();
    let entry = |digest: &str| json!({ "entries": [{ "policy": "exclusive", "digest": digest }] });
    daemon.call("PUT", "/stack", &entry(&digest));
    let version = |daemon: &DaemonProcess, digest: &str| {
        let list = daemon.call("GET", "/policies", &Value::Null);
        let items = list["items"].as_array().unwrap().clone();
        items.into_iter().find(|p| p["digest"] == digest).unwrap_or_else(|| panic!("{list}"))
    };
    assert_eq!(version(&daemon, &digest)["shipped"], false);
    daemon.stop();

    // Now as the older release had left it.
    let mut store = SledStore::open(&node.folder.path().join("state/store")).unwrap();
    let shipped = store.load().unwrap().into_iter().find_map(|record| match record {
        Record::Policy(mut version) if version.digest.as_str() == digest => {
            version.shipped = true;
            Some(Record::Policy(version))
        }
        _ => None,
    });
    store.append(&[Write::Put(shipped.unwrap())]).unwrap();
    drop(store);

    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let kept = version(&daemon, &digest);
    assert_eq!((&kept["shipped"], &kept["active"]), (&json!(false), &json!(true)), "{kept}");
    node.start("a", WHOLE, 1).await.unwrap();
    // It is called: its offers are used.
    let uuid = daemon.live()[0]["gpus"][0].as_str().unwrap().to_owned();
    let offered_by = |digest: &str| {
        let gpu = daemon.call("GET", &format!("/gpus/{uuid}"), &Value::Null);
        gpu["parts"][0]["offeredBy"] == format!("exclusive@{}", &digest[..12])
    };
    until("its offer", || offered_by(&digest));
    // The name alone means what this release ships.
    daemon.call("PUT", "/stack", &json!({ "entries": [{ "policy": "exclusive" }] }));
    let stack = daemon.call("GET", "/stack", &Value::Null);
    let now = stack["entries"][0]["digest"].as_str().unwrap();
    assert_ne!(now, digest);
    assert_eq!(version(&daemon, now)["shipped"], true);
    until("the new one's offer", || offered_by(now));
    // One call rolls back.
    daemon.call("PUT", "/stack", &entry(&digest));
    assert_eq!(daemon.call("GET", "/stack", &Value::Null)["entries"][0]["digest"], json!(digest));
    assert!(!daemon.log().contains("cannot be called"), "{}", daemon.log());
}

/// Lists without pause, far more often than the kubelet allows, until stopped.
async fn hammer(kubelet: Kubelet, stop: Arc<AtomicBool>) {
    let path = kubelet.pod_resources_socket();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap();
    while !stop.load(Ordering::SeqCst) {
        let calls = (0..64).map(|_| {
            let mut client = PodResourcesListerClient::new(channel.clone());
            tokio::spawn(async move { client.list(ListPodResourcesRequest {}).await.is_ok() })
        });
        for call in calls.collect::<Vec<_>>() {
            let _ = call.await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_others_exhaust_ends_nothing_and_blocks_no_pod() {
    let node = ProcessNode::new("gpus: sim:4xt4").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    node.start("a", WHOLE, 1).await.unwrap();
    let gone = node.start("b", WHOLE, 1).await.unwrap();
    daemon.until("their holders", |live| {
        live.len() == 2 && live.iter().all(|a| a["holder"]["pod"].is_string())
    });
    let stop = Arc::new(AtomicBool::new(false));
    let hammering = tokio::spawn(hammer(node.kubelet.clone(), Arc::clone(&stop)));
    let refused = |daemon: &DaemonProcess| daemon.log().contains("rejected by rate limit");
    until("a refusal in the daemon's log", || refused(&daemon));
    node.start("c", WHOLE, 1).await.unwrap();
    node.kubelet.delete(&gone);
    stop.store(true, Ordering::SeqCst);
    hammering.await.unwrap();
    assert!(node.kubelet.calls(Rpc::List, "").errors > 0);
    daemon.until("the end of b alone", |live| {
        // Newest first.
        let pods: Vec<&Value> = live.iter().map(|a| &a["holder"]["pod"]).collect();
        pods == ["c", "a"]
    });
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rival_for_the_same_resource_is_named_in_the_log_and_by_the_api() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let daemon = node.serve();
    let contested = "another device plugin serves this resource";
    let folder = node.folder.path().join("kubelet/device-plugins");
    let _rival = TinyPlugin::serve(&folder, "nvidia-gpu.sock", WHOLE, &["GPU-0"]).unwrap();
    let end = Instant::now() + SOON;
    while !daemon.log().contains("another device plugin") {
        assert!(Instant::now() < end, "{}", daemon.log());
        // A rival makes the kubelet drop the stream. Three quick losses in a row are reported.
        node.kubelet.drop_stream(WHOLE);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let line = line_of(&daemon.log(), "another device plugin");
    assert!(line.contains("ERROR") && line.contains(WHOLE), "{line}");
    until("the API says so", || {
        let answer = daemon.call("GET", "/node", &Value::Null).to_string();
        let (is_ready, message) = readiness(&daemon);
        answer.contains(contested) && !is_ready && message.to_string().contains(contested)
    });
}

/// `berth serve` on this state folder, run by a shell after `prepare`.
fn serve_after(prepare: &str, state: &Path) -> Command {
    let mut command = Command::new("/bin/sh");
    let berth = berth();
    command.args(["-c", &format!("{prepare}; exec \"$@\""), "sh"]).arg(berth.get_program());
    command.args(["serve", "--gpus", "sim:2xt4", "--admin-listen", "127.0.0.1:0", "--state-dir"]).arg(state);
    command.arg("--kubelet-dir").arg(state.join("no-kubelet"));
    command.env_remove("RUST_LOG");
    command
}

/// The command ends with 1, and its last line begins with `error:` and contains these words.
fn refuses(mut command: Command, words: &[&str]) {
    let (code, output) = ended(&mut command);
    assert_eq!(code, Some(1), "{output}");
    let line = line_of(&output, "error: ");
    assert_eq!(output.lines().last(), Some(line.as_str()), "{output}");
    for word in words {
        assert!(line.contains(word), "{word:?} is missing in {line:?}");
    }
    assert!(!output.contains("panicked"), "{output}");
}

#[test]
fn a_read_only_state_folder_is_reported_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let mode = |mode| std::fs::set_permissions(&state, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o500);
    without_override(|| refuses(serve_after(":", &state), &[state.to_str().unwrap(), "--state-dir"]));
    mode(0o700);
}

#[test]
fn a_state_folder_on_a_full_disk_is_reported_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    // A file of more than 32 KiB cannot be written: the token can, the store cannot.
    let full = "trap '' XFSZ; ulimit -f 32";
    refuses(serve_after(full, &state), &[state.join("store").to_str().unwrap(), "os error 27", "ulimit -f"]);

    // And a disk of 64 KiB, where a user may have one of his own.
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let mount = format!("mount -t tmpfs -o size=64k none {}", disk.display());
    let may_mount = Command::new("unshare").args(["-rm", "sh", "-c", &mount]).stderr(Stdio::null()).status();
    if may_mount.is_ok_and(|status| status.success()) {
        let serve = serve_after(&mount, &disk);
        let mut command = Command::new("unshare");
        command.arg("-rm").arg(serve.get_program()).args(serve.get_args());
        command.env_remove("RUST_LOG");
        refuses(
            command,
            &[disk.join("store").to_str().unwrap(), "opening it: No space", "os error 28", "free some space"],
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_store_and_a_newer_one_are_unchanged_and_reported_in_one_line() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    node.serve().stop();
    let state = node.folder.path().join("state");
    let store = state.join("store");
    let log = store.join("data/db");
    let good = std::fs::read(&log).unwrap();
    let written = good.iter().rposition(|byte| *byte != 0).unwrap();
    std::fs::write(&log, &good[..written / 2]).unwrap();
    let bad = std::fs::read(&log).unwrap();
    refuses(
        serve_after(":", &state),
        &[store.to_str().unwrap(), "damaged", "restore an export", "move the folder", "berth state init"],
    );
    assert!(std::fs::read(&log).unwrap() == bad, "a damaged store is not touched");
    std::fs::write(&log, &good).unwrap();

    let config = sled::Config::new().path(store.join("data")).segment_size(2 << 20).flush_every_ms(None);
    let db = config.open().unwrap();
    // The head of every store; its first byte says the format.
    let mut value = db.get([0]).unwrap().unwrap().to_vec();
    value[0] = 9;
    db.insert([0], value).unwrap();
    drop(db);
    let newer = ["newer berth", "format 9", "run that release", "move the folder"];
    refuses(serve_after(":", &state), &[&[store.to_str().unwrap()], &newer[..]].concat());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_store_prevents_the_start_and_cordons_are_kept() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let state = node.folder.path().join("state");
    // What an operator puts there before the first start is no sign of a store.
    std::fs::create_dir_all(state.join("policies")).unwrap();
    std::fs::write(state.join("token"), "0123456789abcdef0123456789abcdef\n").unwrap();
    std::fs::set_permissions(state.join("token"), PermissionsExt::from_mode(0o600)).unwrap();
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let gpus = daemon.call("GET", "/gpus", &Value::Null);
    let uuid = gpus["items"][0]["uuid"].as_str().unwrap().to_owned();
    daemon.call("PUT", &format!("/gpus/{uuid}/cordon"), &json!({ "reason": "fan" }));
    daemon.stop();
    let data = state.join("store/data");
    let kept = node.folder.path().join("kept");
    std::fs::rename(&data, &kept).unwrap();
    refuses(
        serve_after(":", &state),
        &[state.join("store").to_str().unwrap(), "is missing", "berth state import", "berth state init"],
    );
    assert!(!data.exists());
    std::fs::rename(&kept, &data).unwrap();
    let cordoned = |daemon: &DaemonProcess| {
        daemon.call("GET", &format!("/gpus/{uuid}"), &Value::Null)["drain"]["state"] == "cordoned"
    };
    let daemon = node.serve();
    assert!(cordoned(&daemon));
    daemon.stop();
    std::fs::remove_dir_all(&data).unwrap();
    let mut init = berth();
    let (code, output) = ended(init.args(["state", "init", "--state-dir"]).arg(&state));
    assert_eq!(code, Some(0), "{output}");
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert!(!cordoned(&daemon));
}

#[test]
fn a_fifo_where_a_file_belongs_is_named_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let state = folder.path().join("state");
    let name = fifo.to_str().unwrap();
    let serve = |settings: &[&str]| {
        let mut command = serve_after(":", &state);
        command.args(settings);
        command
    };
    refuses(serve(&["--token-file", name]), &[name, "a FIFO"]);
    refuses(serve(&["--config", name]), &[name, "a FIFO"]);
    let tls = folder.path().join("tls.yaml");
    std::fs::write(&tls, format!("admin: {{ tls: {{ certFile: {name}, keyFile: {name} }} }}\n")).unwrap();
    refuses(serve(&["--config", tls.to_str().unwrap()]), &[name, "a FIFO"]);
    for command in [&["node", "check", "--config", name][..], &["gpu", "list", "--token-file", name]] {
        let (code, output) = ended(berth().args(command));
        assert!(code == Some(1) && output.contains("a FIFO"), "{command:?}: {output}");
    }
}

/// A daemon that gets SIGTERM while a policy is compiled ends with code 0 and these last words. It does not wait for
/// the compiler, and leaves a complete store.
fn ends_while_a_policy_is_compiled(node: &ProcessNode, last_words: &str) {
    let gate = create_gate(node.folder.path());
    std::fs::write(gate.join("hold"), "").unwrap();
    let mut daemon = node.serve_as(node.command().env(VARIABLE, gate.join("compiler")));
    let compiler_log = || std::fs::read_to_string(gate.join("log")).unwrap_or_default();
    until("a compilation", || compiler_log().contains("began"));
    daemon.signal("-TERM");
    let status = until_some("its end", || daemon.child.try_wait().unwrap());
    assert!(status.success(), "{status}: {}", daemon.log());
    daemon.line(|line| line.ends_with(last_words));
    // A daemon that had waited for the compiler until its time was up would have killed it.
    std::fs::remove_file(gate.join("hold")).unwrap();
    until("the compiler's own end", || compiler_log().contains("ended"));
    assert_eq!(node.sockets(), Vec::<String>::new());
    let state = node.folder.path().join("state");
    let (code, output) = ended(berth().args(["state", "verify", "--state-dir"]).arg(state));
    assert_eq!(code, Some(0), "{output}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_ends_a_start_that_compiles_the_active_stack() {
    let node = ProcessNode::new("gpus: sim:2xt4\nstack: [{ policy: exclusive }]").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    node.start("a", WHOLE, 1).await.unwrap();
    let id = daemon.live()[0]["id"].clone();
    daemon.stop();
    for file in std::fs::read_dir(node.folder.path().join("state/policies")).unwrap() {
        let file = file.unwrap().path();
        if file.extension().is_some_and(|end| end == "cwasm") {
            std::fs::remove_file(file).unwrap();
        }
    }

    ends_while_a_policy_is_compiled(&node, ": stopping before the start was complete");

    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(daemon.live().iter().map(|a| &a["id"]).collect::<Vec<_>>(), [&id]);
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_ends_a_start_that_compiles_the_stack_of_the_file() {
    let node = ProcessNode::new("gpus: sim:2xt4\nstack: [{ policy: exclusive }]").await;

    ends_while_a_policy_is_compiled(&node, ": stopping");

    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(daemon.call("GET", "/stack", &Value::Null)["entries"][0]["policy"], "exclusive");
    assert_eq!(node.kubelet.anomalies(), []);
}
