//! Device nodes of parts, for runtimes without NVIDIA's hook.

use super::wire::v1beta1::DeviceSpec;
use crate::edits::Edits;
use berth_kernel::hardware::device_nodes::{
    HostFolder, MIG_MINORS, OPTIONAL_NODES, REQUIRED_NODES, part_nodes,
};
use berth_kernel::hardware::gpu::Part;
use std::collections::BTreeMap;
use std::fs;

/// The nodes of some parts.
#[derive(Debug, Default)]
struct Nodes {
    /// Path on the host by path relative to `/`.
    found: BTreeMap<String, String>,
    /// Nodes that do not exist, and MIG capabilities that the driver does not list.
    missing: Vec<String>,
}

/// The device nodes of the parts' GPUs, the control nodes, and the capabilities of MIG instances.
pub(super) fn device_nodes(parts: &[&Part], edits: &Edits) -> Vec<DeviceSpec> {
    let nodes = find(parts, &edits.node_folders());
    let spec = |(path, host_path)| DeviceSpec {
        container_path: format!("/{path}"),
        host_path,
        permissions: "rw".to_owned(),
    };
    nodes.found.into_iter().map(spec).collect()
}

/// The device nodes that containers of these parts need and that do not exist, with the remedy; `None` if all exist.
#[must_use]
pub fn missing_nodes(parts: &[&Part], edits: &Edits) -> Option<String> {
    let folders = edits.node_folders();
    let missing = find(parts, &folders).missing;
    if missing.is_empty() {
        return None;
    }
    let searched: Vec<String> =
        folders.iter().map(|folder| folder.seen.join("dev").display().to_string()).collect();
    Some(format!(
        "device nodes that containers need do not exist: {} (searched in {}); run `nvidia-modprobe -u -c=0` on the node; in a \
         pod, set nvidiaDriverRoot, or nvidia.driverCapabilities to compute,utility",
        missing.join(", "),
        searched.join(", ")
    ))
}

/// The driver's table of MIG capabilities, read only where an instance needs it.
fn capabilities(parts: &[&Part]) -> String {
    let any_instance = parts.iter().any(|part| part.mig.is_some());
    if any_instance { fs::read_to_string(MIG_MINORS).unwrap_or_default() } else { String::new() }
}

