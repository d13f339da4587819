//! `/proc/PID/cgroup`: which pod and which container a process is in. Pure.
//!
//! The kubelet creates a cgroup for each pod, and the container runtime one for each container in it
//! (kubelet 1.36, `pkg/kubelet/cm/cgroup_manager_linux.go`):
//!
//! | cgroup driver | pod | container |
//! |---|---|---|
//! | systemd | `kubepods-burstable-pod<UID, _ for ->.slice` | `cri-containerd-<id>.scope`, `crio-<id>.scope` |
//! | cgroupfs | `kubepods/burstable/pod<UID>` | `<id>`, `crio-<id>` |
//!
//! Pods of QoS class Guaranteed lack the middle part. A runtime configured for cgroupfs under a kubelet configured for
//! systemd creates `kubepods-burstable-pod<UID>.slice:cri-containerd:<id>`. For a reader in a cgroup namespace of its
//! own, paths are relative to that: `/../../kubepods-...`.

use berth_kernel::hardware::process::{Owner, PodProcess, UnknownReason};

/// The owner of a process, by its `cgroup` file: a line for each hierarchy, `0::PATH` in v2, `N:names:PATH` in v1. The
/// pod may be in any of them.
pub(super) fn owner(text: &str) -> Owner {
    let paths = || text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    if let Some(pod) = paths().find_map(pod) {
        return Owner::Pod(pod);
    }
    if paths().next().is_none() {
        return Owner::Unknown(UnknownReason::Unreadable);
    }
    let container_id = paths().find_map(|path| parts(path).find_map(|part| long_id(part)));
    Owner::NoPod { container_id: container_id.map(String::from) }
}

/// The pod of a path. The outermost counts: cgroups below it may be created and named by its own processes.
fn pod(path: &str) -> Option<PodProcess> {
    let mut before = "";
    let mut rest = parts(path);
    while let Some(part) = rest.next() {
        // `a.slice:cri-containerd:id` has pod and container in one part.
        let (name, inside) = part.split_once(':').map_or((part, None), |(name, rest)| (name, Some(rest)));
        if let Some(uid) = by_systemd(name).or_else(|| by_cgroupfs(name, before)) {
            let container = inside.or_else(|| rest.next());
            return Some(PodProcess {
                uid,
                container_id: container.and_then(container_id).map(String::from),
                container: None,
            });
        }
        before = part;
    }
    None
}

fn parts(path: &str) -> impl Iterator<Item = &str> {
    // The kernel appends it for a process that outlives its cgroup.
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    path.split('/').filter(|part| !part.is_empty())
}

/// The pod UID of `kubepods-burstable-pod<UID>.slice`. In systemd `-` means nesting, so the kubelet replaces it by `_`.
fn by_systemd(name: &str) -> Option<String> {
    let (above, last) = name.strip_suffix(".slice")?.rsplit_once('-')?;
    // `--cgroup-root` adds a prefix.
    above.split('-').any(|word| word == "kubepods").then_some(())?;
    let uid = last.strip_prefix("pod")?.replace('_', "-");
    is_uid(&uid).then_some(uid)
}

/// The pod UID of `pod<UID>` below `kubepods`, or below `..` where the cgroup namespace hides the path above it.
fn by_cgroupfs(name: &str, above: &str) -> Option<String> {
    let uid = name.strip_prefix("pod")?;
    let below_kubepods = ["kubepods", "burstable", "besteffort"].contains(&above);
    // `podman` is not a pod.
    let certain = below_kubepods || (above == ".." && uid.len() >= 32);
    (certain && is_uid(uid)).then(|| uid.to_owned())
}

