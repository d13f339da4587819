//! Which GPUs a container can use that no device plugin allocated to it, and what the guard does about that. The guard reads
//! the container and the kubelet's checkpoint; the rule is pure.

use crate::evidence::pods::{PodBypass, VISIBLE_DEVICES};
use crate::ids::names::PartId;
use std::collections::BTreeSet;
use std::fmt;

/// What the guard does about containers that can use GPUs that were not allocated to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BypassAction {
    /// Nothing: the processes and pods are reported.
    #[default]
    Report,
    /// It removes the access to those GPUs, and the container runs.
    Strip,
    /// It refuses the container.
    Deny,
}

impl BypassAction {
    /// Its value in the configuration and in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::Strip => "strip",
            Self::Deny => "deny",
        }
    }
}

/// The namespaces that are exempt by default: those of the system, and in which NVIDIA's software is installed by its
/// documentation.
pub const EXEMPT_NAMESPACES: [&str; 5] =
    ["kube-system", "gpu-operator", "nvidia-gpu-operator", "nvidia-device-plugin", "nvidia-dra-driver-gpu"];

/// The settings of the guard's action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BypassRules {
    /// What it does.
    pub action: BypassAction,
    /// Namespaces whose pods it neither changes nor refuses.
    pub exempt_namespaces: BTreeSet<String>,
}

impl Default for BypassRules {
    fn default() -> Self {
        Self {
            action: BypassAction::default(),
            exempt_namespaces: EXEMPT_NAMESPACES.map(str::to_owned).into(),
        }
    }
}

/// What a container would run with, or runs with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerAccess {
    /// The value of `NVIDIA_VISIBLE_DEVICES`, whether the pod or the image sets it; `all` without one for an image from
    /// which NVIDIA's runtime concludes that ([`visible_devices`]).
    pub visible_devices: Option<String>,
    /// Whether the environment has that variable more than once: the runtime's plugins change only the first one, and the
    /// last one counts.
    pub has_variable_twice: bool,
    /// The targets of mounts that name GPUs ([`crate::evidence::pods::DEVICE_MOUNTS`]).
    pub mounts: BTreeSet<String>,
    /// Annotations of the pod by which NVIDIA's plugin of the runtime adds GPUs ([`NRI_ANNOTATIONS`]).
    pub annotations: BTreeSet<String>,
    /// GPUs as CDI devices, by name ([`is_gpu`]).
    pub cdi_devices: BTreeSet<String>,
    /// Whether it may open all devices of the node.
    pub is_privileged: bool,
}

/// What is allocated to the container: by device plugins, as the kubelet's checkpoint shows, and by claims of Berth's DRA
/// driver, as the container's mounts show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocated {
    /// The values of `NVIDIA_VISIBLE_DEVICES`, one for each resource.
    pub visible_devices: Vec<String>,
    /// The targets of mounts.
    pub mounts: BTreeSet<String>,
    /// CDI devices, by name.
    pub cdi_devices: BTreeSet<String>,
    /// The parts that Berth granted.
    pub parts: BTreeSet<PartId>,
    /// Whether it has GPUs of which Berth does not know the parts: another plugin allocated them, or an older release of Berth.
    pub has_unknown_gpus: bool,
    /// Whether Berth granted it GPUs through claims. GPUs of another DRA driver or of a claim with admin access do not count: the
    /// container has them only as CDI devices.
    pub has_claim_grants: bool,
}

/// What is known of the container's pod by the API server or the kubelet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodFacts {
    /// Its spec sets `NVIDIA_VISIBLE_DEVICES`, so that the value is not the image's, which most authors of pods do not know.
    pub sets_visible_devices: bool,
    /// It has claims (DRA), by which it may have GPUs.
    pub has_claims: bool,
}

/// Whether the container can still be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It is being created.
    Created,
    /// It is created: nothing can be changed but which devices it can open.
    Running,
}