fn find(parts: &[&Part], folders: &[HostFolder]) -> Nodes {
    let mut nodes = Nodes::default();
    let capabilities = capabilities(parts);
    let host_path = |path: &str| {
        let found = folders.iter().map(|folder| folder.join(path)).find(|node| node.seen.exists());
        found.map(|node| node.host.to_string_lossy().into_owned())
    };
    for path in REQUIRED_NODES.into_iter().chain(OPTIONAL_NODES) {
        match host_path(path) {
            Some(host) => drop(nodes.found.insert(path.to_owned(), host)),
            None if REQUIRED_NODES.contains(&path) => nodes.missing.push(format!("/{path}")),
            None => {}
        }
    }
    for part in parts {
        if part.minor.is_none() {
            nodes.missing.push(format!("that of GPU {} (NVML reports no minor number)", part.gpu_index));
        }
        let own = part_nodes(part, &capabilities);
        nodes.missing.extend(own.unlisted.iter().map(|name| format!("{name} in {MIG_MINORS}")));
        for path in own.paths {
            // Passed even if this process does not see it: without it the container starts without its GPU.
            let usual =
                || folders.first().map(|folder| folder.host.join(&path).to_string_lossy().into_owned());
            match host_path(&path) {
                Some(host) => drop(nodes.found.insert(path, host)),
                None => {
                    nodes.missing.push(format!("/{path}"));
                    nodes.found.extend(usual().map(|host| (path, host)));
                }
            }
        }
    }
    nodes.missing.sort();
    nodes.missing.dedup();
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::hardware::gpu::Mig;
    use berth_kernel::ids::names::GpuId;
    use std::path::Path;

    fn gpu() -> Part {
        Part { minor: Some(3), ..Part::whole_gpu(GpuId::parse("GPU-1").unwrap(), 0) }
    }

    fn create(folder: &Path, names: &[&str]) {
        std::fs::create_dir_all(folder.join("dev")).unwrap();
        for name in names {
            std::fs::write(folder.join("dev").join(name), "").unwrap();
        }
    }

    fn edits(folder: &Path) -> Edits {
        Edits {
            driver_root: "/run/nvidia/driver".into(),
            driver_root_in_container: folder.join("driver-root"),
            ..Edits::default()
        }
    }

    fn nodes(edits: &Edits, parts: &[&Part]) -> Vec<(String, String)> {
        device_nodes(parts, edits).into_iter().map(|node| (node.container_path, node.host_path)).collect()
    }

    #[test]
    fn nodes_are_found_under_the_mounted_driver_root_and_named_by_their_host_path() {
        let folder = tempfile::tempdir().unwrap();
        let edits = edits(folder.path());
        create(
            &edits.driver_root_in_container,
            &["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia3"],
        );
        let node = |name: &str| (format!("/dev/{name}"), format!("/run/nvidia/driver/dev/{name}"));
        let expected = ["nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidia3", "nvidiactl"].map(node);
        assert_eq!(nodes(&edits, &[&gpu()]), expected);
        assert_eq!(missing_nodes(&[&gpu()], &edits), None);
    }

    #[test]
    fn an_empty_folder_is_no_mounted_driver_root() {
        let folder = tempfile::tempdir().unwrap();
        let edits = edits(folder.path());
        std::fs::create_dir(&edits.driver_root_in_container).unwrap();
        assert_eq!(edits.driver_folder(), HostFolder::same("/run/nvidia/driver"));
    }

    #[test]
    fn the_device_root_comes_before_the_driver_root() {
        let folder = tempfile::tempdir().unwrap();
        let dev_root = folder.path().join("dev-root");
        let edits = Edits { dev_root: Some(dev_root.clone()), ..edits(folder.path()) };
        create(&dev_root, &["nvidia3", "nvidiactl"]);
        create(&edits.driver_root_in_container, &["nvidiactl", "nvidia-uvm"]);
        let own =
            |name: &str| (format!("/dev/{name}"), dev_root.join("dev").join(name).display().to_string());
        let uvm = ("/dev/nvidia-uvm".to_owned(), "/run/nvidia/driver/dev/nvidia-uvm".to_owned());
        assert_eq!(nodes(&edits, &[&gpu()]), [uvm, own("nvidia3"), own("nvidiactl")]);
    }

    #[test]
    fn a_device_root_that_is_not_mounted_has_the_nodes_of_the_container() {
        let folder = tempfile::tempdir().unwrap();
        let dev_root = folder.path().join("only-on-the-host");
        let edits = Edits { dev_root: Some(dev_root.clone()), ..edits(folder.path()) };
        let first = edits.node_folders().swap_remove(0);
        assert_eq!((first.seen.as_path(), first.host), (Path::new("/"), dev_root));
    }

    #[test]
    fn a_missing_node_is_named_with_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let edits = edits(folder.path());
        create(&edits.driver_root_in_container, &["nvidiactl"]);
        let part = Part {
            mig: Some(Mig { profile: "1g.10gb".into(), gpu_instance: 7, compute_instance: 0 }),
            minor: Some(77),
            ..gpu()
        };
        let text = missing_nodes(&[&part, &part], &edits).unwrap();
        for expected in [
            "/dev/nvidia-uvm,",
            "/dev/nvidia77,",
            "gpu77/gi7/access in ",
            "nvidia-modprobe",
            "driver-root/dev",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert!(!text.contains("/dev/nvidiactl"), "{text}");
        // Without the minor number there is no node to pass.
        let unknown = Part { minor: None, ..part.clone() };
        let text = missing_nodes(&[&unknown], &edits).unwrap();
        assert!(text.contains("that of GPU 0 (NVML reports no minor number)"), "{text}");
        let control = ("/dev/nvidiactl".to_owned(), "/run/nvidia/driver/dev/nvidiactl".to_owned());
        assert_eq!(nodes(&edits, &[&unknown]), [control]);
        // The node of the GPU is passed all the same, by its usual path on the host.
        let usual = ("/dev/nvidia77".to_owned(), "/run/nvidia/driver/dev/nvidia77".to_owned());
        assert!(nodes(&edits, &[&part]).contains(&usual));
    }
}
