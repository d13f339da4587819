//! A pod of the kubelet's Pods API in the kernel's words.

use crate::wire::core;
use berth_kernel::names::Resource;
use berth_kernel::pod_bypass::{PodBypass, VISIBLE_DEVICES};
use berth_kernel::pods::{Pod, PodContainer, Stage};
use prost::Message;

/// Set by the kubelet on every pod: where it has it from (kubelet: `ConfigSourceAnnotationKey`).
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
/// Its value for pods of the API server; those of a file or an address of the node are static.
const OF_API_SERVER: &str = "api";
/// Labels of one pod that policies are shown.
const LABELS_MAX: usize = 64;

/// What the kernel wants to know of a pod. `None` for bytes that are no pod, or one without a name or
/// UID, which no kubelet sends.
pub(super) fn understand(bytes: &[u8]) -> Option<Pod> {
    let pod = core::Pod::decode(bytes).ok()?;
    let meta = pod.metadata?;
    let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
    let containers = || spec.init_containers.iter().chain(&spec.containers);
    let leaving_since_wall_ms = leaving_since(&meta);
    let mut labels: Vec<(String, String)> = meta.labels.into_iter().collect();
    labels.sort_unstable();
    labels.truncate(LABELS_MAX);
    Some(Pod {
        uid: meta.uid.filter(|uid| !uid.is_empty())?,
        namespace: meta.namespace?,
        name: meta.name?,
        labels,
        is_static: meta.annotations.get(CONFIG_SOURCE).is_some_and(|source| source != OF_API_SERVER),
        is_of_daemon_set: meta
            .owner_references
            .iter()
            .any(|owner| owner.kind.as_deref() == Some("DaemonSet")),
        stage: Stage::of(status.phase.as_deref(), status.start_time.is_some()),
        deletion_wall_ms: leaving_since_wall_ms,
        created_wall_ms: meta.creation_timestamp.map_or(0, wall_ms),
        bypass: PodBypass::most_explicit(containers().filter_map(bypass)),
        containers: containers().map(asks).collect(),
    })
}

/// The UID of a pod that is told to be over; nothing else of it is sure to be there.
pub(super) fn uid(bytes: &[u8]) -> Option<String> {
    core::Pod::decode(bytes).ok()?.metadata?.uid.filter(|uid| !uid.is_empty())
}

/// The grace period before the moment at which it is to be gone.
fn leaving_since(meta: &core::ObjectMeta) -> Option<u64> {
    let grace_s = u64::try_from(meta.deletion_grace_period_seconds()).unwrap_or(0);
    Some(wall_ms(meta.deletion_timestamp?).saturating_sub(grace_s.saturating_mul(1000)))
}

fn wall_ms(time: core::Time) -> u64 {
    let seconds = u64::try_from(time.seconds()).unwrap_or(0);
    seconds.saturating_mul(1000) + u64::try_from(time.nanos() / 1_000_000).unwrap_or(0)
}

/// Extended resources are whole numbers, and requests equal limits (validated by the API server).
fn asks(container: &core::Container) -> PodContainer {
    let limits = container.resources.iter().flat_map(|r| &r.limits);
    let mut asks: Vec<(Resource, u32)> = limits
        .filter_map(|(name, quantity)| {
            let count = quantity.string().parse().ok().filter(|n| *n > 0)?;
            Some((Resource::parse(name).ok()?, count))
        })
        .collect();
    asks.sort_unstable();
    PodContainer { name: container.name().to_owned(), requests: asks }
}