/// A way in which a container can use GPUs that were not allocated to it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnallocatedAccess {
    /// `NVIDIA_VISIBLE_DEVICES` has this value.
    VisibleDevices(String),
    /// A mount has this target.
    Mount(String),
    /// Its pod has this annotation.
    Annotation(String),
    /// It is privileged.
    Privileged,
}

impl UnallocatedAccess {
    /// What the author of the pod can do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::VisibleDevices(_) => "remove NVIDIA_VISIBLE_DEVICES from its `env`",
            Self::Mount(_) => "remove the mount",
            Self::Annotation(_) => "remove the annotation",
            Self::Privileged => "set `securityContext.privileged: false`",
        }
    }
}

/// The most bytes of a pod's own text that are repeated, after characters that cannot be printed were escaped.
const TEXT_BYTES_MAX: usize = 120;

impl fmt::Display for UnallocatedAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cut = |text: &str| {
            let mut quoted = format!("{text:?}");
            quoted.truncate(quoted.floor_char_boundary(TEXT_BYTES_MAX));
            quoted
        };
        match self {
            Self::VisibleDevices(value) => write!(f, "{VISIBLE_DEVICES} is {}", cut(value)),
            Self::Mount(target) => {
                write!(f, "{} is mounted, which names GPUs to NVIDIA's runtime", cut(target))
            }
            Self::Annotation(key) => write!(f, "its pod has the annotation {}, which names GPUs", cut(key)),
            Self::Privileged => f.write_str("it is privileged, and so can open every device of the node"),
        }
    }
}

/// What is done about a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// How it can use GPUs that were not allocated to it; empty if nothing is done.
    pub unallocated: Vec<UnallocatedAccess>,
    /// It is not created. Otherwise the rest applies.
    pub is_refused: bool,
    /// The value that `NVIDIA_VISIBLE_DEVICES` gets.
    pub visible_devices: Option<String>,
    /// The targets of the mounts that are removed.
    pub removed_mounts: Vec<String>,
    /// It is denied access to the device nodes of NVIDIA's driver, but for those of [`Allocated::parts`].
    pub denies_devices: bool,
    /// It should be denied access to devices, and cannot be: which GPUs were allocated to it is not known.
    pub is_not_stopped: bool,
}

/// The most mounts of one container that are removed; with more it is refused, since the answer to the runtime is limited.
const MOUNTS_MAX: usize = 8;

/// What is done about a container.
#[must_use]
pub fn judge(
    action: BypassAction,
    access: &ContainerAccess,
    allocated: &Allocated,
    pod: PodFacts,
    phase: Phase,
) -> Verdict {
    let mut verdict = Verdict::default();
    if action == BypassAction::Report {
        return verdict;
    }
    let has_other_claims = pod.has_claims && !allocated.has_claim_grants;
    let has_other_cdi_devices = !access.cdi_devices.is_subset(&allocated.cdi_devices);
    let may_have_unknown_gpus = allocated.has_unknown_gpus || has_other_claims || has_other_cdi_devices;
    let mut is_refused = false;
    // Every image of CUDA has the variable, so that a container which runs with GPUs of others has it, too.
    if let Some(value) = &access.visible_devices
        && names_others(value, allocated)
        && (phase == Phase::Created || pod.sets_visible_devices || !may_have_unknown_gpus)
    {
        verdict.unallocated.push(UnallocatedAccess::VisibleDevices(value.clone()));
        verdict.visible_devices = Some(allocated_value(allocated));
        verdict.denies_devices |= access.has_variable_twice;
        is_refused |= pod.sets_visible_devices;
    }
    for target in access.mounts.difference(&allocated.mounts) {
        verdict.unallocated.push(UnallocatedAccess::Mount(target.clone()));
        verdict.removed_mounts.push(target.clone());
        is_refused = true;
    }
    for key in &access.annotations {
        verdict.unallocated.push(UnallocatedAccess::Annotation(key.clone()));
        verdict.denies_devices = true;
        is_refused = true;
    }
    if access.is_privileged && !may_have_unknown_gpus {
        verdict.unallocated.push(UnallocatedAccess::Privileged);
        verdict.denies_devices = true;
        is_refused = true;
    }
    if phase == Phase::Running {
        let unallocated = std::mem::take(&mut verdict.unallocated);
        verdict = Verdict { denies_devices: !unallocated.is_empty(), unallocated, ..Verdict::default() };
    } else {
        verdict.is_refused =
            is_refused && action == BypassAction::Deny || verdict.removed_mounts.len() > MOUNTS_MAX;
    }
    verdict.is_not_stopped = verdict.denies_devices && may_have_unknown_gpus;
    verdict.denies_devices &= !may_have_unknown_gpus;
    verdict
}

