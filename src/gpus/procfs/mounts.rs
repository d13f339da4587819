//! `/proc/PID/mountinfo`: which container of its pod a process is in. Pure.
//!
//! The kubelet mounts a file for the termination message into each container, at `/dev/termination-log` unless the pod
//! sets another path, from `<kubelet>/pods/<UID>/containers/<NAME>/<random>`; that path is the root of the bind mount
//! (kubelet 1.36, `makeMounts` in `pkg/kubelet/kuberuntime`). No other file of the container has its name.

use std::collections::BTreeSet;

/// The container's name; `None` if no mount has one, or several have different ones.
pub(super) fn container(text: &str, pod_uid: &str) -> Option<String> {
    // Field 4 is the root of the mount within its file system (`man 5 proc_pid_mountinfo`).
    let roots = text.lines().filter_map(|line| line.split(' ').nth(3));
    let names: BTreeSet<&str> = roots.filter_map(|root| container_name(root, pod_uid)).collect();
    match names.len() {
        1 => names.first().map(|name| (*name).to_owned()),
        _ => None,
    }
}

/// The container's name in the root of a mount of this pod.
fn container_name<'t>(root: &'t str, pod_uid: &str) -> Option<&'t str> {
    let mut last = root.rsplit('/');
    let (_random, name, containers) = (last.next()?, last.next()?, last.next()?);
    let (uid, pods) = (last.next()?, last.next()?);
    (pods == "pods" && uid == pod_uid && containers == "containers" && !name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "3f0c8f5e-7f5b-4a53-a0c8-4a34d0f0b6a1";

    fn line(root: &str, at: &str) -> String {
        format!("812 790 259:1 {root} {at} rw,relatime - ext4 /dev/nvme0n1p1 rw\n")
    }

    #[test]
    fn the_termination_log_has_the_name_of_the_container() {
        let log = |folder: &str, uid: &str, name: &str| {
            line(&format!("{folder}/pods/{uid}/containers/{name}/1f2e3d4c"), "/dev/termination-log")
        };
        let hosts = line(&format!("/var/lib/kubelet/pods/{UID}/etc-hosts"), "/etc/hosts");
        let volume = line(&format!("/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~empty-dir/x"), "/x");
        for (text, name) in [
            (log("/var/lib/kubelet", UID, "trainer"), Some("trainer")),
            // The kubelet's folder is the root of a file system.
            (log("", UID, "trainer"), Some("trainer")),
            (hosts.clone() + &volume + &log("/data/kubelet", UID, "a"), Some("a")),
            (log("/var/lib/kubelet", UID, "a") + &log("/var/lib/kubelet", UID, "a"), Some("a")),
            (log("/var/lib/kubelet", UID, "a") + &log("/var/lib/kubelet", UID, "b"), None),
            (log("/var/lib/kubelet", "another", "a"), None),
            (hosts + &volume, None),
            (line("/", "/") + &line("/pods", "/p"), None),
            (String::new(), None),
            ("nonsense\n".to_owned(), None),
        ] {
            assert_eq!(container(&text, UID).as_deref(), name, "{text}");
        }
    }
}
