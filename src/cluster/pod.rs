//! Converts a pod of the API server to the kernel's type.

use berth_kernel::evidence::pods::{
    BypassKind, Pod, PodBypass, PodContainer, PodOwner, Stage, VISIBLE_DEVICES, is_of_static_pod,
};
use berth_kernel::ids::names::Resource;
use k8s_openapi::api::core::v1::{Container, Pod as ApiPod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::BTreeMap;

/// Annotation of a mirror pod: the UID that its static pod has in the kubelet (kubelet: `ConfigMirrorAnnotationKey`).
const MIRROR: &str = "kubernetes.io/config.mirror";
/// Most labels of one pod that are passed to policies; the API server limits only the size of the object.
const LABELS_MAX: usize = 64;

/// The kernel's form of a pod. `None` without a name or UID; no API server sends such a pod.
#[must_use]
pub fn convert_pod(pod: &ApiPod) -> Option<Pod> {
    let meta = &pod.metadata;
    let annotation = |key: &str| meta.annotations.as_ref().and_then(|a| a.get(key)).cloned();
    // Every client may annotate a pod: a value that is not the hash of a static pod may be the UID of another pod, and
    // is ignored.
    let mirror = annotation(MIRROR).filter(|uid| is_of_static_pod(uid));
    let owners = meta.owner_references.iter().flatten();
    let owners = owners.map(|o| (o.kind.clone(), o.name.clone(), o.controller == Some(true)));
    let spec = pod.spec.as_ref();
    let init = spec.and_then(|s| s.init_containers.as_ref()).into_iter().flatten();
    let containers: Vec<&Container> = init.chain(spec.into_iter().flat_map(|s| &s.containers)).collect();
    let created = meta.creation_timestamp.as_ref().map_or(0, |t| t.0.as_millisecond());
    Some(Pod {
        uid: mirror.clone().or_else(|| meta.uid.clone())?,
        namespace: meta.namespace.clone()?,
        name: meta.name.clone()?,
        labels: labels(meta.labels.as_ref()),
        is_static: mirror.is_some(),
        owner: PodOwner::among(owners),
        stage: stage(pod),
        deletion_wall_ms: leaving_since(meta),
        created_wall_ms: u64::try_from(created).unwrap_or(0),
        has_claims: has_claims(pod),
        named_claims: named_claims(pod),
        bypass: PodBypass::most_explicit(containers.iter().filter_map(|c| bypass(c))),
        containers: containers.into_iter().map(container).collect(),
    })
}

/// Whether the pod has claims: in its spec, or made for its extended resources (KEP-5004).
fn has_claims(pod: &ApiPod) -> bool {
    let in_spec = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref());
    let of_resources = pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
    in_spec.is_some_and(|claims| !claims.is_empty()) || of_resources.is_some()
}

fn named_claims(pod: &ApiPod) -> Vec<String> {
    let in_spec = pod.spec.iter().filter_map(|spec| spec.resource_claims.as_ref()).flatten();
    in_spec.filter_map(|claim| claim.resource_claim_name.clone()).collect()
}

