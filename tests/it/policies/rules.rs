//! `memory`, `quota` and `triage-xid`: their answers as WebAssembly equal the native ones, within budget.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use berth_kernel::evidence::pods::{Pod, PodContainer, PodsSource, PodsView, Stage};
use berth_kernel::grants::allocation::{Allocation, Decision, GrantOrigin, Holder};
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::ids::names::{AllocationId, DeviceId};
use berth_kernel::node::change::Change;
use berth_kernel::node::ports::{CallOutput, PolicyRuntime as _};
use berth_kernel::policy::hooks::{AdmitRequest, Answer, Question};
use berth_kernel::policy::version::PolicyVersion;
use berth_policy_memory::Memory;
use berth_policy_quota::Quota;
use berth_policy_sdk::{self as sdk, Policy, entry};
use berth_policy_triage_xid::TriageXid;
use proptest::prelude::*;

use crate::policies::shipped::{Shown, both_ways, random_gpu, random_node, shipped, shown};
use crate::support::gpus::{SHARED, WHOLE, resource};
use crate::support::guests::{NOW, policies};
use crate::support::ledger_node::{LedgerNode, reversed_gpu, shared_node};
use harness::same_answers::both::words::{triage, verdict};

/// A node with waiting pods and with holders of shares.
struct Scene {
    node: LedgerNode,
    waiting: Vec<&'static str>,
    held: Vec<(DeviceId, Option<&'static str>)>,
}

impl Scene {
    /// Two GPUs of four shares; `held`: GPU and share, and the namespace of the holder.
    fn new(waiting: &[&'static str], held: &[(u32, u32, Option<&'static str>)]) -> Self {
        let mut node = shared_node(2, 4);
        let mut holders = Vec::new();
        for (number, &(gpu, share, namespace)) in (1..).zip(held) {
            let device = DeviceId::share(&reversed_gpu(gpu), share);
            node.apply(Change::Granted(Allocation {
                id: AllocationId { store: 1, number },
                resource: resource(SHARED),
                devices: vec![device.clone()],
                granted_wall_ms: NOW.wall_ms - 5_000,
                origin: GrantOrigin::DevicePlugin,
                holder: Holder { namespace: namespace.map(String::from), ..Holder::default() },
                overlapped: false,
                decision: Decision::default(),
                ended: None,
            }));
            holders.push((device, namespace));
        }
        let pods = waiting.iter().enumerate().map(|(n, namespace)| (format!("u{n}"), pod(n, namespace)));
        Arc::make_mut(&mut node.0).pods = Some(Arc::new(PodsView {
            source: PodsSource::ApiServer,
            current: true,
            listed_mono_ms: 0,
            pods: pods.collect(),
            deleted: VecDeque::new(),
            finished: VecDeque::new(),
        }));
        Self { node, waiting: waiting.to_vec(), held: holders }
    }

    /// What the native policy is shown, written down here once more.
    fn shown(&self, parameters: &str) -> Shown {
        let mut shown = shown(&self.node.0, parameters);
        for (n, (device, namespace)) in self.held.iter().enumerate() {
            let allocation = sdk::Allocation {
                id: format!("1-{n}"),
                resource: 0,
                devices: vec![shown.index(SHARED, device)],
                holder: namespace.map(|namespace| sdk::Holder {
                    namespace: namespace.into(),
                    pod: String::new(),
                    container: String::new(),
                    pod_uid: None,
                }),
                age_seconds: 5,
                overlapped: false,
            };
            shown.context.node.allocations.push(allocation);
        }
        shown
    }

    /// Requests shares of GPU 1 in both ways, and returns both answers.
    fn admit<P: Policy>(&self, version: &PolicyVersion, parameters: &str, shares: &[u32]) -> Option<Answer> {
        let devices: Vec<DeviceId> = shares.iter().map(|n| DeviceId::share(&reversed_gpu(1), *n)).collect();
        let shown = self.shown(parameters);
        let candidate = |(n, namespace): (usize, &&str)| sdk::Candidate {
            namespace: (*namespace).into(),
            pod: format!("pod-{n}"),
            pod_uid: format!("u{n}"),
            container: "main".into(),
            labels: Vec::new(),
        };
        let request = sdk::AdmitRequest {
            devices: devices.iter().map(|id| shown.index(SHARED, id)).collect(),
            request: sdk::Request {
                front_end: sdk::FrontEnd::DevicePlugin,
                resource: 0,
                // Those that request this number of devices.
                candidates: if shares.len() == 2 {
                    self.waiting.iter().enumerate().map(candidate).collect()
                } else {
                    Vec::new()
                },
                config: None,
                claim: None,
            },
        };
        let native = entry::admit::<P>(&shown.context, &request).map(verdict);
        let request = AdmitRequest { resource: resource(SHARED), devices, claim: None };
        let wasm = policies().call(self.node.call(version, parameters, Question::Admit(&request)));
        assert_eq!(wasm.answer, Ok(native.clone()), "{parameters}");
        native
    }
}

/// A pod that waits for two shares.
fn pod(n: usize, namespace: &str) -> Arc<Pod> {
    Arc::new(Pod {
        uid: format!("u{n}"),
        namespace: namespace.into(),
        name: format!("pod-{n}"),
        labels: Vec::new(),
        is_static: false,
        owner: None,
        stage: Stage::Waiting,
        deletion_wall_ms: None,
        created_wall_ms: 0,
        containers: vec![PodContainer { name: "main".into(), requests: vec![(resource(SHARED), 2)] }],
        bypass: None,
        has_claims: false,
        named_claims: Vec::new(),
    })
}

