//! The CDI specification as a document (CDI SPEC.md, version 1.1): as far as Berth writes and compares it.

use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Largest specification that is read, bytes. One of 16 GPUs with 7 MIG instances each, under two names, has less than
/// 200 KiB.
pub const SPEC_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// A specification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// The version of the format.
    pub cdi_version: String,
    /// `vendor/class`.
    pub kind: String,
    /// Its devices.
    #[serde(default)]
    pub devices: Vec<Device>,
    /// What a container with any of the devices gets.
    #[serde(default, skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// A device, with what a container with it gets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Its name: a container is given `kind=name`.
    pub name: String,
    /// What the container gets.
    #[serde(default)]
    pub container_edits: ContainerEdits,
}

/// Changes of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerEdits {
    /// Variables, `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Bind mounts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Programs of the host that the runtime runs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<OciHook>,
    /// Further groups of the container's process.
    #[serde(rename = "additionalGids", skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
}

impl ContainerEdits {
    /// Whether nothing is changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A device node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceNode {
    /// Path in the container.
    pub path: String,
    /// Path on the host, if it differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// Major number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<u32>,
    /// Minor number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// Permission bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Letters of `rwm`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// Group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A bind mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Mount {
    /// Path on the host.
    pub host_path: String,
    /// Path in the container.
    pub container_path: String,
    /// Mount options.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// A program of the host that the runtime runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OciHook {
    /// When it runs, such as `createContainer`.
    pub hook_name: String,
    /// The program's path on the host.
    pub path: String,
    /// Its arguments, with its name as the first one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Its environment.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
}

/// A specification cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be read.
    #[error("{0} cannot be read")]
    File(PathBuf, #[source] io::Error),
    /// It is not a CDI specification in JSON or YAML.
    #[error("{0} is not a CDI specification: {1}")]
    Format(PathBuf, String),
}

impl Spec {
    /// Reads a specification in JSON or YAML.
    ///
    /// # Errors
    /// If the file cannot be read or is not a specification.
    pub fn read(path: &Path) -> Result<Self, ReadError> {
        let text =
            berth_files::read_text(path, SPEC_BYTES_MAX).map_err(|e| ReadError::File(path.into(), e))?;
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        let spec = if is_json {
            serde_json::from_str(&text).map_err(|error| error.to_string())
        } else {
            berth_files::yaml::from_str(&text).map_err(|error| error.to_string())
        };
        spec.map_err(|error| ReadError::Format(path.into(), error))
    }

    /// All edits: those of any device first, then those of each device.
    pub fn all_edits(&self) -> impl Iterator<Item = &ContainerEdits> {
        std::iter::once(&self.container_edits)
            .chain(self.devices.iter().map(|device| &device.container_edits))
    }

    /// The least version of the format that has everything that this specification uses, so that the oldest runtimes
    /// read it (CDI SPEC.md, "Released versions"). Berth uses no annotations and no newer fields.
    #[must_use]
    pub fn least_version(&self) -> &'static str {
        let has_gids = self.all_edits().any(|edits| !edits.additional_gids.is_empty());
        let has_host_path =
            self.all_edits().flat_map(|edits| &edits.device_nodes).any(|node| node.host_path.is_some());
        let starts_with_digit =
            self.devices.iter().any(|device| device.name.starts_with(|c: char| c.is_ascii_digit()));
        if has_gids {
            "0.7.0"
        } else if has_host_path || starts_with_digit {
            "0.5.0"
        } else {
            "0.3.0"
        }
    }

    /// Brings devices, nodes and mounts into the order of nvidia-ctk: devices by name, the others by the depth of their
    /// path in the container, then by the path. A folder is so mounted before what lies in it.
    pub fn sort(&mut self) {
        fn by_depth(path: &str) -> (usize, String) {
            (path.matches('/').count(), path.to_owned())
        }
        self.devices.sort_by(|a, b| a.name.cmp(&b.name));
        let devices = self.devices.iter_mut().map(|device| &mut device.container_edits);
        for edits in std::iter::once(&mut self.container_edits).chain(devices) {
            edits.device_nodes.sort_by_key(|node| by_depth(&node.path));
            edits.mounts.sort_by_key(|mount| by_depth(&mount.container_path));
        }
    }

    /// The document.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Writes the document: first into a temporary file, which is renamed, so that no runtime reads half of it. The
    /// temporary file's name has no extension of a specification.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)?;
        let draft = path.with_extension("new");
        // A draft that an earlier process left may be a link.
        let _ = fs::remove_file(&draft);
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(&draft)?;
        let written = file.write_all(self.to_json().as_bytes()).and_then(|()| fs::rename(&draft, path));
        if written.is_err() {
            let _ = fs::remove_file(&draft);
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str) -> Device {
        Device { name: name.into(), ..Device::default() }
    }

    fn node(path: &str, host_path: Option<&str>) -> DeviceNode {
        DeviceNode { path: path.into(), host_path: host_path.map(Into::into), ..DeviceNode::default() }
    }

    #[test]
    fn the_version_is_the_least_that_is_needed() {
        let mut spec = Spec { devices: vec![device("GPU-1")], ..Spec::default() };
        assert_eq!(spec.least_version(), "0.3.0");
        spec.devices.push(device("0"));
        assert_eq!(spec.least_version(), "0.5.0");
        spec.devices.pop();
        spec.container_edits.device_nodes = vec![node("/dev/nvidia0", Some("/driver/dev/nvidia0"))];
        assert_eq!(spec.least_version(), "0.5.0");
        spec.devices[0].container_edits.additional_gids = vec![44];
        assert_eq!(spec.least_version(), "0.7.0");
    }

    #[test]
    fn a_folder_comes_before_what_lies_in_it() {
        let mount = |path: &str| Mount { container_path: path.into(), ..Mount::default() };
        let edits = ContainerEdits {
            mounts: vec![mount("/a/b/c"), mount("/z"), mount("/a/b")],
            device_nodes: vec![node("/dev/nvidia-caps/nvidia-cap1", None), node("/dev/nvidia0", None)],
            ..ContainerEdits::default()
        };
        let mut spec =
            Spec { devices: vec![device("b"), device("a")], container_edits: edits, ..Spec::default() };
        spec.sort();
        let paths: Vec<_> = spec.container_edits.mounts.iter().map(|m| m.container_path.as_str()).collect();
        assert_eq!(paths, ["/z", "/a/b", "/a/b/c"]);
        assert_eq!(spec.container_edits.device_nodes[0].path, "/dev/nvidia0");
        assert_eq!(spec.devices[0].name, "a");
    }

    #[test]
    fn a_specification_is_written_as_a_whole_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cdi/x.json");
        let mut spec = Spec { kind: "berth/gpu".into(), devices: vec![device("GPU-1")], ..Spec::default() };
        spec.cdi_version = spec.least_version().into();
        spec.write(&path).unwrap();
        assert_eq!(Spec::read(&path).unwrap(), spec);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no draft is left");
        let yaml = folder.path().join("x.yaml");
        fs::write(&yaml, berth_files::yaml::to_string(&spec).unwrap()).unwrap();
        assert_eq!(Spec::read(&yaml).unwrap(), spec);
        fs::write(&yaml, "kind: [").unwrap();
        assert!(Spec::read(&yaml).unwrap_err().to_string().contains("is not a CDI specification"));
    }
}
