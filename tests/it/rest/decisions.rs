//! Recorded decisions, as an operator uses them: lists, explanations, replays of another policy, and shadows.

use crate::support::gpus::{SHARED, WHOLE};
use crate::support::guests::guest;
use crate::support::process_node::ProcessNode;
use crate::support::wait::SOON;
use serde_json::{Value, json};

const STACK: &str = "gpus: sim:4xh100\nstack: [{ policy: timeslice, parameters: { replicas: 2 } }]";

fn items(answer: &Value) -> &Vec<Value> {
    answer["items"].as_array().unwrap_or_else(|| panic!("{answer}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_is_explained_and_its_decisions_outlive_a_restart() {
    let node = ProcessNode::new(STACK).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 8, SOON).await.unwrap();
    let pod = node.start("a", SHARED, 2).await.unwrap();
    daemon.until("its holder", |live| live.len() == 1 && live[0]["holder"]["pod"] == "a");
    let id = daemon.live()[0]["id"].as_str().unwrap().to_owned();

    let granted = daemon.get_until("/decisions?outcome=granted", |list| items(list).len() == 1);
    let granted = &items(&granted)[0];
    assert_eq!(granted["allocation"], id.as_str());
    assert_eq!(granted["request"]["resource"], SHARED);
    assert_eq!(granted["gpus"].as_array().unwrap().len(), 2, "{granted}");
    let placed = daemon.get_until("/decisions?hook=place", |list| items(list).len() == 1);
    let placed = &items(&placed)[0];
    let call = &placed["calls"][0];
    assert_eq!((call["said"].as_str(), call["parameters"]["replicas"].as_u64()), (Some("answer"), Some(2)));
    assert!(call["fuel"].as_u64().unwrap() > 1000 && call["microseconds"].as_u64().unwrap() > 0, "{call}");
    assert_eq!(placed["answer"]["devices"].as_array().unwrap().len(), 2);

    let of_pod = daemon.get("/decisions?namespace=ns&pod=a&hook=admit");
    assert_eq!(items(&of_pod).len(), 1, "by the allocation's holder: {of_pod}");
    assert!(items(&daemon.get("/decisions?pod=b")).is_empty());

    let why = daemon.get(&format!("/allocations/{id}/explanation"));
    let first = why["sentences"][0].as_str().unwrap();
    assert!(first.starts_with("Placed by timeslice: "), "{first}");
    let sentences = why["sentences"].to_string();
    assert!(!sentences.contains("passed"), "no answer reads as an approval: {sentences}");
    for words in [
        "2 x nvidia.com/gpu.shared on GPU 0 and GPU 1",
        "ns/a/main has",
        "least-held",
        "placed by timeslice@",
        "No policy objected; admitted by default.",
    ] {
        assert!(sentences.contains(words), "{words} is missing in {sentences}");
    }
    assert_eq!(why["decisions"].as_array().unwrap().len(), 2);

    for (args, words) in [
        (
            vec!["decision", "list", "--outcome", "granted", "--since", "1h"],
            vec!["granted", "AGE", "2 x nvidia.com/gpu.shared"],
        ),
        (vec!["decision", "list", "--outcome", "granted", "-o", "wide"], vec!["granted", "baseline", "PODS"]),
        (vec!["decision", "show", &placed["seq"].to_string()], vec!["placed", "least-held", "replicas"]),
        (vec!["allocation", "explain", &id], vec!["GPU 0 and GPU 1", "berth decision show"]),
        (vec!["policy", "replay", "timeslice", "--parameters", "{\"replicas\": 2}"], vec!["HOOK", "place"]),
        (vec!["policy", "shadow", "start", "exclusive"], vec!["exclusive@", "shadow 1"]),
        (vec!["policy", "shadow", "list"], vec!["exclusive@", "SKIPPED"]),
        (vec!["policy", "shadow", "stop", "1"], vec!["exclusive@"]),
    ] {
        let printed = daemon.printed(&args);
        for word in words {
            assert!(printed.contains(word), "{args:?}: {word} is missing in {printed}");
        }
    }

    let input = daemon.get(&format!("/decisions/{}/input", placed["seq"]));
    assert_eq!(input["node"]["world"], "berth:policy@0.1.0");
    assert_eq!(input["node"]["node"]["parts"].as_array().unwrap().len(), 4);
    assert_eq!(input["question"]["place"]["size"], 2);

    let seq = granted["seq"].clone();
    daemon.stop();
    let daemon = node.serve();
    let again = daemon.get(&format!("/decisions/{seq}"));
    assert_eq!(again["allocation"], id.as_str(), "{again}");
    // Its pod is known, also once it has ended.
    assert_eq!((&again["holder"]["namespace"], &again["holder"]["pod"]), (&"ns".into(), &"a".into()));
    node.kubelet.delete(&pod);
    daemon.until("its end", <[Value]>::is_empty);
    assert_eq!(daemon.get(&format!("/decisions/{seq}"))["holder"], again["holder"]);
    assert_eq!(items(&daemon.get("/decisions?outcome=granted"))[0]["holder"], again["holder"]);
    assert_eq!(daemon.get("/decisions/999999")["type"], "/problems/unknown-decision");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_shows_the_answers_of_another_policy() {
    let node = ProcessNode::new(STACK).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 8, SOON).await.unwrap();
    for name in ["a", "b"] {
        node.start(name, SHARED, 1).await.unwrap();
    }
    daemon.get_until("/decisions?outcome=granted", |list| items(list).len() == 2);
    daemon.get_until("/decisions?hook=place", |list| items(list).len() == 2);

    let same = json!({"policy": "timeslice", "parameters": {"replicas": 2}});
    let report = daemon.call("POST", "/replays?hook=place", &same);
    assert_eq!(
        report["counts"]["place"],
        json!({"same": 2, "differs": 0, "denies": 0, "passes": 0, "fails": 0, "skipped": 0, "withoutCandidates": 0})
    );
    let report = daemon.call("POST", "/replays", &same);
    let asked = report["looked"].as_u64().unwrap();
    let same_to_all: u64 =
        report["counts"].as_object().unwrap().values().map(|c| c["same"].as_u64().unwrap()).sum();
    let passed: u64 =
        report["counts"].as_object().unwrap().values().map(|c| c["passes"].as_u64().unwrap()).sum();
    assert_eq!(same_to_all + passed, asked, "the same policy answers the same: {report}");

    let other = json!({"policy": "timeslice", "parameters": {"replicas": 4}});
    let report = daemon.call("POST", "/replays?hook=offer", &other);
    assert!(report["counts"]["offer"]["differs"].as_u64().unwrap() > 0, "{report}");
    let words = report["differences"][0]["words"].as_str().unwrap();
    assert!(words.contains("as 4 nvidia.com/gpu.shared") && words.contains("instead of 2"), "{words}");
    assert_eq!(daemon.get("/stack")["entries"][0]["parameters"]["replicas"], 2, "nothing else happens");

    // Wrong parameters are refused at once, even if there is no recorded call.
    let wrong = [
        json!({"policy": "timeslice", "parameters": {"replicas": 0}}),
        json!({"policy": "quota", "parameters": {"namspaces": {}}}),
        json!({"policy": "triage-xid", "parameters": {"xids": {"sixty": {}}}}),
    ];
    for candidate in &wrong {
        for path in ["/replays", "/shadows"] {
            let refused = daemon.call("POST", path, candidate);
            assert_eq!(refused["type"], "/problems/stack-fails", "{path}: {refused}");
            let name = candidate["policy"].as_str().unwrap();
            assert!(refused["detail"].as_str().unwrap().contains(&format!("policy {name}@")), "{refused}");
        }
    }
    assert_eq!(items(&daemon.get("/shadows")).len(), 0);
    // What fails on a question of the record only is counted, and ends the command with 1.
    daemon.push(&guest("answer-no-case"));
    for (policy, parameters, code) in [("timeslice", r#"{"replicas": 4}"#, 0), ("hostile", "{}", 1)] {
        let output =
            daemon.client(&["policy", "replay", policy, "--parameters", parameters]).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{policy}: {error}");
        assert_eq!(error.contains(" failed on "), code == 1, "{error}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("DIFFERENCE"), "{policy}");
    }
    let unknown = daemon.call("POST", "/replays", &json!({"policy": "unknown"}));
    assert_eq!(unknown["type"], "/problems/invalid", "{unknown}");
    assert_eq!(daemon.call("POST", "/replays?hook=sing", &same)["type"], "/problems/malformed-query");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_is_called_in_addition_to_the_stack_and_changes_nothing() {
    let node = ProcessNode::new("gpus: sim:2xh100\nstack: [{ policy: exclusive }]").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let candidate = json!({"policy": "timeslice", "parameters": {"replicas": 3}});
    let shadow = daemon.call("POST", "/shadows", &candidate);
    let path = format!("/shadows/{}", shadow["id"]);
    node.start("a", WHOLE, 1).await.unwrap();
    // The pod's grant causes an evaluation of offers, also by the shadow.
    let fares = daemon.get_until(&path, |s| s["counts"]["offer"]["differs"].as_u64() > Some(0));
    assert!(
        fares["differences"][0]["words"].as_str().unwrap().contains("3 nvidia.com/gpu.shared"),
        "{fares}"
    );
    daemon.get_until(&path, |s| s["counts"]["admit"]["passes"].as_u64() == Some(1));
    assert_eq!(node.kubelet.capacity(SHARED), None, "it has no effect");
    assert_eq!(fares["differences"][0].get("seq"), None, "the same offer again is not recorded: {fares}");
    // An offer that is new is, and the difference has its number.
    let other = json!({"entries": [{"policy": "timeslice", "parameters": {"replicas": 2}}]});
    daemon.call("PUT", "/stack", &other);
    let recorded = |fares: &Value| {
        fares["differences"].as_array().unwrap().iter().find_map(|difference| difference["seq"].as_u64())
    };
    let fares = daemon.get_until(&path, |fares| recorded(fares).is_some());
    let seq = recorded(&fares).unwrap();
    assert_eq!(daemon.get(&format!("/decisions/{seq}"))["hook"], "offer", "{fares}");
    let shown = daemon.printed(&["policy", "shadow", "show", "1"]);
    let row = shown.lines().find(|line| line.starts_with(&format!("{seq} "))).unwrap();
    assert!(row.contains("GPU 0 (GPU-") && shown.contains("-: not recorded, so without a number"), "{shown}");
    for _ in 1..4 {
        daemon.call("POST", "/shadows", &candidate);
    }
    assert_eq!(daemon.call("POST", "/shadows", &candidate)["type"], "/problems/limit-reached");
    assert_eq!(items(&daemon.get("/shadows")).len(), 4);
    daemon.call("DELETE", &path, &Value::Null);
    assert_eq!(daemon.get(&path)["type"], "/problems/unknown-shadow");
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_journal_the_daemon_reports_that_and_serves() {
    let node = ProcessNode::new("gpus: sim:1xt4\ndecisions: { maxMiB: 0 }").await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    node.start("a", WHOLE, 1).await.unwrap();
    assert_eq!(daemon.get("/decisions")["type"], "/problems/no-journal");
    let id = daemon.live()[0]["id"].as_str().unwrap().to_owned();
    let why = daemon.get(&format!("/allocations/{id}/explanation"));
    assert!(why["sentences"].to_string().contains("The decision is not recorded"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unusable_journal_removes_no_gpu() {
    let node = ProcessNode::new("gpus: sim:1xt4").await;
    let state = node.folder.path().join("state");
    std::fs::create_dir_all(&state).unwrap();
    std::fs::write(state.join("decisions"), "a file where a folder should be").unwrap();
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    node.start("a", WHOLE, 1).await.unwrap();
    daemon.line(|line| line.contains("decisions are not recorded"));
    assert_eq!(daemon.get("/decisions")["type"], "/problems/no-journal");
}
