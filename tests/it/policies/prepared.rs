//! Activations during other events: the kubelet restarts, the disk cannot be read, another stack is activated, the
//! version is deleted, the compiler fails.

use crate::rest::versions::{key, signature};
use crate::support::admin_fakes::{digest_of, module};
use crate::support::admin_node::AdminNode;
use crate::support::gated_node::{Api, GatedNode};
use crate::support::gpus::{SHARED, WHOLE};
use crate::support::port::Port;
use crate::support::wait::{SOON, until, until_some};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_kernel::node::ports::PolicyFiles as _;
use futures_util::TryFutureExt;
use kubelet_standin::{Kubelet, PodSpec, Rpc};
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};

const TIMESLICE: &[u8] = include_bytes!("../../../policies-wasm/prebuilt/timeslice.wasm");

/// The same policy as other bytes: a custom section of one letter.
fn own(letter: u8) -> Vec<u8> {
    [TIMESLICE, &[0, 3, 1, b'x', letter]].concat()
}

fn push(api: &Api, module: &[u8]) -> String {
    api.push(module).expect(201)["digest"].as_str().unwrap().to_owned()
}

fn timeslice(digest: &str) -> Value {
    json!([{ "policy": "timeslice", "digest": digest, "parameters": { "replicas": 3 } }])
}

