//! Converts a pod of the kubelet's Pods API to the kernel's type.

use crate::wire::core;
use berth_kernel::evidence::pods::{
    BypassKind, Pod, PodBypass, PodContainer, PodOwner, Stage, VISIBLE_DEVICES,
};
use berth_kernel::ids::names::Resource;
use prost::Message;

/// The annotation that the kubelet sets on every pod: its source (kubelet: `ConfigSourceAnnotationKey`).
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
/// Its value for pods of the API server. Pods of other sources (a file, a URL) are static.
const API_SERVER_SOURCE: &str = "api";
/// The most labels of one pod that policies get.
const LABELS_MAX: usize = 64;

/// Parses a pod. `None` for bytes that are no pod, and for a pod without a name or UID, which no kubelet
/// sends.
pub(super) fn parse_pod(bytes: &[u8]) -> Option<Pod> {
    let pod = core::Pod::decode(bytes).ok()?;
    let meta = pod.metadata?;
    let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
    let containers = || spec.init_containers.iter().chain(&spec.containers);
    let deletion_wall_ms = deletion_wall_ms(&meta);
    let mut labels: Vec<(String, String)> = meta.labels.into_iter().collect();
    labels.sort_unstable();
    labels.truncate(LABELS_MAX);
    Some(Pod {
        uid: meta.uid.filter(|uid| !uid.is_empty())?,
        namespace: meta.namespace?,
        name: meta.name?,
        labels,
        is_static: meta.annotations.get(CONFIG_SOURCE).is_some_and(|source| source != API_SERVER_SOURCE),
        owner: PodOwner::among(
            meta.owner_references.iter().map(|o| (o.kind().into(), o.name().into(), o.controller())),
        ),
        stage: Stage::of(status.phase.as_deref(), status.start_time.is_some()),
        deletion_wall_ms,
        created_wall_ms: meta.creation_timestamp.map_or(0, wall_ms),
        has_claims: !spec.resource_claims.is_empty() || status.extended_resource_claim_status.is_some(),
        named_claims: spec
            .resource_claims
            .iter()
            .filter_map(|claim| claim.resource_claim_name.clone())
            .collect(),
        bypass: PodBypass::most_explicit(containers().filter_map(bypass)),
        containers: containers().map(container_requests).collect(),
    })
}

/// The UID of a deleted pod, whose other fields may be missing.
pub(super) fn parse_uid(bytes: &[u8]) -> Option<String> {
    core::Pod::decode(bytes).ok()?.metadata?.uid.filter(|uid| !uid.is_empty())
}

/// When the deletion was requested: the deletion timestamp minus the grace period.
fn deletion_wall_ms(meta: &core::ObjectMeta) -> Option<u64> {
    let grace_s = u64::try_from(meta.deletion_grace_period_seconds()).unwrap_or(0);
    Some(wall_ms(meta.deletion_timestamp?).saturating_sub(grace_s.saturating_mul(1000)))
}

fn wall_ms(time: core::Time) -> u64 {
    let seconds = u64::try_from(time.seconds()).unwrap_or(0);
    seconds.saturating_mul(1000) + u64::try_from(time.nanos() / 1_000_000).unwrap_or(0)
}

/// A container's requests. Extended resources are whole numbers, and requests equal limits (validated by
/// the API server).
fn container_requests(container: &core::Container) -> PodContainer {
    let limits = container.resources.iter().flat_map(|r| &r.limits);
    let mut requests: Vec<(Resource, u32)> = limits
        .filter_map(|(name, quantity)| {
            let count = quantity.string().parse().ok().filter(|n| *n > 0)?;
            Some((Resource::parse(name).ok()?, count))
        })
        .collect();
    requests.sort_unstable();
    PodContainer { name: container.name().to_owned(), requests }
}