fn bypass(container: &core::Container) -> Option<PodBypass> {
    let own = container.env.iter().find(|variable| variable.name() == VISIBLE_DEVICES);
    // Go writes an empty value for one that comes from elsewhere.
    let value = |variable: &core::EnvVar| variable.value_from.is_none().then(|| variable.value().to_owned());
    let mounts_gpus = container.volume_mounts.iter().any(|mount| PodBypass::mounts_gpus(mount.mount_path()));
    let takes_variables = container.env_from.iter().any(|source| PodBypass::may_name_gpus(source.prefix()));
    let name = || container.name().to_owned();
    if own.is_some_and(|variable| PodBypass::shows_gpus(value(variable).as_deref())) {
        Some(PodBypass::NamesGpus { container: name() })
    } else if mounts_gpus {
        Some(PodBypass::MountsGpus { container: name() })
    } else if container.security_context.as_ref().is_some_and(core::SecurityContext::privileged) {
        Some(PodBypass::Privileged { container: name() })
    } else if takes_variables && own.is_none() {
        Some(PodBypass::ImportsVariables { container: name() })
    } else {
        None
    }
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
            }),
            status: Some(core::PodStatus { phase: Some("Pending".into()), start_time: None }),
        }
    }

    fn read(pod: &core::Pod) -> Pod {
        understand(&pod.encode_to_vec()).unwrap()
    }

    #[test]
    fn a_pod_is_read_with_its_containers_init_containers_first() {
        let pod = read(&plain());
        assert_eq!((&*pod.uid, &*pod.namespace, &*pod.name), ("u-1", "team", "p"));
        assert_eq!(pod.labels, [("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())]);
        assert_eq!((pod.created_wall_ms, pod.stage, pod.is_static), (5007, Stage::Waiting, false));
        let asks: Vec<String> =
            pod.containers.iter().map(|c| format!("{} {:?}", c.name, c.requests)).collect();
        assert_eq!(
            asks,
            ["init [(\"nvidia.com/gpu\", 1)]", "main [(\"nvidia.com/gpu.shared\", 2)]", "side []"]
        );
    }

    #[test]
    fn static_pods_daemon_sets_and_pods_that_go_are_told_apart() {
        let mut pod = plain();
        let meta = pod.metadata.as_mut().unwrap();
        meta.annotations.insert(CONFIG_SOURCE.to_owned(), "file".to_owned());
        meta.owner_references.push(core::OwnerReference { kind: Some("DaemonSet".into()) });
        meta.deletion_timestamp = Some(core::Time { seconds: Some(40), nanos: None });
        meta.deletion_grace_period_seconds = Some(30);
        pod.status = Some(core::PodStatus { phase: None, start_time: Some(core::Time::default()) });
        let pod = read(&pod);
        assert!(pod.is_static && pod.is_of_daemon_set);
        assert_eq!(pod.deletion_wall_ms, Some(10_000));
        assert_eq!(pod.stage, Stage::Admitted);
    }

    #[test]
    fn pods_that_reach_gpus_by_themselves_are_told_apart() {
        let with = |change: &dyn Fn(&mut core::Container)| {
            let mut pod = plain();
            change(&mut pod.spec.as_mut().unwrap().containers[0]);
            read(&pod).bypass
        };
        let names = Some(PodBypass::NamesGpus { container: "main".into() });
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
        assert_eq!(with(&privileged), Some(PodBypass::Privileged { container: "main".into() }));
        let mount = core::VolumeMount { mount_path: Some("/var/run/nvidia-container-devices/all".into()) };
        let mounts = |c: &mut core::Container| c.volume_mounts.push(mount.clone());
        assert_eq!(with(&mounts), Some(PodBypass::MountsGpus { container: "main".into() }));
        let source = core::EnvFromSource { prefix: Some("NVIDIA_VISIBLE_".into()) };
        let takes = |c: &mut core::Container| c.env_from.push(source.clone());
        assert_eq!(with(&takes), Some(PodBypass::ImportsVariables { container: "main".into() }));
        let with_own = |c: &mut core::Container| {
            takes(c);
            c.env.push(env("void", None));
        };
        assert_eq!(with(&with_own), None, "a variable of its own wins");
        let mut pod = plain();
        let spec = pod.spec.as_mut().unwrap();
        takes(&mut spec.containers[0]);
        mounts(&mut spec.init_containers[0]);
        let mounted = Some(PodBypass::MountsGpus { container: spec.init_containers[0].name().into() });
        assert_eq!(read(&pod).bypass, mounted, "the plainest sign is told");
        assert_eq!(with(&|_| {}), None);
    }

    /// As kubelet 1.36 sends one: bytes made by Go's `v1.Pod.Marshal`.
    #[test]
    fn what_go_writes_is_understood() {
        let pod = understand(include_bytes!("pod.bin")).unwrap();
        assert_eq!(
            (&*pod.uid, &*pod.namespace, &*pod.name),
            ("3f0c8f5e-7f5b-4a53-a0c8-4a34d0f0b6a1", "default", "trainer-0")
        );
        assert_eq!(pod.labels, [("app".to_owned(), "trainer".to_owned())]);
        assert!(pod.is_of_daemon_set && !pod.is_static && pod.deletion_wall_ms.is_none());
        assert_eq!((pod.stage, pod.created_wall_ms), (Stage::Admitted, 1_770_000_000_000));
        let gpu = |name: &str, n| vec![(Resource::parse(name).unwrap(), n)];
        assert_eq!(
            pod.containers,
            [
                PodContainer { name: "prepare".into(), requests: gpu("nvidia.com/gpu", 1) },
                PodContainer { name: "main".into(), requests: gpu("nvidia.com/gpu.shared", 2) },
            ]
        );
        assert_eq!(pod.bypass, Some(PodBypass::NamesGpus { container: "main".into() }));
    }

    #[test]
    fn what_is_no_pod_is_none() {
        assert!(understand(b"\xff\xff").is_none());
        assert!(understand(&[]).is_none());
        assert!(uid(&core::Pod::default().encode_to_vec()).is_none());
        assert_eq!(uid(&plain().encode_to_vec()).as_deref(), Some("u-1"));
    }
}