/// The source of the mounts whose targets name GPUs, below [`crate::evidence::pods::DEVICE_MOUNTS`].
pub const MOUNT_SOURCE: &str = "/dev/null";
/// The domain of a pod's annotations by which NVIDIA's plugin of the runtime adds CDI devices (nvidia-container-toolkit:
/// `container/runtime/nri/plugin.go`).
pub const NRI_ANNOTATIONS: &str = "nvidia.cdi.k8s.io";

/// Whether a CDI device with this name is a GPU, such as `nvidia.com/gpu=0`, `k8s.gpu.nvidia.com/claim=ID` and `berth/gpu=0`.
#[must_use]
pub fn is_gpu(cdi_device: &str) -> bool {
    let kind = cdi_device.split('=').next().unwrap_or_default();
    kind.ends_with("/gpu") || kind.contains("nvidia.com") && kind.contains("gpu")
}

/// The value of `NVIDIA_VISIBLE_DEVICES` by which NVIDIA's runtime selects GPUs, by the container's environment, `KEY=VALUE`.
/// An image of the time before that variable has `CUDA_VERSION` and not `NVIDIA_REQUIRE_CUDA`, and gets all GPUs without it
/// (nvidia-container-toolkit: `internal/config/image/cuda_image.go`).
#[must_use]
pub fn visible_devices(environment: &[String]) -> Option<String> {
    let value = |name: &str| {
        let mut variables = environment.iter().rev().filter_map(|variable| variable.split_once('='));
        variables.find(|(key, _)| *key == name).map(|(_, value)| value)
    };
    let is_set = |name: &str| value(name).is_some_and(|value| !value.is_empty());
    let of_old_image = || (is_set("CUDA_VERSION") && !is_set("NVIDIA_REQUIRE_CUDA")).then_some("all");
    value(VISIBLE_DEVICES).or_else(of_old_image).map(str::to_owned)
}

/// The CDI devices that annotations of a container name, by their keys and values (CDI specification, "Container Runtime
/// Interface").
pub fn cdi_devices<'a>(
    annotations: impl Iterator<Item = (&'a str, &'a str)>,
) -> impl Iterator<Item = String> {
    let values = annotations.filter(|(key, _)| key.starts_with("cdi.k8s.io/")).map(|(_, value)| value);
    values.flat_map(|value| value.split(',')).map(|name| name.trim().to_owned())
}

/// The devices in a value of `NVIDIA_VISIBLE_DEVICES`.
fn devices(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim).filter(|device| PodBypass::shows_gpus(Some(device)))
}

fn names_others(value: &str, allocated: &Allocated) -> bool {
    let of_given: BTreeSet<&str> =
        allocated.visible_devices.iter().flat_map(|value| devices(value)).collect();
    devices(value).any(|device| !of_given.contains(device))
}

