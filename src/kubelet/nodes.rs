//! Device nodes of parts, for runtimes without a hook of NVIDIA's.

use super::wire::v1beta1::DeviceSpec;
use crate::kernel::gpu::Part;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The driver's table of MIG capabilities: a name and a minor number a line.
const MIG_MINORS: &str = "/proc/driver/nvidia-caps/mig-minors";
/// Device nodes that every CUDA process opens, passed where they are on the host.
const CONTROL_NODES: [&str; 4] =
    ["dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-uvm-tools", "dev/nvidia-modeset"];

/// Device nodes of the parts: the GPUs', the control nodes, and the capabilities of MIG instances.
pub(super) fn device_nodes(parts: &[&Part], driver_root: &Path) -> Vec<DeviceSpec> {
    let mut paths: BTreeSet<String> = BTreeSet::new();
    let there = |path: &str| driver_root.join(path).exists();
    let control = CONTROL_NODES.iter().filter(|path| there(path));
    paths.extend(control.map(|path| (*path).to_owned()));
    let caps = parts
        .iter()
        .any(|part| part.mig.is_some())
        .then(|| fs::read_to_string(MIG_MINORS).unwrap_or_default());
    for part in parts {
        let minor = part.minor.unwrap_or(part.gpu_index);
        paths.insert(format!("dev/nvidia{minor}"));
        if let (Some(mig), Some(caps)) = (&part.mig, &caps) {
            let instance = format!("gpu{minor}/gi{}", mig.gpu_instance);
            let wanted =
                [format!("{instance}/access"), format!("{instance}/ci{}/access", mig.compute_instance)];
            let nodes = wanted.iter().filter_map(|name| cap_minor(caps, name));
            paths.extend(nodes.map(|n| format!("dev/nvidia-caps/nvidia-cap{n}")));
        }
    }
    let spec = |path: String| DeviceSpec {
        container_path: format!("/{path}"),
        host_path: driver_root.join(&path).to_string_lossy().into_owned(),
        permissions: "rw".to_owned(),
    };
    paths.into_iter().map(spec).collect()
}

/// The minor number of a capability, by the driver's table of `name minor` lines.
fn cap_minor(table: &str, name: &str) -> Option<u32> {
    let mut lines = table.lines().filter_map(|line| line.split_once(' '));
    let (_, minor) = lines.find(|(found, _)| *found == name)?;
    minor.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::cap_minor;

    #[test]
    fn a_capability_is_found_by_its_whole_name() {
        let table = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi10/access 99\n";
        assert_eq!(cap_minor(table, "gpu0/gi1/access"), Some(12));
        assert_eq!(cap_minor(table, "gpu0/gi1/ci0/access"), Some(13));
        assert_eq!(cap_minor(table, "gpu0/gi2/access"), None);
        assert_eq!(cap_minor("", "gpu0/gi1/access"), None);
    }
}
