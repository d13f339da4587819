//! The shipped policies: their answers as WebAssembly equal the native ones, within budget.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use berth_kernel::drain::marks::Mark;
use berth_kernel::hardware::gpu::Path;
use berth_kernel::ids::names::{DeviceId, GpuId};
use berth_kernel::node::change::Change;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{CallOutput, PolicyFiles as _, PolicyRuntime as _};
use berth_kernel::policy::hooks::{Answer, FaultKind, Hook, PlaceRequest, Question};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::offer::Consumes;
use berth_policy_binpack::Binpack;
use berth_policy_exclusive::Exclusive;
use berth_policy_mixed::Mixed;
use berth_policy_sdk::{self as sdk, Policy, entry};
use berth_policy_spread::Spread;
use berth_policy_timeslice::Timeslice;
use berth_policy_topology::Topology;
use proptest::prelude::*;

use crate::support::gpus::{SHARED, WHOLE};
use crate::support::guests::{NOW, policies};
use crate::support::ledger_node::{LedgerNode, reversed_gpu, share, shared_node};
use harness::same_answers::both::words::Words;

pub(crate) fn shipped(name: &str) -> PolicyVersion {
    let versions = policies().restore_shipped(NOW).unwrap();
    versions.into_iter().find(|version| version.name == name).unwrap()
}

#[test]
fn these_policies_are_shipped_with_the_daemon() {
    let versions = policies().restore_shipped(NOW).unwrap();
    let names: Vec<_> = versions.iter().map(|version| version.name.as_str()).collect();
    let expected =
        ["exclusive", "timeslice", "mixed", "binpack", "spread", "topology", "memory", "quota", "triage-xid"];
    assert_eq!(names, expected);
    for version in &versions {
        assert!(version.shipped && version.summary.ends_with('.'), "{version:?}");
        assert!(policies().read_all(&version.digest).is_ok());
    }
    assert_eq!(policies().restore_shipped(NOW).unwrap(), versions, "and only once");
}

