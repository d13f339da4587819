//! Every route of the admin API, over HTTP: what it shows and what it changes.

use crate::support::admin_fakes::module;
use crate::support::admin_node::AdminNode;
use crate::support::gpus::{SHARED, WHOLE};
use crate::support::wait::SOON;
use berth_admin::StartStep;
use berth_kernel::ids::names::Resource;
use berth_observe::counters::{LivenessLimits, RegistrationState};
use std::sync::atomic::Ordering;
use std::time::Duration;

#[test]
fn the_node_shows_its_resources_and_its_checks() {
    let node = AdminNode::new(2);
    let allocation = node.allocate(0);
    let answer = node.get("/api/v1/node").expect(200);
    assert_eq!(answer["name"], "node-1");
    assert_eq!(answer["version"], env!("CARGO_PKG_VERSION"));
    assert!(answer["startedAt"].as_str().is_some_and(|at| at.ends_with('Z')), "{answer}");
    assert_eq!(answer["ready"], true);
    assert_eq!(answer["counts"]["gpus"], 2);
    assert_eq!(answer["counts"]["allocations"], 1);
    let resource = &answer["resources"][0];
    assert_eq!(resource["resource"], WHOLE);
    assert_eq!(
        (&resource["devices"], &resource["held"], &resource["free"]),
        (&2.into(), &1.into(), &1.into())
    );
    assert_eq!(resource["registration"]["done"], false);

    let waiting = StartStep::Waiting("no kubelet.sock".into());
    node.kernel.counters().kubelet.set_registration(WHOLE, None);
    node.facts.lock().unwrap().registrations = [(Resource::parse(WHOLE).unwrap(), waiting)].into();
    let answer = node.get("/api/v1/node").expect(200);
    assert_eq!(answer["resources"][0]["registration"]["waiting"], "no kubelet.sock");
    assert_eq!(answer["ready"], false, "it was never registered, and a rollout is not to go on");
    let kubelet = &node.kernel.counters().kubelet;
    kubelet.set_registration(WHOLE, Some(RegistrationState::Registered));
    kubelet.set_registration(WHOLE, Some(RegistrationState::Waiting));
    let answer = node.get("/api/v1/node").expect(200);
    assert_eq!(answer["ready"], true, "a kubelet that went is waited for");
    node.delete(&format!("/api/v1/allocations/{}?force=true", allocation.id)).expect(200);
    let after = node.get("/api/v1/node").expect(200);
    assert!(after["generation"].as_u64() > answer["generation"].as_u64());
    assert_eq!(after["counts"]["endedAllocations"], 1);
}

#[test]
fn gpus_show_health_devices_holders_and_links() {
    let node = AdminNode::new(2);
    let allocation = node.allocate(1);
    let list = node.get("/api/v1/gpus").expect(200);
    let uuids: Vec<_> = list["items"].as_array().unwrap().iter().map(|g| g["uuid"].clone()).collect();
    assert_eq!(uuids, ["GPU-0", "GPU-1"]);
    assert_eq!(list["items"][1]["resources"][0]["held"], 1);
    assert_eq!(list["items"][0]["memoryUsedMiB"], 7);

    let gpu = node.get("/api/v1/gpus/GPU-1").expect(200);
    assert_eq!(gpu["health"]["state"], "healthy");
    assert_eq!(gpu["drain"]["state"], "active");
    assert_eq!(gpu["attributes"]["compute.capability"], "9.0");
    assert_eq!(gpu["links"][0]["gpu"], "GPU-0");
    assert_eq!(gpu["links"][0]["path"], "hostBridge");
    assert_eq!(gpu["links"][0]["nvlinks"], 18);
    let part = &gpu["parts"][0];
    assert_eq!(part["offeredBy"], "baseline");
    assert_eq!(part["offer"][0]["consumes"]["whole"], true);
    let device = &part["devices"][0];
    assert_eq!(device["id"], "GPU-1");
    assert_eq!(device["state"], "held");
    assert_eq!(device["allocations"][0], allocation.id.to_string());
    node.get("/api/v1/gpus/GPU-7").problem(404, "unknown-gpu");
}

