//! A drain that evicts: the whole daemon with a stand-in kubelet and a stand-in API server, from the order to
//! `drained`.

use crate::cluster::pods_source::{serve, watching};
use crate::support::api_server::{ApiServer, pod};
use crate::support::api_writes::{Asked, Fault, Write};
use crate::support::gpus::SHARED;
use crate::support::process_node::{DaemonProcess, ProcessNode};
use crate::support::wait::{SOON, until_some};
use kubelet_standin::UNHEALTHY;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::time::Duration;
use tokio::task::JoinHandle;

/// Two GPUs of two shares, and waits of fractions of a second.
const SETTINGS: &str = "
gpus: sim:2xt4
stack: [{ policy: timeslice, parameters: { replicas: 2 } }]
rounds: { listEveryMs: 100, listEveryCordonedMs: 100, roundEveryMs: 200 }
timing: { roundsApartMs: 100, kubeletSettleMs: 100, replySettleMs: 200, drainedMs: 300, evictAgainMs: 200 }
health: { pollSeconds: 0.1, quietSeconds: 1 }
";

/// A node that runs four pods, two on each GPU.
pub(crate) struct Scene {
    pub(crate) server: ApiServer,
    pub(crate) node: ProcessNode,
    pub(crate) daemon: DaemonProcess,
    /// The GPU that is drained.
    pub(crate) gpu: String,
    /// Its two pods, by name: UID and all.
    pub(crate) on_it: [Holder; 2],
    /// Pods of the other GPU.
    pub(crate) elsewhere: [Holder; 2],
}

#[derive(Clone, Debug)]
pub(crate) struct Holder {
    pub(crate) name: String,
    pub(crate) uid: String,
}

impl Scene {
    pub(crate) async fn new() -> Self {
        Self::of(SETTINGS).await
    }

    /// A scene whose daemon has these settings.
    async fn of(settings: &str) -> Self {
        let server = ApiServer::start();
        let node = ProcessNode::of(settings).await;
        let daemon = serve(&node, &server);
        node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
        watching(&daemon);
        for n in 0..4 {
            let name = format!("pod-{n}");
            // As of static pods, which some of the tests make of them.
            let uid = format!("{n:032x}");
            node.start_as(&uid, &name, SHARED, 1).await.unwrap();
            let mut pod = pod("ns", &name, &uid, &[(SHARED, 1)]);
            pod["metadata"]["labels"] = json!({"app": format!("app-{n}")});
            pod["status"] = json!({"phase": "Running"});
            server.world.apply(pod);
        }
        let live = until_some("all holders are known", || {
            let live = daemon.live();
            let known = |a: &Value| a["holder"]["podUid"].is_string() && a["holder"]["pod"].is_string();
            (live.len() == 4 && live.iter().all(known)).then_some(live)
        });
        let gpu_of = |a: &Value| a["gpus"][0].as_str().unwrap().to_owned();
        let gpu = gpu_of(&live[0]);
        let holders = |here: bool| -> [Holder; 2] {
            let found = live.iter().filter(|a| (gpu_of(a) == gpu) == here);
            let holder = |a: &Value| Holder {
                name: a["holder"]["pod"].as_str().unwrap().to_owned(),
                uid: a["holder"]["podUid"].as_str().unwrap().to_owned(),
            };
            found.map(holder).collect::<Vec<_>>().try_into().unwrap()
        };
        let (on_it, elsewhere) = (holders(true), holders(false));
        Self { server, node, daemon, gpu, on_it, elsewhere }
    }

    pub(crate) fn drain(&self, order: &Value) -> Value {
        self.daemon.call("PUT", &format!("/gpus/{}/drain", self.gpu), order)
    }

    /// The drain as `GET /gpus/{uuid}/drain` has it.
    pub(crate) fn progress(&self) -> Value {
        self.daemon.call("GET", &format!("/gpus/{}/drain", self.gpu), &Value::Null)
    }

    /// What the progress says of this pod.
    pub(crate) fn holder(&self, holder: &Holder) -> Option<Value> {
        let drain = self.progress();
        let holders = drain["progress"]["holders"].as_array()?.clone();
        holders.into_iter().find(|h| h["podUid"] == holder.uid.as_str())
    }

    pub(crate) fn until_state(&self, state: &str) -> Value {
        until_some(state, || Some(self.progress()).filter(|drain| drain["state"] == state))
    }

    /// Waits until the progress says this of a pod.
    pub(crate) fn until_holder(&self, holder: &Holder, state: &str) -> Value {
        until_some(state, || self.holder(holder).filter(|h| h["state"] == state))
    }