/// The value that was allocated; `void` if none was, with which NVIDIA's runtime adds nothing.
fn allocated_value(allocated: &Allocated) -> String {
    let mut all: Vec<&str> = Vec::new();
    for device in allocated.visible_devices.iter().flat_map(|value| devices(value)) {
        if !all.contains(&device) {
            all.push(device);
        }
    }
    if all.is_empty() { "void".into() } else { all.join(",") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::btree_set;
    use proptest::option;
    use proptest::prelude::*;

    const NAMED: PodFacts = PodFacts { sets_visible_devices: true, has_claims: false };
    const BY_IMAGE: PodFacts = PodFacts { sets_visible_devices: false, has_claims: false };
    const CLAIMING: PodFacts = PodFacts { sets_visible_devices: false, has_claims: true };

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn sets(value: &str) -> ContainerAccess {
        ContainerAccess { visible_devices: Some(value.into()), ..ContainerAccess::default() }
    }

    fn allocated(values: &[&str]) -> Allocated {
        Allocated {
            visible_devices: values.iter().map(|value| (*value).to_owned()).collect(),
            ..Allocated::default()
        }
    }

    fn strip(access: &ContainerAccess, allocated: &Allocated) -> Verdict {
        judge(BypassAction::Strip, access, allocated, NAMED, Phase::Created)
    }

    fn deny(access: &ContainerAccess, allocated: &Allocated, pod: PodFacts) -> Verdict {
        judge(BypassAction::Deny, access, allocated, pod, Phase::Created)
    }

    #[test]
    fn a_variable_that_names_more_than_was_given_gets_the_given_value() {
        for (value, allocated, expected) in [
            ("all", allocated(&[]), Some("void")),
            ("all", allocated(&["GPU-a"]), Some("GPU-a")),
            ("GPU-a,GPU-b", allocated(&["GPU-a"]), Some("GPU-a")),
            ("all", allocated(&["GPU-a", "GPU-b,GPU-a"]), Some("GPU-a,GPU-b")),
            ("0", allocated(&["GPU-a"]), Some("GPU-a")),
            ("all,void", allocated(&[]), Some("void")),
            ("GPU-a", allocated(&["GPU-a"]), None),
            ("GPU-b, GPU-a", allocated(&["GPU-a", "GPU-b"]), None),
            ("", allocated(&[]), None),
            ("void", allocated(&[]), None),
            (" none ", allocated(&["GPU-a"]), None),
        ] {
            let verdict = strip(&sets(value), &allocated);
            assert_eq!(verdict.visible_devices.as_deref(), expected, "{value:?} {allocated:?}");
            assert!(!verdict.is_refused && !verdict.denies_devices);
        }
    }

    #[test]
    fn a_variable_that_is_there_twice_cannot_be_changed_so_that_devices_are_denied() {
        let twice = ContainerAccess { has_variable_twice: true, ..sets("all") };
        assert!(strip(&twice, &allocated(&["GPU-a"])).denies_devices);
        let of_others = Allocated { has_unknown_gpus: true, ..Allocated::default() };
        let verdict = strip(&twice, &of_others);
        assert!(verdict.is_not_stopped && !verdict.denies_devices);
        assert!(
            !strip(&ContainerAccess { has_variable_twice: true, ..sets("GPU-a") }, &allocated(&["GPU-a"]))
                .denies_devices
        );
    }

    #[test]
    fn a_variable_of_the_image_alone_refuses_no_container() {
        assert!(deny(&sets("all"), &allocated(&[]), NAMED).is_refused);
        let by_image = deny(&sets("all"), &allocated(&[]), BY_IMAGE);
        assert!(!by_image.is_refused);
        assert_eq!(by_image.visible_devices.as_deref(), Some("void"));
    }

    #[test]
    fn an_image_without_the_variable_may_get_all() {
        let value = |environment: &[&str]| {
            visible_devices(&environment.iter().map(|variable| (*variable).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(value(&["CUDA_VERSION=9.0"]).as_deref(), Some("all"));
        assert_eq!(value(&["CUDA_VERSION=12", "NVIDIA_REQUIRE_CUDA=cuda>=12"]), None);
        assert_eq!(value(&["CUDA_VERSION=9.0", "NVIDIA_VISIBLE_DEVICES="]).as_deref(), Some(""));
        let twice = ["NVIDIA_VISIBLE_DEVICES=GPU-a", "NVIDIA_VISIBLE_DEVICES=all"];
        assert_eq!(value(&twice).as_deref(), Some("all"), "the last one counts");
    }

    #[test]
    fn mounts_that_were_not_given_are_removed_and_too_many_are_refused() {
        let access = ContainerAccess { mounts: set(&["/m/GPU-a", "/m/all"]), ..ContainerAccess::default() };
        let allocated = Allocated { mounts: set(&["/m/GPU-a", "/other"]), ..Allocated::default() };
        assert_eq!(strip(&access, &allocated).removed_mounts, ["/m/all"]);
        assert!(deny(&access, &allocated, BY_IMAGE).is_refused);
        let many =
            ContainerAccess { mounts: (0..9).map(|n| n.to_string()).collect(), ..ContainerAccess::default() };
        assert!(strip(&many, &Allocated::default()).is_refused);
    }

    #[test]
    fn an_annotation_for_nvidias_plugin_has_devices_denied() {
        let access =
            ContainerAccess { annotations: set(&["nvidia.cdi.k8s.io/pod"]), ..ContainerAccess::default() };
        assert!(strip(&access, &Allocated::default()).denies_devices);
        assert!(deny(&access, &Allocated::default(), BY_IMAGE).is_refused);
    }

    #[test]
    fn devices_are_denied_to_a_privileged_container_unless_another_source_allocated_some() {
        let privileged = ContainerAccess { is_privileged: true, ..ContainerAccess::default() };
        assert!(strip(&privileged, &Allocated::default()).denies_devices);
        let with_cdi = ContainerAccess { cdi_devices: set(&["vendor/gpu=1"]), ..privileged.clone() };
        assert_eq!(strip(&with_cdi, &Allocated::default()), Verdict::default());
        let of_berth = Allocated { cdi_devices: with_cdi.cdi_devices.clone(), ..Allocated::default() };
        assert!(strip(&with_cdi, &of_berth).denies_devices, "Berth allocated the CDI device");
        let of_others = Allocated { has_unknown_gpus: true, ..Allocated::default() };
        assert_eq!(strip(&privileged, &of_others), Verdict::default());
        assert_eq!(deny(&privileged, &Allocated::default(), CLAIMING), Verdict::default());
        let of_claim = Allocated { has_claim_grants: true, ..Allocated::default() };
        assert_eq!(strip(&with_cdi, &of_claim), Verdict::default(), "another driver's CDI device");
        assert!(deny(&privileged, &of_claim, CLAIMING).is_refused, "the container's claims are Berth's");
        let of_both = Allocated { has_unknown_gpus: true, ..of_claim };
        assert_eq!(strip(&privileged, &of_both), Verdict::default());
    }

    #[test]
    fn only_devices_can_be_denied_to_a_container_that_runs() {
        let running = |action, access: &ContainerAccess, allocated: &Allocated| {
            judge(action, access, allocated, NAMED, Phase::Running)
        };
        let verdict = running(BypassAction::Deny, &sets("all"), &Allocated::default());
        assert!(verdict.denies_devices && !verdict.is_refused && verdict.visible_devices.is_none());
        assert_eq!(running(BypassAction::Strip, &sets("GPU-a"), &allocated(&["GPU-a"])), Verdict::default());
    }

    #[test]
    fn gpus_are_known_by_the_kind_of_a_cdi_device() {
        for (name, expected) in [
            ("nvidia.com/gpu=all", true),
            ("k8s.gpu.nvidia.com/claim=1", true),
            ("berth/gpu=GPU-1", true),
            ("management.nvidia.com/gpu=all", true),
            ("rdma.example.com/nic=gpu-nvidia.com", false),
            ("nvidia.com/nic=1", false),
        ] {
            assert_eq!(is_gpu(name), expected, "{name}");
        }
    }

    #[test]
    fn a_text_of_the_pod_is_cut_and_escaped() {
        for character in ["\u{7f}", "\u{e0001}", "\u{1f980}"] {
            let text = UnallocatedAccess::Mount(character.repeat(4000)).to_string();
            assert!(text.len() < 200 && !text.contains('\u{7f}'), "{}", text.len());
        }
    }

    const VALUES: [&str; 5] = ["GPU-a", "GPU-b", "all", "void", ""];

    prop_compose! {
        fn any_allocated()(
            values in prop::collection::vec(0usize..2, 0..3),
            mounts in btree_set("[ab]", 0..2),
            cdi in btree_set("[ab]", 0..2),
            has_unknown_gpus in any::<bool>(),
            has_claim_grants in any::<bool>(),
        ) -> Allocated {
            Allocated {
                visible_devices: values.iter().map(|at| VALUES[*at].to_owned()).collect(),
                mounts, cdi_devices: cdi, parts: BTreeSet::new(), has_unknown_gpus, has_claim_grants,
            }
        }
    }

    prop_compose! {
        fn any_access()(
            value in option::of(0usize..5),
            has_variable_twice in any::<bool>(),
            mounts in btree_set("[abc]", 0..3),
            annotations in btree_set("[a]", 0..2),
            cdi in btree_set("[abc]", 0..3),
            is_privileged in any::<bool>(),
        ) -> ContainerAccess {
            let visible_devices = value.map(|at| VALUES[at].to_owned());
            ContainerAccess { visible_devices, has_variable_twice, mounts, annotations, cdi_devices: cdi, is_privileged }
        }
    }

    const PODS: [PodFacts; 3] = [NAMED, BY_IMAGE, CLAIMING];
    const ACTIONS: [BypassAction; 3] = [BypassAction::Report, BypassAction::Strip, BypassAction::Deny];

    proptest! {
        /// I13: a container that has only what was allocated to it keeps it, and so does one with GPUs of another source, even if it is
        /// privileged.
        #[test]
        fn what_was_allocated_stays(access in any_access(), allocated in any_allocated(), pod in 0usize..3, action in 0usize..3) {
            let (pod, action) = (PODS[pod], ACTIONS[action]);
            let had = ContainerAccess {
                visible_devices: allocated.visible_devices.first().cloned(),
                mounts: allocated.mounts.clone(),
                cdi_devices: allocated.cdi_devices.clone(),
                ..ContainerAccess::default()
            };
            for phase in [Phase::Created, Phase::Running] {
                prop_assert_eq!(judge(action, &had, &allocated, pod, phase), Verdict::default());
                let verdict = judge(action, &access, &allocated, pod, phase);
                prop_assert!(verdict.removed_mounts.iter().all(|target| !allocated.mounts.contains(target)));
                let has_claims = pod.has_claims && !allocated.has_claim_grants;
                let has_cdi = !access.cdi_devices.is_subset(&allocated.cdi_devices);
                let of_others = allocated.has_unknown_gpus || has_claims || has_cdi;
                prop_assert!(!(of_others && verdict.denies_devices));
                let privileged = ContainerAccess { is_privileged: true, ..had.clone() };
                if allocated.has_unknown_gpus || has_claims {
                    prop_assert_eq!(judge(action, &privileged, &allocated, pod, phase), Verdict::default());
                }
                let changes = verdict.is_refused || verdict.denies_devices || verdict.is_not_stopped
                    || verdict.visible_devices.is_some() || !verdict.removed_mounts.is_empty();
                prop_assert_eq!(changes, !verdict.unallocated.is_empty());
            }
        }

        /// What a verdict leaves is allocated, unless the verdict says that it could not be stopped.
        #[test]
        fn a_stripped_container_has_nothing_unallocated(access in any_access(), allocated in any_allocated(), pod in 0usize..3) {
            let verdict = judge(BypassAction::Strip, &access, &allocated, PODS[pod], Phase::Created);
            let mut left = access.clone();
            // A variable that is there twice keeps its last value.
            let changed = verdict.visible_devices.clone().filter(|_| !access.has_variable_twice);
            left.visible_devices = changed.or(left.visible_devices);
            left.mounts.retain(|target| !verdict.removed_mounts.contains(target));
            if verdict.denies_devices {
                left = ContainerAccess { mounts: left.mounts, cdi_devices: left.cdi_devices, ..ContainerAccess::default() };
            }
            if !verdict.is_not_stopped {
                prop_assert_eq!(judge(BypassAction::Strip, &left, &allocated, PODS[pod], Phase::Created), Verdict::default());
            }
        }
    }
}