#[test]
fn wrong_parameters_are_a_fault_that_names_them() {
    let node = shared_node(1, 4);
    for (name, parameters, words) in [
        ("exclusive", r#"{"resources": "a/b"}"#, "unknown parameter `resources`"),
        ("timeslice", r#"{"replicas": 0}"#, "replicas: 0 is out of range; write 1 to 128"),
        (
            "mixed",
            r#"{"advertise": "all"}"#,
            "parameters.advertise: unknown variant `all`, expected `both` or `latched`",
        ),
        (
            "timeslice",
            r#"{"replicas": "four"}"#,
            "parameters.replicas: invalid type: string \"four\", expected a whole",
        ),
        ("mixed", "nonsense", "must be a JSON object"),
    ] {
        let version = shipped(name);
        let fault = policies().call(node.call(&version, parameters, Question::Offer)).answer.unwrap_err();
        assert_eq!(fault.kind, FaultKind::Parameters, "{fault}");
        assert!(fault.detail.starts_with("parameters"), "{fault}");
        assert!(!fault.to_string().contains("column") && !fault.to_string().ends_with(')'), "{fault}");
        assert!(fault.detail.contains(words), "{fault}");
    }
}

/// For 8 GPUs of 10 devices, and for the largest node.
#[test]
fn fuel_is_far_below_what_a_call_may_use() {
    for (gpus, shares, fuel_max) in [(8, 10, 3_000_000), (16, 128, 100_000_000)] {
        let node = shared_node(gpus, shares);
        let place = node.place(SHARED, 4);
        for name in ["exclusive", "timeslice", "mixed", "binpack", "spread", "topology"] {
            let version = shipped(name);
            for (hook, question) in [("offer", Question::Offer), ("place", Question::Place(&place))] {
                let call = node.call(&version, "{}", question);
                let CallOutput { answer, cost, .. } = policies().call(call);
                answer.unwrap();
                println!("{gpus:2} x {shares:3} {name:10} {hook:6} fuel {:9} {} us", cost.fuel, cost.wall_us);
                assert!(cost.fuel < fuel_max, "{name} {hook}: {}", cost.fuel);
                let again = policies().call(call).cost;
                assert_eq!(again.fuel, cost.fuel, "fuel is the same every time");
            }
        }
    }
}

/// What a native policy is shown of a ledger: written down here once more, so that the room's own
/// conversion is tested by it.
pub(crate) struct Shown {
    pub(crate) context: sdk::Context,
    words: Words,
    /// By device its resource.
    resources: Vec<String>,
}

fn consumes(consumes: Consumes) -> sdk::Consumes {
    match consumes {
        Consumes::Whole => sdk::Consumes::Whole,
        Consumes::Slice { memory_mib, compute_percent } => {
            sdk::Consumes::Slice(sdk::Slice { memory_mib, compute_percent })
        }
    }
}

pub(crate) fn shown(ledger: &Ledger, parameters: &str) -> Shown {
    let mut states: Vec<_> = ledger.parts.values().collect();
    states.sort_by_key(|state| (state.part.gpu_index, !state.part.is_whole_gpu()));
    let names: Vec<String> = ledger.resources().iter().map(ToString::to_string).collect();
    let (mut devices, mut resources) = (Vec::new(), Vec::new());
    let mut shown = Vec::new();
    for (index, state) in (0..).zip(&states) {
        let wholes = state.devices.values().any(|d| d.held() && d.consumes == Consumes::Whole);
        let free = ledger.gpu_of(state).unwrap().marks.is_empty() && !wholes;
        for ((resource, share), device) in &state.devices {
            let fits = device.consumes != Consumes::Whole || !state.held();
            let device_state = match (device.held(), free && fits) {
                (true, _) => sdk::DeviceState::Held,
                (false, true) => sdk::DeviceState::Free,
                (false, false) => sdk::DeviceState::Withdrawn,
            };
            let resource_index = names.iter().position(|n| n == resource.as_str()).unwrap();
            shown.push(sdk::Device {
                part: index,
                resource: u32::try_from(resource_index).unwrap(),
                state: device_state,
                consumes: consumes(device.consumes),
            });
            devices.push(DeviceId { part: state.part.id.clone(), share: *share });
            resources.push(resource.to_string());
        }
    }
    let index = |id| u32::try_from(states.iter().position(|s| s.part.id == id).unwrap()).unwrap();
    let parts = states.iter().map(|state| {
        let cordoned = !ledger.gpu_of(state).unwrap().marks.is_empty();
        let profile = state
            .part
            .mig
            .iter()
            .map(|mig| sdk::Attribute { key: "mig.profile".into(), value: mig.profile.clone() });
        sdk::Part {
            id: state.part.id.to_string(),
            vendor: "nvidia".into(),
            model: state.part.model.clone(),
            gpu_index: state.part.gpu_index,
            parent: (!state.part.is_whole_gpu()).then(|| index(state.part.gpu.as_part().clone())),
            mig_enabled: state.part.mig_enabled,
            memory_mib: state.part.memory_mib,
            numa_node: state.part.numa_node,
            health: sdk::Health::Healthy,
            drain: if cordoned { sdk::DrainState::Cordoned } else { sdk::DrainState::Active },
            attributes: profile.collect(),
            processes: 0,
            memory_used_mib: 0,
            idle_seconds: if state.held() { 0 } else { 3600 },
            offered: state
                .lines
                .iter()
                .map(|line| sdk::OfferLine {
                    resource: line.resource.to_string(),
                    count: line.count,
                    consumes: consumes(line.consumes),
                })
                .collect(),
        }
    });
    let node = sdk::Node {
        parts: parts.collect(),
        links: links(ledger, &|id| index(id.as_part().clone())),
        resources: names,
        devices: shown,
        allocations: Vec::new(),
    };
    Shown {
        context: sdk::Context { node, parameters: parameters.to_owned() },
        words: Words { parts: states.iter().map(|state| state.part.id.clone()).collect(), devices },
        resources,
    }
}

fn links(ledger: &Ledger, index: &dyn Fn(&GpuId) -> u32) -> Vec<sdk::Link> {
    let path = |path| match path {
        Path::SameBoard => sdk::Path::SameBoard,
        Path::SingleSwitch => sdk::Path::SingleSwitch,
        Path::MultiSwitch => sdk::Path::MultiSwitch,
        Path::HostBridge => sdk::Path::HostBridge,
        Path::SameNuma => sdk::Path::SameNuma,
        Path::CrossNuma => sdk::Path::CrossNuma,
    };
    let links = ledger.links.iter();
    links
        .map(|(a, b, link)| sdk::Link {
            a: index(a),
            b: index(b),
            path: path(link.path),
            nvlinks: link.nvlinks,
        })
        .collect()
}

impl Shown {
    pub(crate) fn index(&self, name: &str, id: &DeviceId) -> u32 {
        let mut all = self.resources.iter().zip(&self.words.devices);
        let position = all.position(|(n, device)| n == name && device == id);
        u32::try_from(position.unwrap()).unwrap()
    }

    fn place<P: Policy>(&self, request: &PlaceRequest) -> Option<Answer> {
        let name = request.resource.as_str();
        let resources = &self.context.node.resources;
        let asked = resources.iter().position(|n| n == name).unwrap();
        let indices = |ids: &[DeviceId]| ids.iter().map(|id| self.index(name, id)).collect();
        let request = sdk::PlaceRequest {
            request: sdk::Request {
                front_end: sdk::FrontEnd::DevicePlugin,
                resource: u32::try_from(asked).unwrap(),
                candidates: Vec::new(),
                config: None,
                claim: None,
            },
            available: indices(&request.available),
            required: indices(&request.required),
            size: u32::try_from(request.size).unwrap(),
        };
        entry::place::<P>(&self.context, &request).map(|placement| self.words.placement(&placement))
    }
}

/// Calls a policy as WebAssembly and natively; both must answer alike.
pub(crate) fn both_ways<P: Policy>(name: &str, node: &LedgerNode, parameters: &str, size: usize) {
    let version = shipped(name);
    let shown = shown(&node.0, parameters);
    if version.hooks.contains(&Hook::Offer) {
        let native = entry::offer::<P>(&shown.context).map(|answer| shown.words.offer(&answer));
        let wasm = policies().call(node.call(&version, parameters, Question::Offer));
        assert_eq!(wasm.answer, Ok(native), "{name} {parameters}");
    }
    for resource in [SHARED, WHOLE] {
        if node.devices(resource).is_empty() {
            continue;
        }
        let mut request = node.place(resource, size);
        request.required = request.available.iter().rev().take(size / 2).cloned().collect();
        let native = shown.place::<P>(&request);
        let wasm = policies().call(node.call(&version, parameters, Question::Place(&request)));
        assert_eq!(wasm.answer, Ok(native), "{name} {parameters}");
    }
}

/// What one GPU is in a random node.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Gpu {
    New,
    Mig,
    Whole { held: bool },
    Shared { held: u32 },
    Both { held: u32 },
    Cordoned,
}

pub(crate) fn random_gpu() -> impl Strategy<Value = Gpu> {
    prop_oneof![
        Just(Gpu::New),
        Just(Gpu::Mig),
        any::<bool>().prop_map(|held| Gpu::Whole { held }),
        (0..5_u32).prop_map(|held| Gpu::Shared { held }),
        (0..5_u32).prop_map(|held| Gpu::Both { held }),
        Just(Gpu::Cordoned),
    ]
}

pub(crate) fn random_node(gpus: &[Gpu]) -> LedgerNode {
    let mut node = LedgerNode::new().gpus(u32::try_from(gpus.len()).unwrap());
    let shares = (SHARED, 4, share(4));
    let whole = (WHOLE, 1, Consumes::Whole);
    for (index, gpu) in (0..).zip(gpus) {
        let id = reversed_gpu(index);
        node = match gpu {
            Gpu::New => node,
            Gpu::Mig => node.mig(index),
            Gpu::Whole { .. } => node.offer(index, &[whole]),
            Gpu::Shared { .. } => node.offer(index, &[shares]),
            Gpu::Both { .. } | Gpu::Cordoned => node.offer(index, &[whole, shares]),
        };
        match gpu {
            Gpu::Whole { held: true } => node = node.grant(WHOLE, DeviceId::whole(&id)),
            Gpu::Shared { held } | Gpu::Both { held } => {
                for share in 0..*held {
                    node = node.grant(SHARED, DeviceId::share(&id, share));
                }
            }
            Gpu::Cordoned => {
                node.apply(Change::MarksChanged {
                    gpu: GpuId::of_whole(&id),
                    marks: Mark::cordon("test", "", 0).into(),
                });
            }
            Gpu::New | Gpu::Mig | Gpu::Whole { held: false } => {}
        }
    }
    node
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn webassembly_answers_what_native_code_does(
        gpus in prop::collection::vec(random_gpu(), 0..9),
        size in 1..6_usize,
        replicas in 1..=128_u32,
        reserve in 0..4_u32,
    ) {
        let node = random_node(&gpus);
        both_ways::<Exclusive>("exclusive", &node, "{}", size);
        let timeslice = format!(
            r#"{{"replicas": {replicas}, "only": [{{"model": "NVIDIA*"}}],
                "overrides": [{{"index": 1, "replicas": 3}}]}}"#
        );
        both_ways::<Timeslice>("timeslice", &node, &timeslice, size);
        both_ways::<Mixed>("mixed", &node, &format!(r#"{{"reserveWhole": {reserve}}}"#), size);
        let latched = format!(
            r#"{{"advertise": "latched", "reserveShared": {reserve}, "settleSeconds": 3700}}"#
        );
        both_ways::<Mixed>("mixed", &node, &latched, size);
        both_ways::<Binpack>("binpack", &node, "{}", size);
        both_ways::<Spread>("spread", &node, r#"{"distinct": "required"}"#, size);
        both_ways::<Topology>("topology", &node, &format!(r#"{{"leaveWeight": {replicas}}}"#), size);
    }
}

#[test]
fn a_node_of_every_kind_of_gpu_is_answered_alike() {
    let gpus = [
        Gpu::New,
        Gpu::Mig,
        Gpu::Whole { held: true },
        Gpu::Shared { held: 2 },
        Gpu::Both { held: 1 },
        Gpu::Cordoned,
    ];
    let node = random_node(&gpus);
    both_ways::<Exclusive>("exclusive", &node, "{}", 1);
    both_ways::<Timeslice>("timeslice", &node, "{}", 3);
    both_ways::<Mixed>("mixed", &node, "{}", 3);
    // Both answer with offers; equal answers without an opinion would prove nothing.
    let version = shipped("exclusive");
    let answer = policies().call(node.call(&version, "{}", Question::Offer)).answer;
    let Ok(Some(Answer::Offer(answer))) = answer else {
        panic!("{answer:?}");
    };
    let by_part: BTreeMap<_, _> =
        answer.parts.iter().map(|offer| (offer.part.as_str(), offer.lines[0].resource.as_str())).collect();
    assert_eq!(by_part.len(), 6, "{by_part:?}");
    assert_eq!(by_part["MIG-00000001"], "nvidia.com/mig-1g.10gb.me");
}

/// Where no policy places, the kernel does: as `spread`.
#[test]
fn the_kernels_own_placement_counts_a_required_share_that_is_held_once() {
    // By name GPU 1 comes before GPU 0. An init container of the pod holds a share of it, and another pod
    // else one of the other: both are held as much.
    let node = shared_node(2, 4);
    let of = |gpu: u32| {
        let shares = node.devices(SHARED);
        shares.iter().find(|id| id.part == reversed_gpu(gpu)).unwrap().clone()
    };
    let (own, other) = (of(1), of(0));
    let node = node.grant(SHARED, own.clone()).grant(SHARED, other);
    let free = node.place(SHARED, 2);
    let available = free.available.iter().cloned().chain([own.clone()]).collect();
    let request = PlaceRequest { available, required: vec![own.clone()], ..free };
    let chosen = berth_kernel::sharing::placement::baseline(&node.0, &request).devices;
    assert!(chosen.contains(&own) && chosen.len() == 2);
    assert!(chosen.iter().all(|id| id.part == reversed_gpu(1)), "{chosen:?}");
}