fn labels(labels: Option<&BTreeMap<String, String>>) -> Vec<(String, String)> {
    let all = labels.into_iter().flatten();
    all.take(LABELS_MAX).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// When the deletion was requested: the API server stores when it is to be complete, which is the grace period later.
fn leaving_since(meta: &ObjectMeta) -> Option<u64> {
    let end = meta.deletion_timestamp.as_ref()?.0.as_millisecond();
    let grace_ms = meta.deletion_grace_period_seconds.unwrap_or(0).saturating_mul(1000);
    Some(u64::try_from(end.saturating_sub(grace_ms)).unwrap_or(0))
}

fn stage(pod: &ApiPod) -> Stage {
    let status = pod.status.as_ref();
    Stage::of(status.and_then(|s| s.phase.as_deref()), status.is_some_and(|s| s.start_time.is_some()))
}

/// The name and extended resources of a container. Extended resources are whole numbers, and requests equal limits
/// (validated by the API server).
fn container(container: &Container) -> PodContainer {
    let limits = container.resources.as_ref().and_then(|r| r.limits.as_ref());
    let requests = limits.into_iter().flatten().filter_map(|(name, quantity)| {
        Some((Resource::parse(name).ok()?, quantity.0.parse().ok().filter(|n| *n > 0)?))
    });
    PodContainer { name: container.name.clone(), requests: requests.collect() }
}

fn bypass(container: &Container) -> Option<PodBypass> {
    let mut own =
        container.env.iter().flatten().filter(|variable| variable.name == VISIBLE_DEVICES).peekable();
    let sets_it = own.peek().is_some();
    let names_gpus = own.any(|variable| PodBypass::shows_gpus(variable.value.as_deref()));
    let mounts_gpus =
        container.volume_mounts.iter().flatten().any(|mount| PodBypass::mounts_gpus(&mount.mount_path));
    let takes_variables = container
        .env_from
        .iter()
        .flatten()
        .any(|source| source.prefix.as_deref().is_some_and(PodBypass::may_name_gpus));
    let privileged = container.security_context.as_ref().and_then(|s| s.privileged) == Some(true);
    let kind = if names_gpus {
        BypassKind::NamesGpus
    } else if mounts_gpus {
        BypassKind::MountsGpus
    } else if privileged {
        BypassKind::Privileged
    } else if takes_variables && !sets_it {
        BypassKind::ImportsVariables
    } else {
        return None;
    };
    Some(PodBypass { kind, container: container.name.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(json: serde_json::Value) -> Pod {
        convert_pod(&serde_json::from_value(json).unwrap()).unwrap()
    }

    fn plain() -> serde_json::Value {
        json!({
            "metadata": {"name": "p", "namespace": "team", "uid": "u-1", "labels": {"app": "x"},
                "creationTimestamp": "2026-01-01T00:00:01Z"},
            "spec": {
                "initContainers": [{"name": "init", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
                "containers": [
                    {"name": "main", "resources": {"limits": {"nvidia.com/gpu.shared": "2", "cpu": "500m", "memory": "1Gi"}}},
                    {"name": "side"},
                ],
            },
            "status": {"phase": "Pending"},
        })
    }

    #[test]
    fn a_pod_with_claims_is_recognized() {
        let mut json = plain();
        assert!(!pod(json.clone()).has_claims);
        json["spec"]["resourceClaims"] = json!([
            {"name": "gpu", "resourceClaimTemplateName": "gpu"},
            {"name": "other", "resourceClaimName": "common"},
        ]);
        let claiming = pod(json);
        assert!(claiming.has_claims && claiming.named_claims == ["common"]);
        let mut json = plain();
        json["status"]["extendedResourceClaimStatus"] =
            json!({"requestMappings": [], "resourceClaimName": "c"});
        assert!(pod(json).has_claims, "a claim for its extended resources");
    }

    #[test]
    fn containers_ask_for_extended_resources_init_containers_first() {
        let pod = pod(plain());
        assert_eq!((pod.uid.as_str(), pod.namespace.as_str(), pod.name.as_str()), ("u-1", "team", "p"));
        let asks: Vec<(&str, String)> = pod
            .containers
            .iter()
            .map(|c| {
                let asks: Vec<String> = c.requests.iter().map(|(r, n)| format!("{r}={n}")).collect();
                (c.name.as_str(), asks.join(","))
            })
            .collect();
        assert_eq!(
            asks,
            [
                ("init", "nvidia.com/gpu=1".to_owned()),
                ("main", "nvidia.com/gpu.shared=2".to_owned()),
                ("side", String::new())
            ]
        );
        assert_eq!(pod.labels, [("app".to_owned(), "x".to_owned())]);
        assert_eq!(pod.created_wall_ms, 1_767_225_601_000);
    }

    #[test]
    fn a_pod_waits_until_the_kubelet_takes_it_up() {
        for (status, stage) in [
            (json!({"phase": "Pending"}), Stage::Waiting),
            (json!({}), Stage::Waiting),
            (json!({"phase": "Pending", "startTime": "2026-01-01T00:00:02Z"}), Stage::Admitted),
            (json!({"phase": "Running"}), Stage::Admitted),
            (json!({"phase": "Succeeded"}), Stage::Finished),
            (json!({"phase": "Failed"}), Stage::Finished),
        ] {
            let mut json = plain();
            json["status"] = status.clone();
            assert_eq!(pod(json).stage, stage, "{status}");
        }
    }

    #[test]
    fn a_pod_leaves_since_its_deletion_was_requested_not_since_its_grace_period_ended() {
        let mut json = plain();
        json["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:31Z");
        json["metadata"]["deletionGracePeriodSeconds"] = json!(30);
        let pod = pod(json);
        assert_eq!(pod.deletion_wall_ms, Some(pod.created_wall_ms));
    }

    #[test]
    fn a_mirror_pod_has_the_uid_of_its_static_pod_in_the_kubelet() {
        let mut json = plain();
        json["metadata"]["annotations"] = json!({MIRROR: "hash"});
        let pod = pod(json);
        assert_eq!(pod.uid, "hash");
        assert!(pod.is_static);
    }

    #[test]
    fn an_annotation_with_the_uid_of_another_pod_is_ignored() {
        let mut json = plain();
        json["metadata"]["annotations"] = json!({MIRROR: "11111111-2222-3333-4444-555555555555"});
        let pod = pod(json);
        assert_eq!(pod.uid, "u-1");
        assert!(!pod.is_static);
    }

    #[test]
    fn pods_that_reach_gpus_without_an_allocation_are_recognised() {
        let with = |container: serde_json::Value| {
            let mut json = plain();
            json["spec"]["containers"][0] = container;
            pod(json).bypass
        };
        let env = |value| json!({"name": "c", "env": [{"name": VISIBLE_DEVICES, "value": value}]});
        let names = Some(PodBypass { kind: BypassKind::NamesGpus, container: "c".into() });
        assert_eq!(with(env("all")), names);
        assert_eq!(with(env("void")), None);
        let elsewhere = json!({"name": "c", "env": [{"name": VISIBLE_DEVICES, "valueFrom": {}}]});
        assert_eq!(with(elsewhere), names);
        let privileged = json!({"name": "c", "securityContext": {"privileged": true}});
        assert_eq!(with(privileged), Some(PodBypass { kind: BypassKind::Privileged, container: "c".into() }));
        let mounts = |path| json!({"name": "c", "volumeMounts": [{"name": "v", "mountPath": path}]});
        let mounted = mounts("/var/run//nvidia-container-devices/all");
        assert_eq!(with(mounted), Some(PodBypass { kind: BypassKind::MountsGpus, container: "c".into() }));
        assert_eq!(with(mounts("/var/run/nvidia")), None);
        let takes =
            |prefix| json!({"name": "c", "envFrom": [{"prefix": prefix, "configMapRef": {"name": "m"}}]});
        assert_eq!(
            with(takes("NVIDIA_")),
            Some(PodBypass { kind: BypassKind::ImportsVariables, container: "c".into() })
        );
        for prefix in ["", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_", "APP_"] {
            assert_eq!(with(takes(prefix)), None, "{prefix}");
        }
        assert_eq!(with(json!({"name": "c", "envFrom": [{"secretRef": {"name": "s"}}]})), None);
        // A variable in `env` overrides those of `envFrom`.
        let mut own = takes("NVIDIA_");
        own["env"] = json!([{"name": VISIBLE_DEVICES, "value": "void"}]);
        assert_eq!(with(own), None);
        // The plainest bypass is reported, whichever container has it.
        let mut json = plain();
        json["spec"]["initContainers"][0] = takes("NVIDIA_");
        json["spec"]["containers"][1] = env("all");
        assert_eq!(pod(json).bypass, names);
        assert_eq!(with(json!({"name": "c"})), None);
    }
}