    /// What the kubelet and the container runtime do with pods whose deletion was requested.
    pub(crate) fn kubelet_follows(&self) -> JoinHandle<()> {
        let (world, kubelet) = (self.server.world.clone(), self.node.kubelet.clone());
        tokio::spawn(async move {
            loop {
                for uid in world.terminating() {
                    // Whatever the container held is Unhealthy by now: no other pod gets it.
                    let sick = |k: &kubelet_standin::Kubelet| {
                        let health = k.reported_health(&uid, "main");
                        !health.is_empty() && health.values().all(|h| *h == UNHEALTHY)
                    };
                    kubelet.wait_for("Unhealthy devices of a pod that leaves", SOON, sick).await.unwrap();
                    kubelet.delete(&uid);
                    world.delete(&uid);
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
    }

    /// No pod on the other GPU was evicted, and all of them run.
    pub(crate) fn others_are_left_alone(&self) {
        for other in &self.elsewhere {
            assert_eq!(self.server.world.asked(&other.name), []);
        }
        let live = self.daemon.live();
        for other in &self.elsewhere {
            assert!(live.iter().any(|a| a["holder"]["podUid"] == other.uid.as_str()), "{other:?}");
        }
        assert_eq!(self.node.kubelet.anomalies(), []);
    }

    /// A disruption budget that keeps this pod.
    pub(crate) fn keep(&self, holder: &Holder) {
        let app = holder.name.replace("pod-", "app-");
        self.server.world.budget("keeps", &app, 1);
    }

    /// Another pod with the same label runs, as if on another node: the budget allows the eviction.
    pub(crate) fn free(&self, holder: &Holder) {
        let mut replacement = pod("ns", "replacement", "uid-replacement", &[]);
        replacement["metadata"]["labels"] = json!({"app": holder.name.replace("pod-", "app-")});
        replacement["status"] = json!({"phase": "Running"});
        self.server.world.apply(replacement);
    }
}

pub(crate) fn evicted(holder: &Holder, code: u16) -> Asked {
    Asked { write: Write::Evict, pod: holder.name.clone(), uid: Some(holder.uid.clone()), grace: None, code }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_with_evict_from_the_order_to_drained() {
    // On a busy machine the daemon may see a deletion long after its request.
    let scene = Scene::of(&SETTINGS.replace("evictAgainMs: 200", "evictAgainMs: 600000")).await;
    let _kubelet = scene.kubelet_follows();
    let gpu = scene.drain(&json!({"evict": true, "reason": "fan", "deadlineSeconds": 600}));
    assert_eq!(gpu["drain"]["state"], "draining", "{gpu}");
    let progress = &gpu["drain"]["progress"];
    assert_eq!((&progress["evict"], progress["holders"].as_array().unwrap().len()), (&json!(true), 2));
    assert!(progress["secondsLeft"].as_u64().unwrap() > 500 && progress["warning"].is_null(), "{progress}");
    let drained = scene.until_state("drained");
    assert_eq!(drained["why"], "fan");
    for holder in &scene.on_it {
        assert_eq!(scene.server.world.asked(&holder.name), [evicted(holder, 201)], "once, by its UID");
    }
    scene.others_are_left_alone();
    // Its pods have events with the reason, and the node has events of its GPU.
    let count = |reason: &str| scene.server.world.notes(reason).len();
    until_some("the events", || (count("GPUDrained") == 1 && count("GPUDrain") >= 2).then_some(()));
    let notes = scene.server.world.notes("GPUDrain");
    assert!(notes.len() == 2 && notes.iter().all(|note| note.contains(&scene.gpu)), "{notes:?}");
    assert!(scene.server.world.notes("GPUDraining")[0].contains("by admin (fan); its pods are evicted"));
    scene.node.kubelet.wait_allocatable(SHARED, 2, SOON).await.unwrap();
    scene.daemon.call("DELETE", &format!("/gpus/{}/cordon", scene.gpu), &Value::Null);
    scene.node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preview_names_owners_and_disruption_budgets_and_evicts_nothing() {
    let scene = Scene::new().await;
    let [kept, leaves] = &scene.on_it;
    let [of_file, _] = &scene.elsewhere;
    scene.keep(kept);
    scene.server.world.change(&leaves.uid, |pod| {
        pod["metadata"]["ownerReferences"] = json!([
            {"apiVersion": "v1", "kind": "Owner", "name": "another", "uid": "o"},
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "train", "uid": "s", "controller": true},
        ]);
    });
    scene.server.world.change(&of_file.uid, |pod| {
        pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": of_file.uid});
    });
    let other = scene.daemon.live().into_iter().find(|a| a["holder"]["podUid"] == of_file.uid.as_str());
    let other = other.unwrap()["gpus"][0].as_str().unwrap().to_owned();
    let preview = |gpu: &str, query: &str| {
        scene.daemon.call("GET", &format!("/gpus/{gpu}/drain/preview{query}"), &Value::Null)
    };
    let of = |preview: &Value, holder: &Holder| {
        let holders = preview["holders"].as_array().unwrap();
        holders.iter().find(|h| h["podUid"] == holder.uid.as_str()).unwrap().clone()
    };
    until_some("the owner", || {
        let found = of(&preview(&scene.gpu, ""), leaves);
        (found["owner"] == json!({"kind": "StatefulSet", "name": "train"})).then_some(())
    });
    let without = preview(&scene.gpu, "?evict=false");
    assert_eq!(of(&without, kept)["state"], "notAsked", "the API server was not asked: {without}");
    let asked = preview(&scene.gpu, "?evict=true");
    let blocked = of(&asked, kept);
    assert_eq!(
        (&blocked["state"], &blocked["shown"], blocked.get("owner")),
        (&json!("disruptionBudget"), &json!(true), None)
    );
    assert!(
        blocked["message"].as_str().unwrap().contains("The disruption budget keeps needs 1"),
        "{blocked}"
    );
    assert_eq!(of(&asked, leaves)["state"], "notAsked", "it would be evicted: {asked}");
    until_some("the static pod", || {
        (of(&preview(&other, "?evict=true"), of_file)["state"] == "staticPod").then_some(())
    });
    scene.server.world.fault(Write::Evict, Some(Fault::Forbidden));
    let refused = of(&preview(&scene.gpu, "?evict=true"), leaves);
    assert_eq!(refused["state"], "failed");
    assert!(refused["message"].as_str().unwrap().contains("create pods/eviction"), "{refused}");
    // No pod was sent away, and the GPU is not drained.
    assert_eq!((scene.server.world.asked_count(), scene.server.world.terminating()), (0, Vec::new()));
    assert_eq!(scene.progress()["state"], "active");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_shows_the_remaining_holders_and_their_blockers() {
    let scene = Scene::new().await;
    let [kept, _] = &scene.on_it;
    scene.keep(kept);
    let args = ["gpu", "drain", scene.gpu.as_str(), "--evict", "--deadline", "5m", "--wait"];
    let mut child = scene.daemon.client(&args).spawn().unwrap();
    let (mut stderr, mut err) = (BufReader::new(child.stderr.take().unwrap()), String::new());
    let mut until_says = |words: &str| {
        while !err.contains(words) {
            assert!(stderr.read_line(&mut err).unwrap() > 0, "it ended without {words:?}: {err}");
        }
    };
    // Pods end only from here on, once the command line has shown both.
    until_says("2 allocations left, 0 processes, until");
    let _kubelet = scene.kubelet_follows();
    until_says(&format!(
        "ns/{} (main): waits for its disruption budget: The disruption budget keeps needs 1 healthy pods and has 1 currently",
        kept.name
    ));
    scene.free(kept);
    stderr.read_to_string(&mut err).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert!(ended.status.success(), "{err}");
    let out = String::from_utf8(ended.stdout).unwrap();
    assert!(out.contains("GPU 1 is drained, ordered by admin"), "{out}");
    scene.others_are_left_alone();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disruption_budget_is_respected_and_the_eviction_retried_until_it_allows() {
    let scene = Scene::new().await;
    let _kubelet = scene.kubelet_follows();
    let [kept, leaves] = &scene.on_it;
    scene.keep(kept);
    scene.drain(&json!({"evict": true}));
    let holder = scene.until_holder(kept, "disruptionBudget");
    assert!(holder["message"].as_str().unwrap().contains("needs 1 healthy pods"), "{holder}");
    until_some("the other one leaves", || scene.holder(leaves).is_none().then_some(()));
    until_some("it is requested again", || (scene.server.world.asked(&kept.name).len() >= 3).then_some(()));
    assert_eq!(scene.progress()["state"], "draining");
    until_some("its event", || (!scene.server.world.notes("GPUDrainBlocked").is_empty()).then_some(()));
    assert_eq!(scene.server.world.notes("GPUDrainBlocked").len(), 1, "once, however often it is asked");
    scene.free(kept);
    scene.until_state("drained");
    let asked = scene.server.world.asked(&kept.name);
    // On a busy machine the daemon asks again before it sees the deletion.
    let allowed = asked.iter().position(|a| *a == evicted(kept, 201)).unwrap();
    assert!(asked[..allowed].iter().all(|a| *a == evicted(kept, 429)), "{asked:?}");
    scene.others_are_left_alone();
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_deadline_pods_are_deleted_but_static_ones() {
    let scene = Scene::new().await;
    let _kubelet = scene.kubelet_follows();
    let [kept, stays] = &scene.on_it;
    scene.keep(kept);
    // A mirror pod: what the API server shows of a file on the node.
    scene.server.world.change(&stays.uid, |pod| {
        pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": stays.uid});
    });
    scene.drain(&json!({"evict": true}));
    scene.until_holder(kept, "disruptionBudget");
    scene.until_holder(stays, "staticPod");
    scene.drain(&json!({"evict": true, "deadlineSeconds": 1, "atDeadline": "delete"}));
    until_some("it is deleted", || scene.holder(kept).is_none().then_some(()));
    let drain = scene.progress();
    assert_eq!((&drain["state"], &drain["progress"]["late"]), (&json!("draining"), &json!(true)));
    let asked = scene.server.world.asked(&kept.name);
    let uid = Some(kept.uid.clone());
    let deleted = Asked { write: Write::Delete, pod: kept.name.clone(), uid, grace: None, code: 200 };
    let first = asked.iter().find(|a| a.write == Write::Delete);
    assert_eq!(first, Some(&deleted), "with its own grace period");
    assert_eq!(scene.server.world.asked(&stays.name), [], "a static pod cannot be evicted");
    until_some("the event of the static pod", || {
        let blocked = scene.server.world.notes("GPUDrainBlocked");
        blocked.iter().any(|note| note.contains(&stays.name) && note.contains("static pod")).then_some(())
    });
    // Its file is taken away, and the kubelet ends it.
    scene.node.kubelet.delete(&stays.uid);
    scene.server.world.delete(&stays.uid);
    scene.until_state("drained");
    scene.others_are_left_alone();
}

#[tokio::test(flavor = "multi_thread")]
async fn events_and_a_condition_of_the_node_report_lost_and_returned_gpus() {
    let mut scene = Scene::new().await;
    let condition = |scene: &Scene, wanted: &str| {
        until_some(wanted, || {
            scene.server.world.condition("GPUUnavailable").filter(|c| c["status"] == wanted)
        })
    };
    assert_eq!(condition(&scene, "False")["message"], "all 2 GPUs are available");
    let cordon = format!("/gpus/{}/cordon", scene.gpu);
    scene.daemon.call("PUT", &cordon, &json!({"reason": "fan"}));
    let cordoned = condition(&scene, "True");
    assert_eq!(cordoned["reason"], "GPUCordoned");
    let message = cordoned["message"].as_str().unwrap();
    assert!(message.contains(&scene.gpu) && message.ends_with("by admin (fan)"), "{message}");
    until_some("the event", || (scene.server.world.notes("GPUCordoned").len() == 1).then_some(()));
    {
        let state = scene.server.world.state.lock().unwrap();
        let event = state.writes.events.values().find(|e| e["reason"] == "GPUCordoned").unwrap();
        // The fields that `kubectl describe node` uses.
        let about = json!({"kind": "Node", "name": "node-1", "uid": "node-1"});
        assert_eq!((&event["regarding"], &event["type"]), (&about, &json!("Normal")));
    }
    // A restart is no transition: the time stays, and no event is repeated.
    let writes = scene.server.world.state.lock().unwrap().writes.event_writes;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    scene.daemon.child.kill().unwrap();
    scene.daemon.child.wait().unwrap();
    let before = scene.server.world.state.lock().unwrap().writes.patches;
    scene.daemon = serve(&scene.node, &scene.server);
    until_some("it is written again", || {
        (scene.server.world.state.lock().unwrap().writes.patches > before).then_some(())
    });
    let again = condition(&scene, "True");
    assert_eq!(again["lastTransitionTime"], cordoned["lastTransitionTime"]);
    assert_eq!(again["message"], cordoned["message"]);
    assert_ne!(again["lastHeartbeatTime"], cordoned["lastHeartbeatTime"]);
    assert_eq!(scene.server.world.state.lock().unwrap().writes.event_writes, writes);

    scene.daemon.call("DELETE", &cordon, &Value::Null);
    let free = condition(&scene, "False");
    assert_ne!(free["lastTransitionTime"], cordoned["lastTransitionTime"]);
    until_some("the event", || (scene.server.world.notes("GPUUncordoned").len() == 1).then_some(()));
    // Repeated events are counted, not created again.
    scene.daemon.call("PUT", &cordon, &json!({"reason": "fan"}));
    condition(&scene, "True");
    scene.daemon.call("DELETE", &cordon, &Value::Null);
    condition(&scene, "False");
    until_some("it is counted", || {
        let state = scene.server.world.state.lock().unwrap();
        let event = state.writes.events.values().find(|e| e["reason"] == "GPUUncordoned")?;
        (event["series"]["count"] == 2).then_some(())
    });
    assert_eq!(scene.server.world.notes("GPUUncordoned").len(), 1);
}