#[test]
fn quota_denies_the_same_requests_in_the_daemon_and_natively() {
    let quota = shipped("quota");
    let two = r#"{"namespaces": [{"namespace": "a", "devices": 2}]}"#;
    let held = [(0, 0, Some("a")), (0, 1, Some("b")), (0, 2, None)];
    let denied = Scene::new(&["a", "a"], &held).admit::<Quota>(&quota, two, &[0, 1]);
    let Some(Answer::Deny(reason)) = denied else { panic!("{denied:?}") };
    assert!(reason.starts_with("namespace a holds 1 of the 2 devices"), "{reason}");
    for (waiting, words) in
        [(&["b"][..], None), (&["a", "b"], Some("a pod of a or b")), (&[], Some("no source shows"))]
    {
        let allowed = Scene::new(waiting, &held).admit::<Quota>(&quota, two, &[0, 1]);
        let reason = match &allowed {
            Some(Answer::Allow(terms)) => Some(terms.reason.as_str()),
            None => None,
            other => panic!("{other:?}"),
        };
        assert_eq!(reason.is_some(), words.is_some(), "{reason:?}");
        assert!(reason.unwrap_or_default().contains(words.unwrap_or_default()), "{reason:?}");
    }
}

#[test]
fn memory_has_its_limits_in_the_daemon() {
    let parameters = r#"{"compute": "proportional", "sizes": [{"resource": "nvidia.com/gpu.shared", "memoryMiB": 20480}]}"#;
    let answer = Scene::new(&["a"], &[]).admit::<Memory>(&shipped("memory"), parameters, &[0, 2]);
    let Some(Answer::Allow(terms)) = answer else { panic!("{answer:?}") };
    assert_eq!((terms.limits.memory_mib, terms.limits.compute_percent), (Some(40_960), Some(50)));
}

#[test]
fn every_xid_is_judged_alike_natively_and_as_webassembly() {
    let (node, version) = (LedgerNode::new().gpus(1), shipped("triage-xid"));
    let shown = shown(&node.0, "{}");
    let mut severities = BTreeMap::<String, u32>::new();
    let xids = (0..200).map(|code| ("xid", code));
    let signs = (0..9).flat_map(|code| [("recovery", code), ("rows", code), ("ecc", code), ("lost", code)]);
    for (source, code) in xids.chain(signs) {
        let reading = sdk::Reading { part: 0, source: source.into(), code, detail: "x".into() };
        let native = entry::triage::<TriageXid>(&shown.context, &reading).map(triage);
        let severity = native.as_ref().map(|answer| match answer {
            Answer::Triage(answer) => answer.severity,
            other => panic!("{other:?}"),
        });
        *severities.entry(format!("{severity:?}")).or_default() += 1;
        let reading = Reading { part: reversed_gpu(0), source: source.into(), code, detail: "x".into() };
        let wasm = policies().call(node.call(&version, "{}", Question::Triage(&reading)));
        assert_eq!(wasm.answer, Ok(native), "{source} {code}");
    }
    assert_eq!(severities.len(), 4, "{severities:?}");
}

#[test]
fn fuel_is_far_below_what_a_call_may_use() {
    let sizes = r#"{"sizes": [{"resource": "nvidia.com/gpu.shared", "memoryMiB": 512}]}"#;
    let limited = r#"{"default": {"devices": 4, "memoryMiB": 100000}}"#;
    let reading = Reading { part: reversed_gpu(0), source: "xid".into(), code: 79, detail: String::new() };
    for (gpus, shares, fuel_max) in [(8, 10, 3_000_000), (16, 128, 100_000_000)] {
        let node = shared_node(gpus, shares);
        let place = node.place(SHARED, 4);
        let admit =
            AdmitRequest { resource: resource(SHARED), devices: place.available[..4].to_vec(), claim: None };
        for (name, parameters, hook, question) in [
            ("memory", sizes, "offer", Question::Offer),
            ("memory", sizes, "place", Question::Place(&place)),
            ("memory", sizes, "admit", Question::Admit(&admit)),
            ("quota", limited, "admit", Question::Admit(&admit)),
            ("triage-xid", "{}", "triage", Question::Triage(&reading)),
        ] {
            let version = shipped(name);
            let CallOutput { answer, cost, .. } = policies().call(node.call(&version, parameters, question));
            assert!(answer.unwrap().is_some(), "{name} {hook}");
            println!("{gpus:2} x {shares:3} {name:10} {hook:6} fuel {:9} {} us", cost.fuel, cost.wall_us);
            assert!(cost.fuel < fuel_max, "{name} {hook}: {}", cost.fuel);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn memory_answers_as_webassembly_what_native_code_does(
        gpus in prop::collection::vec(random_gpu(), 0..9),
        size in 1..6_usize,
        (small, large) in (1..30_000_u64, 1..100_000_u64),
        compute in prop::sample::select(vec!["none", "proportional"]),
    ) {
        let parameters = format!(
            r#"{{"compute": "{compute}", "only": [{{"model": "NVIDIA*"}}], "sizes": [
                {{"resource": "{SHARED}", "memoryMiB": {small}}},
                {{"resource": "{WHOLE}", "memoryMiB": {large}, "maxPerGpu": 3}}]}}"#
        );
        both_ways::<Memory>("memory", &random_node(&gpus), &parameters, size);
    }
}