#[test]
fn an_index_instead_of_a_uuid_is_answered_with_the_uuid() {
    let node = AdminNode::new(2);
    for (method, path) in [
        ("GET", ""),
        ("DELETE", ""),
        ("PUT", "/cordon"),
        ("DELETE", "/cordon"),
        ("GET", "/drain"),
        ("PUT", "/drain"),
        ("DELETE", "/drain"),
        ("PUT", "/health"),
        ("GET", "/processes"),
    ] {
        let says = node.ask(method, &format!("/api/v1/gpus/1{path}"), &[], b"").problem(404, "unknown-gpu");
        assert!(says.contains("index 1 is GPU-1 now"), "{method} {path}: {says}");
    }
    for path in ["allocations", "bypass", "decisions", "events"] {
        let says = node.get(&format!("/api/v1/{path}?gpu=1")).problem(400, "malformed-query");
        assert!(says.starts_with("gpu: ") && says.contains("index 1 is GPU-1 now"), "{path}: {says}");
    }
    let says = node.get("/api/v1/gpus/7").problem(404, "unknown-gpu");
    assert!(says.contains("the index 7") && says.contains("list the GPUs"), "{says}");
    assert_eq!(node.get("/api/v1/gpus/GPU-1").expect(200)["drain"]["state"], "active", "nothing was ordered");
}

