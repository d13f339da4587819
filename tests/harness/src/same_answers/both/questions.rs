//! Random nodes with everything on them, questions about them, and parameters of each shipped policy.

use berth_kernel::policy::hooks::Hook;
use berth_policy_sdk::testing::{Random, random_node};
use berth_policy_sdk::{
    AdmitRequest, Attribute, Candidate, Claim, DeviceState, Holder, Node, PlaceRequest, Reading,
};

/// GPUs of a node.
const GPUS_MAX: u32 = 8;
const MODELS: [&str; 3] = ["NVIDIA H100 80GB HBM3", "Tesla T4", "NVIDIA A100-SXM4-40GB"];
const NAMESPACES: [&str; 3] = ["research", "team-a", "team-b"];
const SOURCES: [&str; 6] = ["xid", "recovery", "rows", "ecc", "lost", "other"];
/// Codes above all XIDs that there are.
const CODES: u32 = 200;

/// The input of a call, in the form in which the daemon records it.
#[derive(Debug, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Question {
    Offer,
    Place(PlaceRequest),
    Admit(AdmitRequest),
    Triage(Reading),
}

/// A node, and devices that are requested of it.
pub(crate) struct Scene {
    pub(crate) node: Node,
    request: PlaceRequest,
}

impl Scene {
    pub(crate) fn draw(random: &mut Random) -> Self {
        loop {
            let mut built = random_node(random, GPUS_MAX);
            // On a node without free devices there is nothing to request.
            let Some(request) = built.random_request(random) else { continue };
            dress(random, &mut built.node);
            return Self { node: built.node, request };
        }
    }

    pub(crate) fn question(&self, hook: Hook, random: &mut Random) -> Question {
        match hook {
            Hook::Offer => Question::Offer,
            Hook::Place => Question::Place(self.request.clone()),
            Hook::Admit => Question::Admit(self.admit(random)),
            Hook::Triage | Hook::Describe => Question::Triage(Reading {
                part: random.below(u32::try_from(self.node.parts.len()).expect("few parts")),
                source: pick(random, &SOURCES).into(),
                code: random.below(CODES).into(),
                detail: String::new(),
            }),
        }
    }

    /// The required devices and any others; the requester is known, ambiguous or unknown.
    fn admit(&self, random: &mut Random) -> AdmitRequest {
        let mut request = self.request.request.clone();
        let one = pick(random, &NAMESPACES);
        for n in 0..random.below(4) {
            let namespace = if random.once_in(4) { pick(random, &NAMESPACES) } else { one };
            request.candidates.push(Candidate {
                namespace: namespace.into(),
                pod: format!("pod-{n}"),
                pod_uid: format!("uid-{n}"),
                container: "main".into(),
                labels: Vec::new(),
            });
        }
        request.claim = random.once_in(8).then(|| Claim {
            namespace: one.into(),
            name: "claim".into(),
            uid: "uid".into(),
            request: "gpu".into(),
            share_id: None,
            consumed_capacity: Vec::new(),
        });
        let mut devices = self.request.required.clone();
        let others = self.request.available.iter().filter(|device| !self.request.required.contains(device));
        devices.extend(others.take(self.request.size as usize - devices.len()));
        devices.sort_unstable();
        AdmitRequest { request, devices }
    }
}

/// Models, holders, ages and what else a node has.
fn dress(random: &mut Random, node: &mut Node) {
    for (n, part) in node.parts.iter_mut().enumerate() {
        if !part.mig_enabled {
            let own = if part.parent.is_none() { "nvidia.com/gpu" } else { "nvidia.com/mig-1g.5gb" };
            part.attributes.push(Attribute { key: "baseline.resource".into(), value: own.into() });
            part.attributes.push(Attribute { key: "mig.index".into(), value: (n % 2).to_string() });
        }
        part.model = MODELS[part.gpu_index as usize % MODELS.len()].into();
        part.numa_node = part.numa_node.filter(|_| !random.once_in(8));
        part.processes = random.below(3);
        if part.idle_seconds > 0 {
            part.idle_seconds = random.below(7_200);
        }
        part.memory_used_mib = random.below(40_000).into();
    }
    for (n, allocation) in node.allocations.iter_mut().enumerate() {
        allocation.age_seconds = random.below(100_000);
        allocation.holder = (!random.once_in(4)).then(|| Holder {
            namespace: pick(random, &NAMESPACES).into(),
            pod: format!("pod-{n}"),
            container: "main".into(),
            pod_uid: (!random.once_in(4)).then(|| format!("uid-{n}")),
        });
    }
    for device in &mut node.devices {
        if device.state == DeviceState::Withdrawn && random.once_in(8) {
            device.state = DeviceState::Retiring;
        }
    }
}