/// A pod as the scheduler sends it: not before the kubelet itself says that it has a free device, which is a
/// moment after the daemon offers one.
async fn admitted(node: &GatedNode, name: &str, resource: &str) {
    let held = |kubelet: &Kubelet, uid: &str| kubelet.held(uid, "main", resource).len();
    let free = |kubelet: &Kubelet| {
        let all: usize = kubelet.pods().keys().map(|uid| held(kubelet, uid)).sum();
        kubelet.allocatable(resource).is_some_and(|allocatable| allocatable > all)
    };
    node.kubelet.wait_for("a free device", SOON, free).await.unwrap();
    let pod = PodSpec::new("ns", name).container("main", &[(resource, 1)]);
    let uid = pod.uid.clone();
    node.kubelet.admit(pod).await.unwrap_or_else(|why| panic!("pod {name}: {why}"));
    node.kubelet.run(&uid).await.unwrap();
    // A kubelet that does not know the resource yet admits the pod and gives it nothing.
    assert_eq!(held(&node.kubelet, &uid), 1, "{resource} of pod {name}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_fails_at_its_policies_closes_the_store_for_the_next_one() {
    let mut node = GatedNode::new("stack: [{ policy: tetris }]").await;
    let Err(failed) = node.open("127.0.0.1:0".parse().unwrap()).await else {
        panic!("there is no policy `tetris`")
    };
    assert!(format!("{failed:#}").contains("tetris"), "{failed:#}");
    // It is closed before the start returns, so that it is whole even if the process ends at once.
    let lock = fs::File::open(node.folder.path().join("state/store/lock")).unwrap();
    lock.try_lock().expect("no thread of the failed start has the store");
    drop(lock);
    node.settings = node.settings.replace("tetris", "exclusive");
    let (daemon, api) = node.up().await;
    assert_eq!(api.active(), ["exclusive"]);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kubelet_that_restarts_while_a_policy_is_compiled_is_served_by_the_old_stack() {
    let node = GatedNode::new("stack: [{ policy: exclusive }]").await;
    let (daemon, api) = node.up().await;
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let (before, began) = (api.revision(), node.began());
    node.set("hold", true);
    let mut put = api.putting(json!([{ "policy": "timeslice", "parameters": { "replicas": 3 } }]), None);
    node.until_began_by(began + 1, &mut put).await;

    node.kubelet.restart().await.unwrap();
    node.kubelet.wait_for("to be served", SOON, |k| k.is_served(WHOLE)).await.unwrap();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(node.kubelet.calls(Rpc::Register, WHOLE).count, 2);
    admitted(&node, "meanwhile", WHOLE).await;
    let live = api.get("/allocations")["items"].clone();
    assert!(live[0]["decision"]["by"].to_string().contains("baseline"), "{live}");
    assert!(!put.is_finished());
    assert_eq!((api.revision(), api.active()), (before, vec!["exclusive".to_owned()]));

    node.set("hold", false);
    assert_eq!(put.await.unwrap().expect(200)["revision"], before + 1);
    // The held GPU stays the pod's.
    node.kubelet.wait_allocatable(SHARED, 3, SOON).await.unwrap();
    admitted(&node, "after", SHARED).await;
    assert_eq!((api.revision(), api.active()), (before + 1, vec!["timeslice".to_owned()]));
    assert_eq!(node.began(), began + 1);
    assert_eq!(node.kubelet.anomalies(), []);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unusable_folder_of_policies_is_reported_and_operations_wait_for_it() {
    let node = GatedNode::new("").await;
    let (daemon, api) = node.up().await;
    let digest = push(&api, &own(b'a'));
    let (before, files) = (api.revision(), node.files(""));
    let aside = node.folder.path().join("aside");
    fs::rename(node.policies(), &aside).unwrap();
    fs::write(node.policies(), "").unwrap();

    let refused = api.push(&own(b'b')).problem(500, "internal");
    assert!(
        refused.contains("cannot save the policy: Not a directory") && refused.contains("repeat the request")
    );
    let refused = api.put(&timeslice(&digest), None).problem(500, "internal");
    assert!(refused.contains("timeslice@") && refused.contains("cannot read the policy"), "{refused}");
    assert!(refused.contains("not activated") && refused.contains("repeat the request"), "{refused}");
    assert_eq!((api.revision(), api.active()), (before, Vec::new()));
    // What comes with the daemon needs no file.
    api.put(&json!([{ "policy": "exclusive" }]), None).expect(200);
    admitted(&node, "a", WHOLE).await;

    fs::remove_file(node.policies()).unwrap();
    fs::rename(&aside, node.policies()).unwrap();
    let mut now = node.files("");
    now.sort();
    let mut then = files;
    then.sort();
    assert_eq!(now, then, "what was refused left nothing");
    api.put(&timeslice(&digest), None).expect(200);
    push(&api, &own(b'b'));
    assert_eq!(api.active(), ["timeslice"]);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_activations_compile_one_after_the_other_and_one_whole_stack_is_left() {
    let node = GatedNode::new("").await;
    let (daemon, api) = node.up().await;
    let names = |names: [&str; 2]| names.map(|name| json!({ "policy": name }));
    let race = async |one: [&str; 2], other: [&str; 2], revision| {
        let began = node.began();
        node.set("hold", true);
        let mut one = api.putting(json!(names(one)), revision);
        node.until_began_by(began + 1, &mut one).await;
        let second = api.putting(json!(names(other)), revision);
        node.set("hold", false);
        let (one, mut second) = (one.await.unwrap(), second.await.unwrap());
        // On a busy machine the first one takes longer than the second waits for its turn.
        let end = Instant::now() + SOON;
        while second.status == 503 {
            assert!(Instant::now() < end, "the second activation had no turn within 300 s");
            second = api.putting(json!(names(other)), revision).await.unwrap();
        }
        [one, second]
    };

    let (one, other) = (["timeslice", "binpack"], ["mixed", "spread"]);
    let answers = race(one, other, None).await;
    let revisions = answers.map(|answer| answer.expect(200)["revision"].as_u64().unwrap());
    let last = if revisions[0] > revisions[1] { one } else { other };
    assert_eq!(api.active(), last);
    assert_eq!(node.began(), 4);

    let (one, other) = (["exclusive", "topology"], ["triage-xid", "exclusive"]);
    let before = api.revision();
    let mut answers = race(one, other, Some(before)).await;
    answers.sort_by_key(|answer| answer.status);
    let won = answers[0].expect(200);
    let says = answers[1].problem(412, "changed-meanwhile");
    assert!(says.contains("read the active stack"), "{says}");
    assert_eq!((api.revision(), won["revision"].as_u64()), (before + 1, Some(before + 1)));
    let first = won["entries"][0]["policy"].as_str().unwrap();
    assert_eq!(api.active(), if first == one[0] { one } else { other });

    let log = node.log();
    let turns = log.chunks(2).all(|turn| turn == ["began", "ended"]);
    assert!(turns, "two compilations at once: {log:?}");
    // While the active stack is unknown, nothing is compiled.
    let memory = json!([{ "policy": "quota" }]);
    api.put(&memory, Some(before)).problem(412, "changed-meanwhile");
    assert_eq!(node.log(), log);
    daemon.stop().await;
}

const MEMORY: &str = r#"{ "policy": "memory", "parameters": { "sizes": [{ "resource": "nvidia.com/gpu.shared", "memoryMiB": 4096 }] } }"#;

/// A node that was stopped with `memory` active behind `first`, and whose next start must compile it, but
/// cannot. `exclusive` is compiled.
async fn memory_uncompiled(first: impl FnOnce(&Api) -> Vec<Value>) -> GatedNode {
    let node = GatedNode::new("").await;
    let (daemon, api) = node.up().await;
    api.put(&json!([{ "policy": "exclusive" }]), None).expect(200);
    let mut entries = first(&api);
    entries.push(serde_json::from_str(MEMORY).unwrap());
    let stack = api.put(&json!(entries), None).expect(200);
    node.kubelet.wait_allocatable(SHARED, 6, SOON).await.unwrap();
    daemon.stop().await;
    node.uncompile(stack["entries"][entries.len() - 1]["digest"].as_str().unwrap());
    node.set("fail", true);
    node
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_its_policies_starts_reports_that_and_loads_them_later() {
    let node = memory_uncompiled(|_| Vec::new()).await;
    let (daemon, api) = node.up().await;
    // What the policy offered stays on offer.
    node.kubelet.wait_allocatable(SHARED, 6, SOON).await.unwrap();
    admitted(&node, "meanwhile", SHARED).await;
    let by = || api.get("/allocations")["items"][0]["decision"]["by"].to_string();
    assert!(by().contains("baseline"), "{}", by());
    let (ready, says) = until_some("the message about the policy", || {
        let (ready, says) = api.ready();
        Some((ready, says?))
    });
    assert!(ready && says.contains("policy memory@") && says.contains("out of order"), "{says}");
    let record = || api.get("/stack")["entries"][0]["record"].clone();
    assert!(record()["faults"]["byKind"]["missing"].as_u64() > Some(0), "{}", record());
    // It keeps retrying.
    let began = node.began();
    node.until_began(began + 2);

    node.set("fail", false);
    until("the policy", || api.ready() == (true, None));
    let uid = node.kubelet.pods().into_keys().next().unwrap();
    node.kubelet.delete(&uid);
    until("its end", || api.get("/allocations")["items"] == json!([]));
    admitted(&node, "after", SHARED).await;
    assert!(by().contains("memory@"), "{}", by());
    assert_eq!(record()["suspended"], false);
    assert_eq!(node.kubelet.anomalies(), []);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_stops_trying_when_another_stack_is_activated() {
    let mut node = memory_uncompiled(|_| Vec::new()).await;
    // By itself it would find out after the test.
    node.stack_retry_interval = 2 * SOON;
    let (daemon, api) = node.up().await;
    until("the message about the policy", || api.ready().1.is_some());
    api.put(&json!([{ "policy": "exclusive" }]), None).expect(200);
    until("the end of it", || api.ready() == (true, None));
    // An attempt that was under way has ended: readiness reports no error only after its end.
    let log = node.log();
    admitted(&node, "a", WHOLE).await;
    assert_eq!((node.log(), api.active()), (log, vec!["exclusive".to_owned()]));
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_untrusted_policy_is_not_called_and_the_other_entries_are() {
    let mut node =
        memory_uncompiled(|api| timeslice(&push(api, &own(b'u'))).as_array().unwrap().clone()).await;
    let (_, trusted) = key("own", 1);
    let trusted = json!([{ "name": "own", "key": BASE64.encode(trusted.key) }]);
    node.settings = format!("{}\ntrustedKeys: {trusted}\n", node.settings);
    let (daemon, api) = node.up().await;
    until("the message about the policy", || {
        api.ready().1.is_some_and(|says| says.contains("policy memory@"))
    });
    node.set("fail", false);
    until("the policy that may be called", || api.ready() == (true, None));
    until("an answer", || answered(&api, 1) > 0);
    assert_eq!(answered(&api, 0), 0);
    daemon.stop().await;
}

/// How often a policy of the active stack answered without a fault.
fn answered(api: &Api, place: usize) -> u64 {
    let record = api.get("/stack")["entries"][place]["record"].clone();
    let hooks = record["hooks"].as_object().unwrap().values();
    hooks.map(|hook| hook["calls"].as_u64().unwrap() - hook["faults"].as_u64().unwrap()).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permanently_lost_policy_blocks_no_other() {
    let lost = own(b'l');
    let node = memory_uncompiled(|api| timeslice(&push(api, &lost)).as_array().unwrap().clone()).await;
    for file in node.files(digest_of(&lost).as_str()) {
        fs::remove_file(node.policies().join(file)).unwrap();
    }
    let (daemon, api) = node.up().await;
    node.set("fail", false);
    until("the policy that can be had", || answered(&api, 1) > 0);
    until("the message about the other", || {
        api.ready().1.is_some_and(|says| says.contains("upload it again"))
    });
    // The advised action helps, although the node has the version.
    api.push(&lost).expect(200);
    until("both", || api.ready() == (true, None));
    until("an answer of the other", || answered(&api, 0) > 0);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_policy_is_called_as_soon_as_it_is_uploaded_again() {
    let lost = own(b'l');
    let mut node = GatedNode::new("").await;
    let (daemon, api) = node.up().await;
    api.put(&timeslice(&push(&api, &lost)), None).expect(200);
    daemon.stop().await;
    for file in node.files(digest_of(&lost).as_str()) {
        fs::remove_file(node.policies().join(file)).unwrap();
    }
    // By itself it would try again after the test.
    node.stack_retry_interval = 2 * SOON;
    let (daemon, api) = node.up().await;
    let says = until_some("the message about the policy", || api.ready().1);
    assert!(says.contains("upload it again (`berth policy push FILE`)"), "{says}");
    api.push(&lost).expect(200);
    until("the policy", || api.ready() == (true, None));
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signature_that_cannot_be_checked_now_is_not_a_missing_one() {
    let (pair, trusted) = key("own", 1);
    let trusted = json!([{ "name": "own", "key": BASE64.encode(trusted.key) }]);
    let node = GatedNode::new(&format!("trustedKeys: {trusted}")).await;
    let (daemon, api) = node.up().await;
    let module = own(b's');
    let signed = signature(&pair, &module);
    let headers = [("content-type", "application/wasm"), ("berth-signature", signed.as_str())];
    api.ask("POST", "/policies", &headers, &module).expect(201);
    let digest = digest_of(&module);
    api.put(&timeslice(digest.as_str()), None).expect(200);
    daemon.stop().await;
    // As a disk that cannot be read, root or not: a socket cannot be opened. Its first path is a short one.
    let file = node.policies().join(format!("{digest}.wasm"));
    let (aside, socket) = (node.policies().join("aside"), node.policies().join("s"));
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    fs::rename(&file, &aside).unwrap();
    fs::rename(&socket, &file).unwrap();

    let (daemon, api) = node.up().await;
    let says = until_some("the message about the policy", || api.ready().1);
    assert!(says.contains("cannot read the policy"), "{says}");
    fs::rename(&aside, &file).unwrap();
    until("the policy", || api.ready() == (true, None));
    until("an answer", || answered(&api, 0) > 0);
    assert_eq!(api.get(&format!("/policies/{digest}"))["signedBy"], "own");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_is_not_deleted_while_it_is_compiled() {
    let node = GatedNode::new("").await;
    let (daemon, api) = node.up().await;
    let digest = push(&api, &own(b'a'));
    node.uncompile(&digest);
    let began = node.began();
    node.set("hold", true);
    let mut put = api.putting(timeslice(&digest), None);
    node.until_began_by(began + 1, &mut put).await;
    let refused = api.delete(&digest);
    assert!(refused.headers.contains_key("retry-after"));
    let says = refused.problem(503, "busy");
    assert!(says.contains("compilation"), "{says}");
    node.set("hold", false);
    put.await.unwrap().expect(200);
    api.delete(&digest).problem(409, "in-use");
    assert_eq!(api.active(), ["timeslice"]);

    // In either order: an active policy has its files, and a deleted one has none.
    for _ in 0..8 {
        api.put(&json!([]), None).expect(200);
        node.uncompile(&digest);
        let put = api.putting(timeslice(&digest), None);
        let deleted = api.delete(&digest);
        let put = put.await.unwrap();
        match deleted.status {
            204 => {
                assert!(matches!(put.status, 404 | 410 | 422), "{put:?}");
                assert_eq!((api.active(), node.files(&digest)), (Vec::new(), Vec::new()));
                assert_eq!(push(&api, &own(b'a')), digest);
            }
            409 | 503 => {
                put.expect(200);
                // Code that was never let go of needs no compiled form beside the module.
                let files = node.files(&digest);
                assert!(files.iter().any(|file| file.ends_with(".wasm")), "{files:?}");
            }
            other => panic!("{other}: {deleted:?}"),
        }
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_a_start_compiles_is_not_deleted_meanwhile() {
    let node = GatedNode::new("").await;
    let (daemon, api) = node.up().await;
    api.put(&json!([{ "policy": "exclusive" }]), None).expect(200);
    let digest = push(&api, &own(b'a'));
    api.put(&timeslice(&digest), None).expect(200);
    daemon.stop().await;
    node.uncompile(&digest);

    let began = node.began();
    node.set("hold", true);
    // Known beforehand, since the API is asked while the daemon is built: it answers before policies are loaded.
    let port = Port::held();
    let api = node.api(port.address());
    let mut building = tokio::spawn(node.open(port.address()));
    let built = (&mut building).map_ok(|built| built.map(|daemon| daemon.admin_address()));
    node.until_began_by(began + 1, &mut { built }).await;
    // The operator has another stack meanwhile, and does not want the version any more.
    api.put(&json!([{ "policy": "exclusive" }]), None).expect(200);
    api.delete(&digest).problem(503, "busy");
    node.set("hold", false);
    let daemon = building.await.unwrap().unwrap();
    assert_eq!(api.delete(&digest).status, 204);
    assert_eq!(node.files(&digest), Vec::<String>::new());
    assert_eq!(api.active(), ["exclusive"]);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_deletes_incomplete_files_of_a_killed_process() {
    let node = GatedNode::new("").await;
    let (daemon, api) = node.up().await;
    let digest = push(&api, &own(b'a'));
    daemon.stop().await;
    let (mut kept, unknown) = (node.files(""), "f".repeat(64));
    kept.push(format!("{unknown}.wasm"));
    kept.push("notes".to_owned());
    let gone = [
        format!("{digest}.wasm.draft"),
        format!("{unknown}-0123.cwasm"),
        format!("{unknown}-0123.cwasm.draft"),
    ];
    for name in kept.iter().skip(2).chain(&gone) {
        fs::write(node.policies().join(name), "x").unwrap();
    }
    let (daemon, api) = node.up().await;
    let mut left = node.files("");
    left.sort();
    kept.sort();
    assert_eq!(left, kept);
    api.put(&timeslice(&digest), None).expect(200);
    daemon.stop().await;
}

#[test]
fn a_disconnected_upload_leaves_no_partial_policy() {
    let node = AdminNode::new(1);
    let digest = digest_of(&module("share", "1"));
    let known = || node.kernel.snapshot().policies.contains_key(&digest);
    // The node's runtime runs meanwhile, so that the upload can go on.
    let waiting = |what: &str, holds: &dyn Fn() -> bool| {
        until(what, || {
            node.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(1)).await });
            holds()
        });
    };
    let upload = || {
        let module = module("share", "1");
        node.core
            .policies
            .upload(berth_core::policies::Upload { module, ..berth_core::policies::Upload::default() })
    };
    node.policies.set_hold(true);
    node.runtime.block_on(async {
        tokio::select! {
            biased;
            done = upload() => panic!("{done:?}"),
            () = async { while !node.policies.waiting() { tokio::task::yield_now().await } } => {}
        }
    });
    node.policies.set_hold(false);
    waiting("the record", &known);
    node.runtime.block_on(async {
        tokio::select! {
            biased;
            done = node.core.policies.delete_policy(digest.clone(), None) => panic!("{done:?}"),
            () = std::future::ready(()) => {}
        }
    });
    waiting("the end of its bytes", &|| node.policies.read_all(&digest).is_err());
    assert!(!known());
}
