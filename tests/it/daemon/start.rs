//! Starts with problems: unreadable checkpoints, allocations of other plugins, policies of an older release, unusable
//! stores.

use crate::daemon::process::{House, SOON, Serving, WHOLE, berth, ended};
use crate::support::client::agent;
use crate::support::wait::until;
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

/// Whether it is ready, and what its checks say.
fn readiness(serving: &Serving) -> (bool, Value) {
    let url = serving.base.replace("/api/v1", "/readyz");
    let mut answer = agent(SOON).get(url).call().unwrap();
    let text = answer.body_mut().read_to_string().unwrap();
    (answer.status() == 200, serde_json::from_str(&text).unwrap())
}

/// The one line that names this.
fn line_of(said: &str, word: &str) -> String {
    let lines: Vec<&str> = said.lines().filter(|line| line.contains(word)).collect();
    assert_eq!(lines.len(), 1, "{word:?} is to be on one line: {said}");
    lines[0].to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_checkpoint_is_waited_for_before_the_first_registration() {
    let house = House::new("gpus: sim:2xt4").await;
    let checkpoint = house.kubelet.checkpoint_path();
    std::fs::write(&checkpoint, "{\"Data\":").unwrap();
    let serving = house.serve();
    let adoption = || {
        let (_, said) = readiness(&serving);
        let checks = said["checks"].as_array().unwrap().clone();
        let check = checks.into_iter().find(|check| check["name"] == "adoption").unwrap();
        check["detail"].as_str().unwrap_or_default().to_owned()
    };
    until("the checkpoint's name", || adoption().contains(checkpoint.to_str().unwrap()));
    let words = adoption();
    assert!(words.contains("--skip-adoption") && !words.contains('\n'), "{words}");
    assert!(!readiness(&serving).0);
    // It retries, and does not continue.
    until("the log's line", || serving.log().contains("--skip-adoption"));
    let line = line_of(&serving.log(), "--skip-adoption");
    assert!(line.contains("ERROR") && line.contains(checkpoint.to_str().unwrap()), "{line}");
    assert_eq!(house.kubelet.calls(Rpc::Register, WHOLE).count, 0);
    assert_eq!(house.sockets(), Vec::<String>::new());
    let mended = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":0}"#;
    std::fs::write(&checkpoint, mended).unwrap();
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    // The kubelet counts the devices before the daemon records that it is registered.
    until("it is ready", || readiness(&serving).0);
    assert_eq!(house.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_list_is_the_stacks_and_its_shares_are_packed_at_once() {
    for name in [WHOLE, "nvidia.com/gpu.tenth"] {
        let parameters = format!("{{ replicas: 10, resource: {name} }}");
        let permissions = format!("{{ shareMax: 10, resources: [{name}] }}");
        let stack = format!(
            "stack: [{{ policy: binpack }}, {{ policy: timeslice, parameters: {parameters}, permissions: {permissions} }}]"
        );
        let house = House::of(&format!("gpus: sim:8xt4\n{stack}")).await;
        let _serving = house.serve();
        let first = |k: &Kubelet| k.capacity(name).is_some_and(|devices| devices > 0);
        house.kubelet.wait_for("the first list", SOON, first).await.unwrap();
        assert_eq!(house.kubelet.capacity(name), Some(80));
        house.kubelet.wait_allocatable(name, 80, SOON).await.unwrap();
        let uid = house.start("a", name, 4).await.unwrap();
        let gpus: BTreeSet<String> =
            house.kubelet.held(&uid, "main", name).iter().map(|id| gpu_of(id)).collect();
        assert_eq!(gpus.len(), 1, "four shares of one GPU");
        assert_eq!(house.kubelet.capacity(name), Some(80));
        assert_eq!(house.kubelet.resources(), BTreeSet::from([name.to_owned()]));
        assert_eq!(house.kubelet.anomalies(), []);
    }
}

fn gpu_of(id: &str) -> String {
    id.split("::").next().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn skip_adoption_registers_despite_an_unreadable_checkpoint() {
    let house = House::new("gpus: sim:2xt4").await;
    std::fs::write(house.kubelet.checkpoint_path(), "{\"Data\":").unwrap();
    let serving = house.serve_with(&["--skip-adoption"]);
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    // The kubelet counts the devices before the daemon records that it is registered.
    until("it is ready", || readiness(&serving).0);
    serving.line(|line| line.contains("--skip-adoption"));
    assert!(line_of(&serving.log(), "--skip-adoption").contains("not adopted"));
    house.start("a", WHOLE, 1).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_of_another_plugin_are_adopted_into_an_existing_store() {
    let house = House::new("gpus: sim:3xt4").await;
    let serving = house.serve();
    house.kubelet.wait_allocatable(WHOLE, 3, SOON).await.unwrap();
    house.start("ours", WHOLE, 1).await.unwrap();
    serving.until("its holder", |live| live.iter().all(|a| a["holder"]["podUid"].is_string()));
    let ours = serving.live();
    let gpus = serving.call("GET", "/gpus", &Value::Null);
    let uuids: Vec<String> =
        gpus["items"].as_array().unwrap().iter().map(|g| g["uuid"].as_str().unwrap().to_owned()).collect();
    serving.stop();
    house.kubelet.wait_for("our end", SOON, |k| k.streams(WHOLE) == 0).await.unwrap();
    house.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();

    let ids: Vec<&str> = uuids.iter().map(String::as_str).collect();
    let folder = house.folder.path().join("kubelet/device-plugins");
    let other = TinyPlugin::serve(&folder, "nvidia-gpu.sock", WHOLE, &ids).unwrap();
    other.register().await.unwrap();
    house.kubelet.wait_allocatable(WHOLE, 3, SOON).await.unwrap();
    let uid = house.start("theirs", WHOLE, 1).await.unwrap();
    let theirs: Vec<String> = house.kubelet.held(&uid, "main", WHOLE).into_iter().collect();
    drop(other);
    house.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    house.kubelet.wait_for("its end", SOON, |k| k.streams(WHOLE) == 0).await.unwrap();

    let serving = house.serve();
    house.kubelet.wait_allocatable(WHOLE, 3, SOON).await.unwrap();
    let live = serving.live();
    assert_eq!(live.len(), 2, "{live:?}");
    assert!(live.iter().any(|a| a["id"] == ours[0]["id"]), "{live:?}");
    let adopted = live.iter().find(|a| a["id"] != ours[0]["id"]).unwrap();
    assert_eq!(adopted["devices"], json!(theirs));
    assert_eq!(adopted["holder"]["podUid"], json!(uid));
    serving.until("both pods' names", |live| {
        live.len() == 2 && live.iter().all(|a| a["holder"]["pod"].is_string())
    });
    // It counts: one GPU is left, and it is let go like any other.
    house.start("last", WHOLE, 1).await.unwrap();
    house.start("late", WHOLE, 1).await.unwrap_err();
    house.kubelet.delete(&uid);
    serving.until("the adopted one's end", |live| live.iter().all(|a| a["holder"]["pod"] != "theirs"));
    assert_eq!(serving.live().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_that_an_older_release_shipped_stays_in_the_stack_and_loses_the_name() {
    let house = House::new("gpus: sim:2xt4").await;
    let serving = house.serve();
    // The same policy as other bytes: a section more that means nothing.
    let old = [EXCLUSIVE, &[0, 5, 3, b'o', b'l', b'd', 1]].concat();
    let digest = serving.push(&old)["digest"].as_str().unwrap().to_owned();
    let entry = |digest: &str| json!({ "entries": [{ "policy": "exclusive", "digest": digest }] });
    serving.call("PUT", "/stack", &entry(&digest));
    let version = |serving: &Serving, digest: &str| {
        let list = serving.call("GET", "/policies", &Value::Null);
        let items = list["items"].as_array().unwrap().clone();
        items.into_iter().find(|p| p["digest"] == digest).unwrap_or_else(|| panic!("{list}"))
    };
    assert_eq!(version(&serving, &digest)["shipped"], false);
    serving.stop();

    // Now as the older release had left it.
    let mut store = SledStore::open(&house.folder.path().join("state/store")).unwrap();
    let shipped = store.load().unwrap().into_iter().find_map(|record| match record {
        Record::Policy(mut version) if version.digest.as_str() == digest => {
            version.shipped = true;
            Some(Record::Policy(version))
        }
        _ => None,
    });
    store.append(&[Write::Put(shipped.unwrap())]).unwrap();
    drop(store);

    let serving = house.serve();
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let kept = version(&serving, &digest);
    assert_eq!((&kept["shipped"], &kept["active"]), (&json!(false), &json!(true)), "{kept}");
    house.start("a", WHOLE, 1).await.unwrap();
    // It is called: its offers are used.
    let uuid = serving.live()[0]["gpus"][0].as_str().unwrap().to_owned();
    let offered_by = |digest: &str| {
        let gpu = serving.call("GET", &format!("/gpus/{uuid}"), &Value::Null);
        gpu["parts"][0]["offeredBy"] == format!("exclusive@{}", &digest[..12])
    };
    until("its offer", || offered_by(&digest));
    // The name alone means what this release ships.
    serving.call("PUT", "/stack", &json!({ "entries": [{ "policy": "exclusive" }] }));
    let stack = serving.call("GET", "/stack", &Value::Null);
    let now = stack["entries"][0]["digest"].as_str().unwrap();
    assert_ne!(now, digest);
    assert_eq!(version(&serving, now)["shipped"], true);
    until("the new one's offer", || offered_by(now));
    // And going back is one call.
    serving.call("PUT", "/stack", &entry(&digest));
    assert_eq!(serving.call("GET", "/stack", &Value::Null)["entries"][0]["digest"], json!(digest));
    assert!(!serving.log().contains("cannot be called"), "{}", serving.log());
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
    let house = House::new("gpus: sim:4xt4").await;
    let serving = house.serve();
    house.kubelet.wait_allocatable(WHOLE, 4, SOON).await.unwrap();
    house.start("a", WHOLE, 1).await.unwrap();
    let gone = house.start("b", WHOLE, 1).await.unwrap();
    serving.until("their holders", |live| {
        live.len() == 2 && live.iter().all(|a| a["holder"]["pod"].is_string())
    });
    let stop = Arc::new(AtomicBool::new(false));
    let hammering = tokio::spawn(hammer(house.kubelet.clone(), Arc::clone(&stop)));
    let refused = |serving: &Serving| serving.log().contains("rejected by rate limit");
    until("a refusal in the daemon's log", || refused(&serving));
    house.start("c", WHOLE, 1).await.unwrap();
    house.kubelet.delete(&gone);
    stop.store(true, Ordering::SeqCst);
    hammering.await.unwrap();
    assert!(house.kubelet.calls(Rpc::List, "").errors > 0);
    serving.until("the end of b alone", |live| {
        // Newest first.
        let pods: Vec<&Value> = live.iter().map(|a| &a["holder"]["pod"]).collect();
        pods == ["c", "a"]
    });
    assert_eq!(house.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rival_for_the_same_resource_is_named_in_the_log_and_by_the_api() {
    let house = House::new("gpus: sim:2xt4").await;
    let serving = house.serve();
    let contested = "another device plugin serves this resource";
    let folder = house.folder.path().join("kubelet/device-plugins");
    let _rival = TinyPlugin::serve(&folder, "nvidia-gpu.sock", WHOLE, &["GPU-0"]).unwrap();
    let end = Instant::now() + SOON;
    while !serving.log().contains("another device plugin") {
        assert!(Instant::now() < end, "{}", serving.log());
        // What a rival does to us, as often as it takes to be quick three times in a row.
        house.kubelet.drop_stream(WHOLE);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let line = line_of(&serving.log(), "another device plugin");
    assert!(line.contains("ERROR") && line.contains(WHOLE), "{line}");
    until("the API says so", || {
        let node = serving.call("GET", "/node", &Value::Null).to_string();
        let (is_ready, said) = readiness(&serving);
        node.contains(contested) && !is_ready && said.to_string().contains(contested)
    });
}

/// `berth serve` on this state folder, under a shell that prepares itself first.
fn serve_after(prepare: &str, state: &Path) -> Command {
    let mut command = Command::new("/bin/sh");
    let berth = berth();
    command.args(["-c", &format!("{prepare}; exec \"$@\""), "sh"]).arg(berth.get_program());
    command.args(["serve", "--gpus", "sim:2xt4", "--admin-listen", "127.0.0.1:0", "--state-dir"]).arg(state);
    command.arg("--kubelet-dir").arg(state.join("no-kubelet"));
    command.env_remove("RUST_LOG");
    command
}

/// Ends with 1 and one line that begins with `error:` and contains this text.
fn refuses(mut command: Command, words: &[&str]) {
    let (code, said) = ended(&mut command);
    assert_eq!(code, Some(1), "{said}");
    let line = line_of(&said, "error: ");
    assert_eq!(said.lines().last(), Some(line.as_str()), "{said}");
    for word in words {
        assert!(line.contains(word), "{word:?} is missing in {line:?}");
    }
    assert!(!said.contains("panicked"), "{said}");
}

/// Without the rights that would make a superuser's writes succeed everywhere. Only this thread and
/// what it starts.
fn as_anybody<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
            // Who may not drop it has none.
            let _ = remove_capability_from_bounding_set(CapabilitySet::DAC_OVERRIDE);
            work()
        });
        worker.join().unwrap()
    })
}

#[test]
fn a_read_only_state_folder_is_reported_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let mode = |mode| std::fs::set_permissions(&state, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o500);
    as_anybody(|| refuses(serve_after(":", &state), &[state.to_str().unwrap(), "--state-dir"]));
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
    let house = House::new("gpus: sim:2xt4").await;
    house.serve().stop();
    let state = house.folder.path().join("state");
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
    let house = House::new("gpus: sim:2xt4").await;
    let state = house.folder.path().join("state");
    // What an operator puts there before the first start is no sign of a store.
    std::fs::create_dir_all(state.join("policies")).unwrap();
    std::fs::write(state.join("token"), "0123456789abcdef0123456789abcdef\n").unwrap();
    std::fs::set_permissions(state.join("token"), PermissionsExt::from_mode(0o600)).unwrap();
    let serving = house.serve();
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let gpus = serving.call("GET", "/gpus", &Value::Null);
    let uuid = gpus["items"][0]["uuid"].as_str().unwrap().to_owned();
    serving.call("PUT", &format!("/gpus/{uuid}/cordon"), &json!({ "reason": "fan" }));
    serving.stop();
    let data = state.join("store/data");
    let kept = house.folder.path().join("kept");
    std::fs::rename(&data, &kept).unwrap();
    refuses(
        serve_after(":", &state),
        &[state.join("store").to_str().unwrap(), "is missing", "berth state import", "berth state init"],
    );
    assert!(!data.exists());
    std::fs::rename(&kept, &data).unwrap();
    let cordoned = |serving: &Serving| {
        serving.call("GET", &format!("/gpus/{uuid}"), &Value::Null)["drain"]["state"] == "cordoned"
    };
    let serving = house.serve();
    assert!(cordoned(&serving));
    serving.stop();
    std::fs::remove_dir_all(&data).unwrap();
    let mut init = berth();
    let (code, said) = ended(init.args(["state", "init", "--state-dir"]).arg(&state));
    assert_eq!(code, Some(0), "{said}");
    let serving = house.serve();
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert!(!cordoned(&serving));
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
        let (code, said) = ended(berth().args(command));
        assert!(code == Some(1) && said.contains("a FIFO"), "{command:?}: {said}");
    }
}