fn pick(random: &mut Random, words: &[&'static str]) -> &'static str {
    words[random.below(u32::try_from(words.len()).expect("few words")) as usize]
}

pub(crate) fn exclusive(random: &mut Random) -> String {
    pick(random, &["{}", r#"{"resource": "example.com/whole"}"#]).into()
}

pub(crate) fn timeslice(random: &mut Random) -> String {
    let (replicas, few) = (1 + random.below(128), 1 + random.below(8));
    let fail = random.once_in(2);
    if random.once_in(2) {
        let devices = pick(random, &[r#""all""#, "2", r#"[0, "1:0", "GPU-2", "MIG-0-1"]"#]);
        let rename = pick(random, &["", r#""rename": "nvidia.com/gpu.shared","#]);
        return format!(
            r#"{{"failRequestsGreaterThanOne": {fail}, "resources": [
                {{"name": "nvidia.com/gpu", {rename} "replicas": {replicas}, "devices": {devices}}},
                {{"name": "nvidia.com/mig-1g.5gb", "replicas": {few}, "devices": {devices}}}]}}"#
        );
    }
    let only = pick(random, &["", r#""only": [{"model": "NVIDIA*"}, {"index": 1}],"#]);
    format!(
        r#"{{{only} "failRequestsGreaterThanOne": {fail}, "replicas": {replicas}, "overrides": [{{"model": "Tesla T4", "replicas": {few}}},
            {{"uuid": "GPU-3", "replicas": 3}}]}}"#
    )
}

pub(crate) fn mixed(random: &mut Random) -> String {
    let (replicas, whole, shared) = (1 + random.below(128), random.below(4), random.below(4));
    let settle = random.below(7_200);
    let reserves = format!(r#""replicas": {replicas}, "reserveWhole": {whole}, "reserveShared": {shared}"#);
    if random.once_in(2) {
        format!("{{{reserves}}}")
    } else {
        format!(r#"{{"advertise": "latched", "settleSeconds": {settle}, {reserves}}}"#)
    }
}

pub(crate) fn resources(random: &mut Random) -> String {
    let named = r#"{"resources": ["nvidia.com/gpu", "nvidia.com/gpu.shared"]}"#;
    pick(random, &["{}", "{}", named]).into()
}

pub(crate) fn spread(random: &mut Random) -> String {
    let distinct = pick(random, &["preferred", "required"]);
    format!(r#"{{"distinct": "{distinct}"}}"#)
}

pub(crate) fn topology(random: &mut Random) -> String {
    format!(r#"{{"leaveWeight": {}}}"#, random.below(1_001))
}

pub(crate) fn memory(random: &mut Random) -> String {
    let (mib, most) = (1 + random.below(40_000), 1 + random.below(64));
    let compute = pick(random, &["none", "proportional"]);
    format!(
        r#"{{"compute": "{compute}", "sizes": [{{"resource": "nvidia.com/gpu.mem-10g", "memoryMiB": 10240}},
            {{"resource": "nvidia.com/gpu.mem-20g", "memoryMiB": 20480, "maxPerGpu": 1}},
            {{"resource": "nvidia.com/gpu.shared", "memoryMiB": {mib}, "maxPerGpu": {most}}}]}}"#
    )
}

pub(crate) fn quota(random: &mut Random) -> String {
    let (devices, mib, default) = (random.below(8), random.below(100_000), random.below(8));
    let unknown = pick(random, &["true", "false"]);
    format!(
        r#"{{"countUnknown": {unknown}, "default": {{"devices": {default}}}, "namespaces": [
            {{"namespace": "research", "devices": {devices}, "resources": ["nvidia.com/gpu*"]}},
            {{"namespace": "team-*", "memoryMiB": {mib}}}]}}"#
    )
}

pub(crate) fn triage_xid(random: &mut Random) -> String {
    // No code twice.
    let (ignored, code) = (random.below(CODES / 2) * 2, random.below(CODES / 2) * 2 + 1);
    let seconds = 1 + random.below(3_600);
    let severity = pick(random, &["ignore", "degraded", "unhealthy"]);
    format!(
        r#"{{"ignore": [{ignored}], "degradedSeconds": {seconds}, "resetSeconds": {seconds},
            "xids": [{{"code": {code}, "severity": "{severity}"}}]}}"#
    )
}
