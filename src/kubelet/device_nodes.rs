//! Device nodes of parts, for runtimes without NVIDIA's hook.

use super::wire::v1beta1::DeviceSpec;
use berth_kernel::gpu::Part;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The driver's table of MIG capabilities, one `name minor` pair per line.
const MIG_MINORS: &str = "/proc/driver/nvidia-caps/mig-minors";
/// Where the chart mounts the host's driver root, as NVIDIA's chart does: the host's path does not
/// exist inside the daemon's container.
const MOUNTED_ROOT: &str = "/driver-root";
/// Device nodes that every CUDA process opens, passed if they exist on the host.
const CONTROL_NODES: [&str; 4] =
    ["dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-uvm-tools", "dev/nvidia-modeset"];

/// The device nodes of the parts' GPUs, the control nodes, and the capabilities of MIG instances.
pub(super) fn device_nodes(parts: &[&Part], driver_root: &Path) -> Vec<DeviceSpec> {
    let any_instance = parts.iter().any(|part| part.mig.is_some());
    let caps = any_instance.then(|| fs::read_to_string(MIG_MINORS).unwrap_or_default());
    let device_root = device_root(driver_root, Path::new(MOUNTED_ROOT));
    nodes_under(parts, driver_root, device_root, &caps.unwrap_or_default())
}

/// The folder under which this process finds the host's device nodes: where the chart mounts the driver
/// root, else the driver root's own path, which is right outside a container. A driver root without a
/// `dev` folder uses the host's `/dev`.
fn device_root<'p>(driver_root: &'p Path, mounted: &'p Path) -> &'p Path {
    let has_dev = |root: &&Path| root.join("dev").is_dir();
    [mounted, driver_root].into_iter().find(has_dev).unwrap_or(Path::new("/"))
}

/// [`device_nodes`] with the folder that holds the device nodes and the table of MIG capabilities given.
fn nodes_under(parts: &[&Part], driver_root: &Path, device_root: &Path, caps: &str) -> Vec<DeviceSpec> {
    let mut paths: BTreeSet<String> = BTreeSet::new();
    let exists = |path: &str| device_root.join(path).exists();
    let control = CONTROL_NODES.iter().filter(|path| exists(path));
    paths.extend(control.map(|path| (*path).to_owned()));
    for part in parts {
        let minor = part.minor.unwrap_or(part.gpu_index);
        paths.insert(format!("dev/nvidia{minor}"));
        if let Some(mig) = &part.mig {
            let instance = format!("gpu{minor}/gi{}", mig.gpu_instance);
            for name in
                [format!("{instance}/access"), format!("{instance}/ci{}/access", mig.compute_instance)]
            {
                match cap_minor(caps, &name) {
                    Some(n) => drop(paths.insert(format!("dev/nvidia-caps/nvidia-cap{n}"))),
                    None => tracing::warn!(
                        instance = %part.id, name,
                        "the driver lists no such MIG capability in {MIG_MINORS}, so the container cannot open its MIG instance"
                    ),
                }
            }
        }
    }
    let spec = |path: String| DeviceSpec {
        container_path: format!("/{path}"),
        host_path: driver_root.join(&path).to_string_lossy().into_owned(),
        permissions: "rw".to_owned(),
    };
    paths.into_iter().map(spec).collect()
}

/// The minor number of a capability, from the driver's table of `name minor` lines.
fn cap_minor(table: &str, name: &str) -> Option<u32> {
    let mut lines = table.lines().filter_map(|line| line.split_once(' '));
    let (_, minor) = lines.find(|(found, _)| *found == name)?;
    minor.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{cap_minor, device_root, nodes_under};
    use berth_kernel::gpu::{Mig, Part};
    use berth_kernel::names::PartId;
    use std::collections::BTreeMap;
    use std::path::Path;

    fn instance() -> Part {
        Part {
            id: PartId::parse("MIG-1").unwrap(),
            parent: PartId::parse("GPU-1").ok(),
            vendor: "nvidia".into(),
            model: "test".into(),
            gpu_index: 0,
            minor: Some(3),
            memory_mib: 1000,
            pci_bus: String::new(),
            numa_node: None,
            mig_enabled: false,
            mig: Some(Mig { profile: "1g.10gb".into(), gpu_instance: 7, compute_instance: 0 }),
            attributes: BTreeMap::new(),
        }
    }

    #[test]
    fn control_nodes_are_found_under_the_mount_and_named_by_their_host_path() {
        let folder = tempfile::tempdir().unwrap();
        let (mounted, host) = (folder.path().join("driver-root"), Path::new("/run/nvidia/driver"));
        let gpu = Part { parent: None, mig: None, ..instance() };
        let nodes = |mounted: &Path| -> Vec<_> {
            let nodes = nodes_under(&[&gpu], host, device_root(host, mounted), "");
            nodes.into_iter().map(|node| (node.container_path, node.host_path)).collect()
        };
        let node = |name: &str| (format!("/dev/{name}"), format!("/run/nvidia/driver/dev/{name}"));
        std::fs::create_dir_all(mounted.join("dev")).unwrap();
        assert_eq!(nodes(&mounted), [node("nvidia3")]);
        for name in ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"] {
            std::fs::write(mounted.join("dev").join(name), "").unwrap();
        }
        let expected = ["nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidia3", "nvidiactl"].map(node);
        assert_eq!(nodes(&mounted), expected);
        // Outside a container the driver root itself is used, or the machine's /dev.
        assert_eq!(device_root(&mounted, Path::new("/nowhere")), mounted);
        assert_eq!(device_root(Path::new("/nowhere"), Path::new("/nowhere")), Path::new("/"));
    }

    #[test]
    fn a_mig_instance_gets_its_gpu_node_and_its_two_capabilities() {
        let table = "config 1\nmonitor 2\ngpu3/gi7/access 12\ngpu3/gi7/ci0/access 13\ngpu3/gi8/access 21\n";
        let part = instance();
        let nodes = nodes_under(&[&part], Path::new("/nowhere"), Path::new("/nowhere"), table);
        let paths: Vec<_> =
            nodes.iter().map(|n| (n.container_path.as_str(), n.permissions.as_str())).collect();
        let caps = [("/dev/nvidia-caps/nvidia-cap12", "rw"), ("/dev/nvidia-caps/nvidia-cap13", "rw")];
        assert_eq!(paths, [caps[0], caps[1], ("/dev/nvidia3", "rw")]);
        assert_eq!(nodes[0].host_path, "/nowhere/dev/nvidia-caps/nvidia-cap12");
    }

    #[test]
    fn a_capability_is_found_by_its_whole_name() {
        let table = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi10/access 99\n";
        assert_eq!(cap_minor(table, "gpu0/gi1/access"), Some(12));
        assert_eq!(cap_minor(table, "gpu0/gi1/ci0/access"), Some(13));
        assert_eq!(cap_minor(table, "gpu0/gi2/access"), None);
        assert_eq!(cap_minor("", "gpu0/gi1/access"), None);
    }
}