fn bypass(container: &core::Container) -> Option<PodBypass> {
    let visible_devices = container.env.iter().find(|variable| variable.name() == VISIBLE_DEVICES);
    // Go writes an empty value for a variable with a `valueFrom`.
    let value = |variable: &core::EnvVar| variable.value_from.is_none().then(|| variable.value().to_owned());
    let mounts_gpus = container.volume_mounts.iter().any(|mount| PodBypass::mounts_gpus(mount.mount_path()));
    let imports_variables = container.env_from.iter().any(|source| PodBypass::may_name_gpus(source.prefix()));
    let kind = if visible_devices.is_some_and(|variable| PodBypass::shows_gpus(value(variable).as_deref())) {
        BypassKind::NamesGpus
    } else if mounts_gpus {
        BypassKind::MountsGpus
    } else if container.security_context.as_ref().is_some_and(core::SecurityContext::privileged) {
        BypassKind::Privileged
    } else if imports_variables && visible_devices.is_none() {
        BypassKind::ImportsVariables
    } else {
        return None;
    };
    Some(PodBypass { kind, container: container.name().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> core::Pod {
        let limit = |name: &str, n: &str| (name.to_owned(), core::Quantity { string: Some(n.into()) });
        let container = |name: &str, limits: Vec<(String, core::Quantity)>| core::Container {
            name: Some(name.into()),
            resources: Some(core::ResourceRequirements { limits: limits.into_iter().collect() }),
            ..core::Container::default()
        };
        core::Pod {
            metadata: Some(core::ObjectMeta {
                name: Some("p".into()),
                namespace: Some("team".into()),
                uid: Some("u-1".into()),
                creation_timestamp: Some(core::Time { seconds: Some(5), nanos: Some(7_000_000) }),
                labels: [("b".to_owned(), "2".to_owned()), ("a".to_owned(), "1".to_owned())].into(),
                annotations: [(CONFIG_SOURCE.to_owned(), "api".to_owned())].into(),
                ..core::ObjectMeta::default()
            }),
            spec: Some(core::PodSpec {
                init_containers: vec![container("init", vec![limit("nvidia.com/gpu", "1")])],
                containers: vec![
                    container("main", vec![limit("nvidia.com/gpu.shared", "2"), limit("memory", "1Gi")]),
                    core::Container { name: Some("side".into()), ..core::Container::default() },
                ],
                ..core::PodSpec::default()
            }),
            status: Some(core::PodStatus {
                phase: Some("Pending".into()),
                start_time: None,
                ..core::PodStatus::default()
            }),
        }
    }

    fn read(pod: &core::Pod) -> Pod {
        parse_pod(&pod.encode_to_vec()).unwrap()
    }

    #[test]
    fn a_pod_is_read_with_its_init_containers_first() {
        let pod = read(&plain());
        assert_eq!((&*pod.uid, &*pod.namespace, &*pod.name), ("u-1", "team", "p"));
        assert_eq!(pod.labels, [("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())]);
        assert_eq!((pod.created_wall_ms, pod.stage, pod.is_static), (5007, Stage::Waiting, false));
        let requests: Vec<String> =
            pod.containers.iter().map(|c| format!("{} {:?}", c.name, c.requests)).collect();
        assert_eq!(
            requests,
            ["init [(\"nvidia.com/gpu\", 1)]", "main [(\"nvidia.com/gpu.shared\", 2)]", "side []"]
        );
    }

    #[test]
    fn static_daemon_set_and_deleted_pods_are_recognized() {
        let mut pod = plain();
        let meta = pod.metadata.as_mut().unwrap();
        meta.annotations.insert(CONFIG_SOURCE.to_owned(), "file".to_owned());
        meta.owner_references
            .push(core::OwnerReference { kind: Some("DaemonSet".into()), ..Default::default() });
        meta.deletion_timestamp = Some(core::Time { seconds: Some(40), nanos: None });
        meta.deletion_grace_period_seconds = Some(30);
        pod.status = Some(core::PodStatus {
            phase: None,
            start_time: Some(core::Time::default()),
            ..core::PodStatus::default()
        });
        let pod = read(&pod);
        assert!(pod.is_static && pod.is_of_daemon_set());
        assert_eq!(pod.deletion_wall_ms, Some(10_000));
        assert_eq!(pod.stage, Stage::Admitted);
    }

    #[test]
    fn a_pod_with_claims_is_recognized() {
        let mut pod = plain();
        assert!(!read(&pod).has_claims);
        let claim =
            |name: Option<&str>| core::PodResourceClaim { resource_claim_name: name.map(str::to_owned) };
        pod.spec.as_mut().unwrap().resource_claims = vec![claim(None), claim(Some("common"))];
        let pod = read(&pod);
        assert!(pod.has_claims && pod.named_claims == ["common"]);
    }

    #[test]
    fn pods_that_may_bypass_the_device_plugin_are_recognized() {
        let with = |change: &dyn Fn(&mut core::Container)| {
            let mut pod = plain();
            change(&mut pod.spec.as_mut().unwrap().containers[0]);
            read(&pod).bypass
        };
        let names = Some(PodBypass { kind: BypassKind::NamesGpus, container: "main".into() });
        let env = |value: &str, from: Option<core::EnvVarSource>| core::EnvVar {
            name: Some(VISIBLE_DEVICES.into()),
            value: Some(value.into()),
            value_from: from,
        };
        assert_eq!(with(&|c| c.env.push(env("all", None))), names);
        assert_eq!(with(&|c| c.env.push(env("void", None))), None);
        assert_eq!(with(&|c| c.env.push(env("", Some(core::EnvVarSource {})))), names);
        let privileged = |c: &mut core::Container| {
            c.security_context = Some(core::SecurityContext { privileged: Some(true) });
        };
        assert_eq!(
            with(&privileged),
            Some(PodBypass { kind: BypassKind::Privileged, container: "main".into() })
        );
        let mount = core::VolumeMount { mount_path: Some("/var/run/nvidia-container-devices/all".into()) };
        let mounts = |c: &mut core::Container| c.volume_mounts.push(mount.clone());
        assert_eq!(with(&mounts), Some(PodBypass { kind: BypassKind::MountsGpus, container: "main".into() }));
        let source = core::EnvFromSource { prefix: Some("NVIDIA_VISIBLE_".into()) };
        let imports = |c: &mut core::Container| c.env_from.push(source.clone());
        assert_eq!(
            with(&imports),
            Some(PodBypass { kind: BypassKind::ImportsVariables, container: "main".into() })
        );
        let with_own = |c: &mut core::Container| {
            imports(c);
            c.env.push(env("void", None));
        };
        assert_eq!(with(&with_own), None, "a variable of its own wins");
        let mut pod = plain();
        let spec = pod.spec.as_mut().unwrap();
        imports(&mut spec.containers[0]);
        mounts(&mut spec.init_containers[0]);
        let mounted = Some(PodBypass {
            kind: BypassKind::MountsGpus,
            container: spec.init_containers[0].name().into(),
        });
        assert_eq!(read(&pod).bypass, mounted, "the most explicit bypass is reported");
        assert_eq!(with(&|_| {}), None);
    }

    /// Bytes as kubelet 1.36 sends them, generated by Go's `v1.Pod.Marshal`.
    #[test]
    fn gos_encoding_is_parsed() {
        let pod = parse_pod(include_bytes!("pod.bin")).unwrap();
        assert_eq!(
            (&*pod.uid, &*pod.namespace, &*pod.name),
            ("3f0c8f5e-7f5b-4a53-a0c8-4a34d0f0b6a1", "default", "trainer-0")
        );
        assert_eq!(pod.labels, [("app".to_owned(), "trainer".to_owned())]);
        assert!(pod.is_of_daemon_set() && !pod.is_static && pod.deletion_wall_ms.is_none());
        assert_eq!((pod.stage, pod.created_wall_ms), (Stage::Admitted, 1_770_000_000_000));
        let gpu = |name: &str, n| vec![(Resource::parse(name).unwrap(), n)];
        assert_eq!(
            pod.containers,
            [
                PodContainer { name: "prepare".into(), requests: gpu("nvidia.com/gpu", 1) },
                PodContainer { name: "main".into(), requests: gpu("nvidia.com/gpu.shared", 2) },
            ]
        );
        assert_eq!(pod.bypass, Some(PodBypass { kind: BypassKind::NamesGpus, container: "main".into() }));
    }

    #[test]
    fn invalid_pods_are_none() {
        assert!(parse_pod(b"\xff\xff").is_none());
        assert!(parse_pod(&[]).is_none());
        assert!(parse_uid(&core::Pod::default().encode_to_vec()).is_none());
        assert_eq!(parse_uid(&plain().encode_to_vec()).as_deref(), Some("u-1"));
    }
}