/// Whether the text can be a UID: a UUID, the 32 hex digits of a static pod, or the UID in a static pod's manifest.
fn is_uid(text: &str) -> bool {
    /// Longest UID that is accepted; a UUID has 36 characters.
    const MAX: usize = 64;
    !text.is_empty() && text.len() <= MAX && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// The container id: the hex digits at the end of a container's cgroup name.
fn container_id(name: &str) -> Option<&str> {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let id = name.rsplit(['-', ':']).next()?;
    let hex = id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    (hex && (12..=64).contains(&id.len())).then_some(id)
}

/// The container id outside of pods, where a short name could be anything.
fn long_id(name: &str) -> Option<&str> {
    container_id(name).filter(|id| id.len() == 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "3f0c8f5e-7f5b-4a53-a0c8-4a34d0f0b6a1";
    const FLAT: &str = "3f0c8f5e_7f5b_4a53_a0c8_4a34d0f0b6a1";
    const STATIC: &str = "00112233445566778899aabbccddeeff";
    const ID: &str = "8b1a9953c4611296a827abf8c47804d78b1a9953c4611296a827abf8c47804d7";

    fn in_pod(text: &str) -> Option<(String, Option<String>)> {
        match owner(text) {
            Owner::Pod(pod) => Some((pod.uid, pod.container_id)),
            Owner::NoPod { .. } | Owner::Unknown(_) => None,
        }
    }

    #[test]
    fn every_spelling_of_a_pods_cgroup_is_read() {
        for (path, uid) in [
            (
                format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{FLAT}.slice/cri-containerd-{ID}.scope"
                ),
                UID,
            ),
            (
                format!(
                    "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{FLAT}.slice/crio-{ID}.scope"
                ),
                UID,
            ),
            (format!("/kubepods.slice/kubepods-pod{FLAT}.slice/docker-{ID}.scope"), UID),
            (format!("/kubepods.slice/kubepods-pod{FLAT}.slice/crio-{ID}.scope/container"), UID),
            (
                format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope"
                ),
                STATIC,
            ),
            (
                format!(
                    "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{FLAT}.slice/cri-containerd-{ID}.scope"
                ),
                UID,
            ),
            (
                format!(
                    "/docker/{ID}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{FLAT}.slice/cri-containerd-{ID}.scope"
                ),
                UID,
            ),
            (format!("/kubepods/burstable/pod{UID}/{ID}"), UID),
            (format!("/kubepods/besteffort/pod{UID}/crio-{ID}"), UID),
            (format!("/kubepods/pod{UID}/{ID}"), UID),
            (format!("/kubepods/pod{STATIC}/{ID}"), STATIC),
            (format!("/kubepods/burstable/podmine/{ID}"), "mine"),
            (format!("/kubelet/kubepods/burstable/pod{UID}/{ID}"), UID),
            (format!("/kubepods-burstable-pod{FLAT}.slice:cri-containerd:{ID}"), UID),
            (
                format!(
                    "/system.slice/containerd.service/kubepods-besteffort-pod{FLAT}.slice:cri-containerd:{ID}"
                ),
                UID,
            ),
            // From within a cgroup namespace.
            (format!("/../../kubepods-burstable-pod{FLAT}.slice/cri-containerd-{ID}.scope"), UID),
            (format!("/../../../kubepods-pod{FLAT}.slice/cri-containerd-{ID}.scope"), UID),
            (format!("/../../pod{UID}/{ID}"), UID),
            (format!("/../../../besteffort/pod{UID}/{ID}"), UID),
            // Cgroups that a container creates below its own are ignored.
            (format!("/kubepods/pod{UID}/{ID}/kubepods/podother/{}", ID.replace('8', "9")), UID),
            (format!("/kubepods.slice/kubepods-pod{FLAT}.slice/cri-containerd-{ID}.scope/init.scope"), UID),
            (format!("/kubepods/pod{UID}/{ID} (deleted)"), UID),
        ] {
            for text in [
                format!("0::{path}\n"),
                format!("12:devices:{path}\n11:cpu,cpuacct:{path}\n1:name=systemd:{path}\n"),
                format!("12:devices:/\n1:name=systemd:{path}\n0::/system.slice/containerd.service\n"),
            ] {
                assert_eq!(in_pod(&text), Some((uid.into(), Some(ID.into()))), "{text}");
            }
        }
        let (uid, container) = in_pod(&format!("0::/kubepods/pod{UID}\n")).unwrap();
        assert_eq!((uid.as_str(), container), (UID, None), "the pod's own cgroup");
        let (_, container) = in_pod(&format!("0::/kubepods/pod{UID}/sandbox\n")).unwrap();
        assert_eq!(container, None, "not every name is an id");
    }

    #[test]
    fn a_process_outside_of_pods_is_assigned_to_none() {
        for (text, container) in [
            ("0::/\n".to_owned(), None),
            ("0::/user.slice/user-1000.slice/session-3.scope\n".into(), None),
            ("0::/../../../../system.slice/nvidia-persistenced.service\n".into(), None),
            (format!("0::/docker/{ID}\n"), Some(ID)),
            (format!("0::/system.slice/docker-{ID}.scope\n"), Some(ID)),
            (format!("0::/machine.slice/libpod-{ID}.scope/container\n"), Some(ID)),
            ("0::/system.slice/podman.service\n".into(), None),
            ("0::/../podman\n".into(), None),
            ("0::/podthing/x\n".into(), None),
            ("0::/kubepods.slice\n".into(), None),
            (format!("0::/user.slice/user-pod{FLAT}.slice\n"), None),
            (format!("0::/kubepods.slice/kubepods-pod{}.slice\n", "x".repeat(65)), None),
            ("0::/kubepods/pod\n".into(), None),
        ] {
            let expected = Owner::NoPod { container_id: container.map(String::from) };
            assert_eq!(owner(&text), expected, "{text}");
        }
        for text in ["", "\n", "nonsense"] {
            assert_eq!(owner(text), Owner::Unknown(UnknownReason::Unreadable), "{text:?}");
        }
    }
}
