//! The device nodes of the NVIDIA driver that a container needs, by name, and where a process finds those of the host.

use crate::hardware::gpu::Part;
use std::path::{Path, PathBuf};

/// The driver's table of MIG capabilities, one `name minor` pair for each line.
pub const MIG_MINORS: &str = "/proc/driver/nvidia-caps/mig-minors";
/// Where the chart mounts the host's driver root, as NVIDIA's chart does: the host's path does not exist in the
/// daemon's container.
pub const MOUNTED_ROOT: &str = "/driver-root";
/// Nodes that every CUDA process opens.
pub const REQUIRED_NODES: [&str; 2] = ["dev/nvidiactl", "dev/nvidia-uvm"];
/// Nodes that some processes open, passed if they exist.
pub const OPTIONAL_NODES: [&str; 2] = ["dev/nvidia-uvm-tools", "dev/nvidia-modeset"];

/// A folder of the host, by its path on the host and by the path at which this process sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFolder {
    /// Its path for this process.
    pub seen: PathBuf,
    /// Its path on the host.
    pub host: PathBuf,
}

impl HostFolder {
    /// A folder with the same path for both.
    #[must_use]
    pub fn same(path: impl Into<PathBuf>) -> Self {
        let seen = path.into();
        Self { host: seen.clone(), seen }
    }

    /// A file in it, as a relative path, on the host and as this process sees it.
    #[must_use]
    pub fn join(&self, path: impl AsRef<Path>) -> Self {
        let path = path.as_ref();
        Self { seen: self.seen.join(path), host: self.host.join(path) }
    }
}

/// The nodes of one part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartNodes {
    /// Paths relative to the folder that holds `dev`: that of the GPU, and the capabilities of a MIG instance.
    pub paths: Vec<String>,
    /// Capabilities that the driver's table lacks, without which the container cannot open its MIG instance.
    pub unlisted: Vec<String>,
}

/// The nodes of a part; `capabilities` is the content of [`MIG_MINORS`]. None are known without its minor number: that
/// may differ from its index.
#[must_use]
pub fn part_nodes(part: &Part, capabilities: &str) -> PartNodes {
    let Some(minor) = part.minor else { return PartNodes::default() };
    let mut nodes = PartNodes { paths: vec![format!("dev/nvidia{minor}")], unlisted: Vec::new() };
    if let Some(mig) = &part.mig {
        let instance = format!("gpu{minor}/gi{}", mig.gpu_instance);
        for name in [format!("{instance}/access"), format!("{instance}/ci{}/access", mig.compute_instance)] {
            match capability_minor(capabilities, &name) {
                Some(n) => nodes.paths.push(format!("dev/nvidia-caps/nvidia-cap{n}")),
                None => nodes.unlisted.push(name),
            }
        }
    }
    nodes
}

/// The minor number of a capability, from the driver's table of `name minor` lines.
fn capability_minor(table: &str, name: &str) -> Option<u32> {
    let mut lines = table.lines().filter_map(|line| line.split_once(' '));
    let (_, minor) = lines.find(|(found, _)| *found == name)?;
    minor.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::gpu::Mig;
    use crate::ids::names::{GpuId, PartId};

    #[test]
    fn a_mig_instance_has_the_node_of_its_gpu_and_two_capabilities() {
        let table = "config 1\nmonitor 2\ngpu3/gi7/access 12\ngpu3/gi7/ci0/access 13\ngpu3/gi8/access 21\n";
        let instance = Part {
            id: PartId::parse("MIG-1").unwrap(),
            minor: Some(3),
            mig: Some(Mig { profile: "1g.10gb".into(), gpu_instance: 7, compute_instance: 0 }),
            ..Part::whole_gpu(GpuId::parse("GPU-1").unwrap(), 0)
        };
        let nodes = part_nodes(&instance, table);
        let caps = ["dev/nvidia-caps/nvidia-cap12", "dev/nvidia-caps/nvidia-cap13"];
        assert_eq!(nodes.paths, ["dev/nvidia3", caps[0], caps[1]]);
        assert!(nodes.unlisted.is_empty());
        let nodes = part_nodes(&instance, "gpu3/gi7/access 12\n");
        assert_eq!(nodes.unlisted, ["gpu3/gi7/ci0/access"]);
        let gpu = Part { mig: None, minor: None, gpu_index: 2, ..instance };
        assert_eq!(part_nodes(&gpu, table), PartNodes::default(), "no node is made up");
    }

    #[test]
    fn a_capability_is_found_by_its_whole_name() {
        let table = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi10/access 99\n";
        assert_eq!(capability_minor(table, "gpu0/gi1/access"), Some(12));
        assert_eq!(capability_minor(table, "gpu0/gi1/ci0/access"), Some(13));
        assert_eq!(capability_minor(table, "gpu0/gi2/access"), None);
        assert_eq!(capability_minor("", "gpu0/gi1/access"), None);
    }
}