#[test]
fn a_cordon_withdraws_free_devices_is_idempotent_and_an_uncordon_reverts_it() {
    let node = AdminNode::new(2);
    let cordon = "/api/v1/gpus/GPU-0/cordon";
    let gpu = node.json("PUT", cordon, r#"{"reason": "fan"}"#).expect(200);
    assert_eq!(gpu["drain"]["state"], "cordoned");
    assert_eq!((&gpu["drain"]["by"], &gpu["drain"]["why"]), (&"admin".into(), &"fan".into()));
    assert_eq!(gpu["parts"][0]["devices"][0]["state"], "withdrawn");
    assert_eq!(node.json("PUT", cordon, r#"{"reason": "fan"}"#).expect(200)["drain"], gpu["drain"]);
    let again = node.json("PUT", cordon, r#"{"reason": "other"}"#).expect(200);
    assert_eq!((&again["drain"]["why"], &again["drain"]["since"]), (&"other".into(), &gpu["drain"]["since"]));
    let active = node.delete(cordon).expect(200);
    assert_eq!(active["drain"]["state"], "active");
    assert_eq!(active["parts"][0]["devices"][0]["state"], "free");
    assert_eq!(node.delete(cordon).expect(200)["drain"]["state"], "active");
    // A reason may be left out, and so may the whole body.
    let bare = node.ask("PUT", cordon, &[("content-length", "0")], b"").expect(200);
    assert_eq!(bare["drain"]["why"], serde_json::Value::Null);
    node.json("PUT", "/api/v1/gpus/GPU-9/cordon", "{}").problem(404, "unknown-gpu");
    node.delete("/api/v1/gpus/GPU-9/cordon").problem(404, "unknown-gpu");
}

#[test]
fn a_drain_shows_its_remaining_holders_and_its_end() {
    let node = AdminNode::new(2);
    let allocation = node.allocate(0);
    let drain = "/api/v1/gpus/GPU-0/drain";
    let order = r#"{"reason": "fan", "deadlineSeconds": 600, "atDeadline": "giveUp"}"#;
    let gpu = node.json("PUT", drain, order).expect(200);
    assert_eq!((&gpu["drain"]["state"], &gpu["drain"]["why"]), (&"draining".into(), &"fan".into()));
    let progress = &gpu["drain"]["progress"];
    assert_eq!(progress["allocations"][0], allocation.id.to_string());
    assert_eq!((&progress["late"], &progress["atDeadline"]), (&false.into(), &"giveUp".into()));
    assert!(progress["deadline"].is_string());
    assert_eq!(gpu["parts"][0]["devices"][0]["healthy"], true, "no pod is evicted");
    let off = node.delete(drain).expect(200);
    assert_eq!(
        (&off["drain"]["state"], &off["drain"]["progress"]),
        (&"cordoned".into(), &serde_json::Value::Null)
    );
    node.ask("PUT", drain, &[("content-length", "0")], b"").expect(200);
    assert_eq!(node.delete("/api/v1/gpus/GPU-0/cordon").expect(200)["drain"]["state"], "active");
    assert_eq!(node.delete(drain).expect(200)["drain"]["state"], "active");
    for wrong in [
        r#"{"deadlineSeconds": 0}"#,
        r#"{"deadlineSeconds": 604801}"#,
        r#"{"atDeadline": "explode"}"#,
        r#"{"atDeadline": "giveUp"}"#,
    ] {
        node.json("PUT", drain, wrong).problem(422, "invalid");
    }
    node.json("PUT", "/api/v1/gpus/GPU-9/drain", "{}").problem(404, "unknown-gpu");
}

#[test]
fn an_operator_marks_a_gpu_healthy_and_the_history_records_it() {
    let node = AdminNode::new(2);
    let health = "/api/v1/gpus/GPU-1/health";
    node.scan_failing(2, 1);
    let sick = node.get("/api/v1/gpus/GPU-1").expect(200);
    assert_eq!(sick["health"]["state"], "unhealthy");
    let silent = node.json("PUT", health, r#"{"state": "healthy"}"#).problem(409, "wrong-state");
    assert!(silent.contains("does not answer at present"), "{silent}");
    node.scan(2);
    let healed = node.json("PUT", health, r#"{"state": "healthy", "reason": "reseated"}"#).expect(200);
    assert_eq!(healed["health"]["state"], "healthy");
    assert_eq!(healed["health"]["reason"], "marked healthy by admin (reseated)");
    let states: Vec<_> =
        healed["health"]["history"].as_array().unwrap().iter().map(|t| &t["state"]).collect();
    assert_eq!(states, ["healthy", "unhealthy"]);
    assert_eq!(healed["parts"][0]["devices"][0]["state"], "free");
    node.json("PUT", health, r#"{"state": "unhealthy"}"#).problem(422, "invalid");
    node.json("PUT", health, "{}").problem(422, "invalid");
    node.scan(1);
    node.json("PUT", health, r#"{"state": "healthy"}"#).problem(409, "wrong-state");
    node.json("PUT", "/api/v1/gpus/GPU-9/health", r#"{"state": "healthy"}"#).problem(404, "unknown-gpu");
}

#[test]
fn only_a_gpu_that_vanished_and_is_free_can_be_forgotten() {
    let node = AdminNode::new(2);
    let allocation = node.allocate(1);
    let says = node.delete("/api/v1/gpus/GPU-1").problem(409, "wrong-state");
    assert!(says.contains("cordon it instead"), "{says}");
    node.scan(1);
    let gpu = node.get("/api/v1/gpus/GPU-1").expect(200);
    assert_eq!((&gpu["health"]["state"], &gpu["present"]), (&"vanished".into(), &false.into()));
    let says = node.delete("/api/v1/gpus/GPU-1").problem(409, "held");
    assert!(says.contains(&allocation.id.to_string()), "{says}");
    node.delete(&format!("/api/v1/allocations/{}?force=true", allocation.id)).expect(200);
    assert_eq!(node.delete("/api/v1/gpus/GPU-1").status, 204);
    node.delete("/api/v1/gpus/GPU-1").problem(404, "unknown-gpu");
    assert_eq!(node.get("/api/v1/gpus").expect(200)["items"].as_array().unwrap().len(), 1);
}

#[test]
fn allocations_are_found_by_their_devices_and_ended_by_operators() {
    let node = AdminNode::new(3);
    let (first, second) = (node.allocate(0), node.allocate(2));
    let list = |query: &str| node.get(&format!("/api/v1/allocations{query}")).expect(200);
    let ids = |query: &str| -> Vec<String> {
        let items = list(query)["items"].as_array().unwrap().clone();
        items.iter().map(|a| a["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(ids(""), [second.id.to_string(), first.id.to_string()], "newest first");
    assert_eq!(ids("?gpu=GPU-0"), [first.id.to_string()]);
    assert_eq!(ids("?resource=nvidia.com/gpu&gpu=GPU-2"), [second.id.to_string()]);
    assert!(ids("?resource=nvidia.com/other").is_empty());
    assert!(ids("?namespace=default").is_empty() && ids("?pod=a").is_empty());
    assert_eq!(list("?limit=1")["total"], 2);
    assert_eq!(ids("?limit=1").len(), 1);

    let path = format!("/api/v1/allocations/{}", first.id);
    let shown = node.get(&path).expect(200);
    assert_eq!(shown["state"], "live");
    assert_eq!(shown["decision"]["by"][0], "baseline");
    assert_eq!(shown["gpus"][0], "GPU-0");
    let unread = node.delete(&path).problem(409, "still-running");
    assert!(unread.contains("has not been read since it was granted"), "{unread}");
    node.reconcile(&[]);
    let ended = node.delete(&path).expect(200);
    assert_eq!((&ended["state"], &ended["ended"]["reason"]), (&"ended".into(), &"operator".into()));
    for again in [path.clone(), format!("{path}?force=true")] {
        assert!(node.delete(&again).problem(409, "already-ended").contains(&first.id.to_string()));
    }
    assert_eq!(node.get(&path).expect(200), ended);
    assert_eq!(ids(""), [second.id.to_string()]);
    assert_eq!(ids("?state=ended"), [first.id.to_string()]);
    assert_eq!(ids("?state=all").len(), 2);

    node.get("/api/v1/allocations/0000000a-9").problem(404, "unknown-allocation");
    node.delete("/api/v1/allocations/0000000a-9").problem(404, "unknown-allocation");
    node.delete("/api/v1/allocations/0000000a-9?force=true").problem(404, "unknown-allocation");
    node.delete("/api/v1/allocations/0000000a-9?force=yes").problem(400, "malformed-query");
    for query in ["?state=some", "?limit=0", "?limit=99999", "?limit=x", "?gpus=GPU-0", "?gpu=a&gpu=b"] {
        node.get(&format!("/api/v1/allocations{query}")).problem(400, "malformed-query");
    }
}

#[test]
fn an_allocation_does_not_end_while_a_source_shows_its_pod_unless_by_force() {
    let node = AdminNode::new(2);
    let allocation = node.allocate(0);
    let path = format!("/api/v1/allocations/{}", allocation.id);
    node.reconcile(&[(&allocation, "team", "train-0")]);
    for query in ["", "?force=false"] {
        let says = node.delete(&format!("{path}{query}")).problem(409, "still-running");
        for part in ["pod team/train-0, container main", "checkpoint", "(List)", "by force"] {
            assert!(says.contains(part), "{part}: {says}");
        }
    }
    assert_eq!(node.get(&path).expect(200)["state"], "live", "nothing changed");
    let ended = node.delete(&format!("{path}?force=true")).expect(200);
    assert_eq!((&ended["state"], &ended["holder"]["pod"]), (&"ended".into(), &"train-0".into()));
}

#[test]
fn a_long_list_has_pages_with_every_allocation_once() {
    let node = AdminNode::new(1);
    let mut all = Vec::new();
    for _ in 0..7 {
        all.insert(0, node.allocate(0).id.to_string());
        let id = all[0].clone();
        node.delete(&format!("/api/v1/allocations/{id}?force=true")).expect(200);
    }
    let live = node.allocate(0).id.to_string();
    let page = |query: &str| {
        let answer = node.get(&format!("/api/v1/allocations?{query}")).expect(200);
        let items = answer["items"].as_array().unwrap().iter();
        let ids: Vec<String> = items.map(|a| a["id"].as_str().unwrap().to_owned()).collect();
        (ids, answer["total"].as_u64().unwrap(), answer["next"].as_str().map(str::to_owned))
    };
    let (first, total, next) = page("state=all&limit=3");
    assert_eq!((first.len(), total), (3, 8));
    assert_eq!(first[0], live, "newest first");
    // One ends between two pages, and another is granted: none is listed twice or left out.
    node.delete(&format!("/api/v1/allocations/{live}?force=true")).expect(200);
    node.allocate(0);
    let (mut seen, mut next) = (first, next);
    while let Some(after) = next {
        let (ids, total, follows) = page(&format!("state=all&limit=3&after={after}"));
        assert_eq!(total, 9);
        seen.extend(ids);
        next = follows;
    }
    all.insert(0, live);
    assert_eq!(seen, all);
    let (ids, _, next) = page("state=ended&limit=8");
    assert_eq!((ids.len(), next), (8, None), "a page that is just full is the last");
    for query in ["after=", "after=x", "after=1.x", "after=01.00000001-1", "limit=1001"] {
        node.get(&format!("/api/v1/allocations?{query}")).problem(400, "malformed-query");
    }
    // A cursor is a place, not an allocation: it need not be there any more.
    assert!(page("state=all&after=1.00000001-1").0.is_empty());
    assert_eq!(page("state=all&after=99999999999999.00000001-1").0.len(), 9);
}

#[test]
fn readiness_names_what_is_missing_and_health_needs_no_token() {
    let node = AdminNode::new(1);
    let health = node.api.as_ref().unwrap().health_address.unwrap();
    for address in [node.address(), health] {
        let ask = |path: &str| crate::support::admin_node::ask(address, "GET", path, &[], b"");
        assert_eq!(ask("/livez").expect(200)["alive"], true);
        assert_eq!(ask("/readyz").expect(200)["ready"], true);
        node.facts.lock().unwrap().adoption = StartStep::Waiting("the checkpoint cannot be read".into());
        let answer = ask("/readyz");
        let says = answer.problem(503, "not-ready");
        assert!(says.contains("adoption: the checkpoint cannot be read"), "{says}");
        assert_eq!(answer.value()["checks"].as_array().unwrap().len(), 8);
        assert_eq!(node.get("/api/v1/node").expect(200)["ready"], false);
        node.facts.lock().unwrap().adoption = StartStep::Done;
    }
    // The health listener answers to any name, as probes use the pod's address, and has no more.
    let named = crate::support::admin_node::ask(health, "GET", "/livez", &[("host", "10.1.2.3:9471")], b"");
    named.expect(200);
    for path in ["/api/v1/node", "/openapi.json", "/swagger-ui/", "/"] {
        let bearer = format!("Bearer {}", node.token);
        let answer = crate::support::admin_node::ask(health, "GET", path, &[("authorization", &bearer)], b"");
        answer.problem(404, "no-such-route");
    }
}

#[test]
fn a_node_is_not_ready_before_the_kubelet_accepted_all_resources() {
    let node = AdminNode::new(1);
    let kubelet = &node.kernel.counters().kubelet;
    // As before the kubelet crate has started: nothing is waited for, and nothing is registered.
    kubelet.set_registration(WHOLE, None);
    let says = node.get("/readyz").problem(503, "not-ready");
    assert!(says.contains("kubelet: waiting: the kubelet has not accepted nvidia.com/gpu yet"), "{says}");
    kubelet.set_registration(WHOLE, Some(RegistrationState::Registering));
    node.get("/readyz").problem(503, "not-ready");
    kubelet.set_registration(WHOLE, Some(RegistrationState::Registered));
    node.get("/readyz").expect(200);
    kubelet.set_registration(WHOLE, Some(RegistrationState::Waiting));
    node.get("/readyz").expect(200);
    // A further resource is another one to wait for.
    node.upload(&module("share", "1")).expect(201);
    let entries = serde_json::json!({"entries": [{"policy": "share", "parameters": {"shares": 2}}]});
    node.json("PUT", "/api/v1/stack", &entries.to_string()).expect(200);
    let says = node.get("/readyz").problem(503, "not-ready");
    assert!(says.contains(SHARED), "{says}");
    kubelet.set_registration(SHARED, Some(RegistrationState::Registered));
    node.get("/readyz").expect(200);
    // Where there is no GPU there is nothing to wait for.
    AdminNode::new(0).get("/readyz").expect(200);
}

#[test]
fn a_node_is_not_ready_while_no_allocation_can_end_or_another_plugin_serves_its_resource() {
    let node = AdminNode::new(1);
    let counters = node.kernel.counters();
    counters.kubelet.pod_list_failed("pod-resources/kubelet.sock does not exist".into());
    counters.kubelet.set_registration(WHOLE, Some(RegistrationState::Registered));
    let says = node.get("/readyz").problem(503, "not-ready");
    assert!(says.contains("pod-resources/kubelet.sock does not exist; no allocation can end"), "{says}");
    counters.kubelet.pod_list_answered();
    node.get("/readyz").expect(200);
    // A kubelet that restarts is waited for, and one that is gone is another check's.
    counters.kubelet.pod_list_failed("refused".into());
    node.get("/readyz").expect(200);
    counters.set_limits(LivenessLimits { pod_list: Duration::ZERO, ..counters.limits() });
    let says = node.get("/readyz").problem(503, "not-ready");
    assert!(says.contains("evidence: since 20") && says.contains("refused"), "{says}");
    counters.kubelet.set_registration(WHOLE, Some(RegistrationState::Waiting));
    node.get("/readyz").expect(200);
    counters.kubelet.pod_list_answered();
    counters.kubelet.set_registration(WHOLE, Some(RegistrationState::Contested));
    let says = node.get("/readyz").problem(503, "not-ready");
    assert!(says.contains("kubelet: waiting: another device plugin serves a resource"), "{says}");
}

#[test]
fn a_failed_store_is_reported_and_nothing_changes() {
    let node = AdminNode::new(1);
    node.store_fails.store(true, Ordering::SeqCst);
    let answer = node.json("PUT", "/api/v1/gpus/GPU-0/cordon", "{}");
    let says = answer.problem(503, "store-failed");
    assert!(says.contains("No space left"), "{says}");
    assert!(answer.headers.contains_key("retry-after"));
    assert_eq!(node.get("/api/v1/gpus/GPU-0").expect(200)["drain"]["state"], "active");
    let says = node.get("/readyz").problem(503, "not-ready");
    assert!(says.contains("No space left"), "{says}");
    node.store_fails.store(false, Ordering::SeqCst);
    // The store is read back at most every half second.
    let until = std::time::Instant::now() + SOON;
    while node.json("PUT", "/api/v1/gpus/GPU-0/cordon", "{}").status != 200 {
        assert!(std::time::Instant::now() < until, "the store did not come back");
    }
    node.get("/readyz").expect(200);
}

#[test]
fn swagger_ui_and_the_description_are_served_from_the_binary() {
    let node = AdminNode::new(1);
    let start = node.ask_bare("GET", "/swagger-ui", &[], b"");
    assert_eq!((start.status, start.headers["location"].as_str()), (302, "/swagger-ui/"));
    let page = node.ask_bare("GET", "/swagger-ui/", &[], b"");
    assert_eq!(page.status, 200);
    assert!(page.headers["content-type"].starts_with("text/html"));
    assert!(page.headers["content-security-policy"].contains("connect-src 'self'"));
    let script = node.ask_bare("GET", "/swagger-ui/swagger-initializer.js", &[], b"");
    assert!(String::from_utf8_lossy(&script.body).contains("/openapi.json"));
    // Packed for clients that take gzip, and for others as it is, each time.
    let bundle = "/swagger-ui/swagger-ui-bundle.js";
    let packed = node.ask_bare("GET", bundle, &[("accept-encoding", "gzip")], b"");
    assert_eq!(packed.headers["content-encoding"].as_str(), "gzip");
    for _ in 0..2 {
        let unpacked = node.ask_bare("GET", bundle, &[("accept-encoding", "identity")], b"");
        assert!(unpacked.body.len() > 2 * packed.body.len() && packed.body.len() > 100_000);
    }
    node.ask_bare("GET", "/swagger-ui/nothing.js", &[], b"").problem(404, "no-such-route");
    let document = node.ask_bare("GET", "/openapi.json", &[], b"");
    assert_eq!(document.body, berth_admin::openapi_json().as_bytes());
    // HEAD goes with GET.
    let head = node.ask_bare("HEAD", "/openapi.json", &[], b"");
    assert_eq!((head.status, head.body.len()), (200, 0));
}
