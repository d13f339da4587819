//! The kubelet's own record of device holders: `kubelet_internal_checkpoint`.
//!
//! Its format is internal and has no version. So only entries of Berth's resources are parsed, unknown
//! fields are ignored, and anything else unexpected is an error. No content is logged, since other
//! plugins' responses may contain secrets.

use super::convert::allocation_key;
pub use super::folder::CHECKPOINT_FILE;
use super::folder::FileId;
use super::socket_path::permission_advice;
use super::wire::v1beta1::ContainerAllocateResponse;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use berth_kernel::evidence::kubelet_view::CheckpointEntry;
use berth_kernel::evidence::pods::{PodBypass, VISIBLE_DEVICES};
use berth_kernel::grants::annotation::{self, GrantAnnotation};
use berth_kernel::grants::bypass::{Allocated, cdi_devices, is_gpu};
use berth_kernel::ids::names::{AllocationId, DeviceId, Resource};
use prost::Message;
use rustix::fs::{Mode, OFlags};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The most bytes that are read. A node of 250 pods with ten resources each and 16 KiB per response
/// needs 40 MiB.
pub const CHECKPOINT_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// The parsed checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    /// Entries of Berth's resources.
    pub entries: Vec<CheckpointEntry>,
    /// The number of entries of Berth's resources whose ids only another plugin can have listed.
    pub foreign: usize,
    /// Changes with each write of the kubelet.
    pub file: FileId,
}

/// What to do about a read that the system denies.
fn advice(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => format!(" ({})", permission_advice()),
        _ => String::new(),
    }
}

/// Why the checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// It does not exist: no device plugin has registered with this kubelet yet.
    #[error("there is no checkpoint at {path}")]
    Missing {
        /// Its expected path.
        path: PathBuf,
    },
    /// It could not be opened or read.
    #[error("cannot read the kubelet's checkpoint at {path}{}", advice(source))]
    Io {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// It is a link, a folder or a pipe, which no kubelet writes.
    #[error("the kubelet's checkpoint at {path} is not a regular file")]
    NotAFile {
        /// Its path.
        path: PathBuf,
    },
    /// It is larger than [`CHECKPOINT_BYTES_MAX`].
    #[error(
        "the kubelet's checkpoint at {path} has {bytes} bytes; at most {} are read",
        CHECKPOINT_BYTES_MAX
    )]
    TooLarge {
        /// Its path.
        path: PathBuf,
        /// Its size in bytes.
        bytes: u64,
    },
    /// It is not in the format that this release knows.
    #[error("the kubelet's checkpoint at {path} is not in the format that this release knows ({detail})")]
    Format {
        /// Its path.
        path: PathBuf,
        /// What is unexpected; never the content.
        detail: String,
    },
}

/// Reads the checkpoint in this folder. Only entries of `resources` are parsed. `None` includes the
/// entries of all resources whose ids Berth may have listed: a GPU that a pod holds is in use, even if
/// it is offered under another resource now.
///
/// # Errors
/// If it does not exist, is not a regular file, is too large, or has an unknown format.
pub fn read(folder: &Path, resources: Option<&BTreeSet<Resource>>) -> Result<Checkpoint, CheckpointError> {
    let path = folder.join(CHECKPOINT_FILE);
    let (bytes, file) = read_file(&path)?;
    let format_error =
        |detail: &str| CheckpointError::Format { path: path.clone(), detail: detail.to_owned() };
    let parsed = Document::parse(&path, &bytes)?;
    let mut entries = Vec::new();
    let mut foreign = 0;
    for raw in parsed.data.pod_device_entries.unwrap_or_default() {
        let Ok(resource) = Resource::parse(&raw.resource_name) else {
            continue;
        };
        let is_requested = resources.map(|resources| resources.contains(&resource));
        if is_requested == Some(false) {
            continue;
        }
        match parse_entry(&raw, resource) {
            Ok(Some(entry)) => entries.push(entry),
            // Entries of other plugins may have any content, but no entry of a GPU may be ignored: the GPU,
            // although in use, could be granted again.
            Ok(None) | Err(_) if is_requested.is_none() && !names_gpus(&raw.resource_name) => {}
            Ok(None) => foreign += 1,
            Err(detail) => return Err(format_error(detail)),
        }
    }
    Ok(Checkpoint { entries, foreign, file })
}

/// What device plugins gave a container, of all resources.
///
/// # Errors
/// As [`read`], and if a response cannot be decoded; a checkpoint that does not exist gives nothing.
pub fn allocated_to(folder: &Path, pod_uid: &str, container: &str) -> Result<Allocated, CheckpointError> {
    let path = folder.join(CHECKPOINT_FILE);
    let bytes = match read_file(&path) {
        Ok((bytes, _)) => bytes,
        Err(CheckpointError::Missing { .. }) => return Ok(Allocated::default()),
        Err(error) => return Err(error),
    };
    let parsed = Document::parse(&path, &bytes)?;
    let mut allocated = Allocated::default();
    for raw in parsed.data.pod_device_entries.unwrap_or_default() {
        if raw.pod_uid == pod_uid && raw.container_name == container {
            let response = raw.response().ok_or_else(|| CheckpointError::Format {
                path: path.clone(),
                detail: format!("AllocResp of {} for container {container}", raw.resource_name),
            })?;
            add_response(&mut allocated, response);
        }
    }
    Ok(allocated)
}

/// Adds what one plugin allocated.
fn add_response(allocated: &mut Allocated, response: ContainerAllocateResponse) {
    let grants = response.annotations.iter().filter(|(key, _)| annotation::is_key(key));
    let granted = grants.filter_map(|(_, value)| GrantAnnotation::parse(value).ok());
    let parts: Vec<_> = granted.flat_map(|grant| grant.parts).map(|(part, _)| part).collect();
    let visible = response.envs.get(VISIBLE_DEVICES).cloned();
    let mounts: Vec<_> = response.mounts.into_iter().map(|mount| mount.container_path).collect();
    let mut cdi: Vec<_> = response.cdi_devices.into_iter().map(|device| device.name).collect();
    cdi.extend(cdi_devices(response.annotations.iter().map(|(key, value)| (key.as_str(), value.as_str()))));
    // The resource of a network card, for example, is no GPU.
    let has_gpus = visible.is_some()
        || mounts.iter().any(|target| PodBypass::mounts_gpus(target))
        || response.devices.iter().any(|node| node.host_path.contains("/nvidia"))
        || cdi.iter().any(|name| is_gpu(name));
    // An older release of Berth has no parts in its response.
    allocated.has_unknown_gpus |= parts.is_empty() && has_gpus;
    allocated.parts.extend(parts);
    allocated.visible_devices.extend(visible);
    allocated.mounts.extend(mounts);
    allocated.cdi_devices.extend(cdi);
}

/// The ids of the healthy devices of `resource` that its newest plugin listed, and the file that has them; `None` if
/// the kubelet has written none, or the checkpoint cannot be read.
pub(super) fn registered_ids(folder: &Path, resource: &Resource) -> Option<(Vec<String>, FileId)> {
    #[derive(Deserialize)]
    struct Document {
        #[serde(rename = "Data")]
        data: Data,
    }
    #[derive(Deserialize)]
    struct Data {
        /// Go writes `null` for none.
        #[serde(rename = "RegisteredDevices")]
        registered: Option<BTreeMap<String, Option<Vec<String>>>>,
    }
    let (bytes, file) = read_file(&folder.join(CHECKPOINT_FILE)).ok()?;
    let document: Document = serde_json::from_slice(&bytes).ok()?;
    Some((document.data.registered?.remove(resource.as_str())??, file))
}

/// Whether a resource has one of the usual names of NVIDIA GPUs.
fn names_gpus(resource: &str) -> bool {
    let nvidia_name = resource.strip_prefix("nvidia.com/");
    nvidia_name.is_some_and(|name| name.starts_with("gpu") || name.starts_with("mig-"))
}

/// Opens the file without following a link and without waiting for a pipe's writer.
fn read_file(path: &Path) -> Result<(Vec<u8>, FileId), CheckpointError> {
    let io_error = |source: io::Error| CheckpointError::Io { path: path.to_owned(), source };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = match opened {
        Ok(descriptor) => File::from(descriptor),
        Err(rustix::io::Errno::NOENT) => {
            return Err(CheckpointError::Missing { path: path.to_owned() });
        }
        Err(rustix::io::Errno::LOOP) => {
            return Err(CheckpointError::NotAFile { path: path.to_owned() });
        }
        Err(error) => return Err(io_error(error.into())),
    };
    let metadata = file.metadata().map_err(io_error)?;
    if !metadata.is_file() {
        return Err(CheckpointError::NotAFile { path: path.to_owned() });
    }
    let mut bytes = Vec::new();
    let limited = &mut (&file).take(CHECKPOINT_BYTES_MAX + 1);
    limited.read_to_end(&mut bytes).map_err(io_error)?;
    let read = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    if read > CHECKPOINT_BYTES_MAX {
        return Err(CheckpointError::TooLarge { path: path.to_owned(), bytes: metadata.len().max(read) });
    }
    Ok((bytes, FileId::of(&metadata)))
}

#[derive(Deserialize)]
struct Document<'a> {
    #[serde(rename = "Data", borrow)]
    data: Data<'a>,
}

impl<'a> Document<'a> {
    /// serde_json's messages contain field names, so only the position is kept.
    fn parse(path: &Path, bytes: &'a [u8]) -> Result<Self, CheckpointError> {
        serde_json::from_slice(bytes).map_err(|error| CheckpointError::Format {
            path: path.to_owned(),
            detail: format!("line {}, column {}", error.line(), error.column()),
        })
    }
}

#[derive(Deserialize)]
struct Data<'a> {
    /// Go writes `null` for none.
    #[serde(rename = "PodDeviceEntries", borrow)]
    pod_device_entries: Option<Vec<RawEntry<'a>>>,
}

/// An entry of any plugin; the raw fields are not parsed yet.
#[derive(Deserialize)]
struct RawEntry<'a> {
    #[serde(rename = "PodUID", borrow)]
    pod_uid: Cow<'a, str>,
    #[serde(rename = "ContainerName", borrow)]
    container_name: Cow<'a, str>,
    #[serde(rename = "ResourceName", borrow)]
    resource_name: Cow<'a, str>,
    #[serde(rename = "DeviceIDs", borrow)]
    device_ids: &'a RawValue,
    #[serde(rename = "AllocResp", borrow)]
    alloc_resp: Option<&'a RawValue>,
}

impl RawEntry<'_> {
    /// The plugin's response; `None` if it is not one.
    fn response(&self) -> Option<ContainerAllocateResponse> {
        let text: String = serde_json::from_str(self.alloc_resp?.get()).ok()?;
        ContainerAllocateResponse::decode(&*STANDARD.decode(text).ok()?).ok()
    }
}

/// Parses an entry of Berth's resources; `None` if Berth cannot have listed its ids.
fn parse_entry(raw: &RawEntry<'_>, resource: Resource) -> Result<Option<CheckpointEntry>, &'static str> {
    let by_numa: BTreeMap<String, Option<Vec<String>>> =
        serde_json::from_str(raw.device_ids.get()).map_err(|_| "DeviceIDs of an entry")?;
    let mut devices = BTreeSet::new();
    // An id with two NUMA nodes is contained twice.
    for text in by_numa.into_values().flatten().flatten() {
        let Ok(id) = DeviceId::parse(&text) else {
            return Ok(None);
        };
        devices.insert(id);
    }
    Ok(Some(CheckpointEntry {
        pod_uid: raw.pod_uid.clone().into_owned(),
        container: raw.container_name.clone().into_owned(),
        allocation: allocation_id(raw, &resource),
        resource,
        devices: devices.into_iter().collect(),
    }))
}

/// The allocation id in the response's environment; `None` for another plugin's response.
fn allocation_id(raw: &RawEntry<'_>, resource: &Resource) -> Option<AllocationId> {
    let response = raw.response()?;
    let id = response.envs.get(&allocation_key(resource))?;
    AllocationId::parse(id).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn resources() -> BTreeSet<Resource> {
        BTreeSet::from([Resource::parse("nvidia.com/gpu").unwrap()])
    }

    fn read_text(text: &str) -> Result<Checkpoint, CheckpointError> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(CHECKPOINT_FILE), text).unwrap();
        read(folder.path(), Some(&resources()))
    }

    fn response(key: &str, value: &str) -> String {
        let response = ContainerAllocateResponse {
            envs: [(key.to_owned(), value.to_owned())].into(),
            ..ContainerAllocateResponse::default()
        };
        STANDARD.encode(response.encode_to_vec())
    }

    fn entry_text(resource: &str, ids: &str, response: &str) -> String {
        format!(
            r#"{{"PodUID":"u1","ContainerName":"main","ResourceName":"{resource}","DeviceIDs":{ids},"AllocResp":"{response}"}}"#
        )
    }

    fn file(entries: &[String]) -> String {
        let entries = entries.join(",");
        format!(
            r#"{{"Data":{{"PodDeviceEntries":[{entries}],"RegisteredDevices":{{"nvidia.com/gpu":null}}}},"Checksum":1}}"#
        )
    }

    #[test]
    fn an_entry_of_berth_is_read_with_its_allocation_id() {
        let response = response("BERTH_ALLOCATION_ID_NVIDIA_COM_GPU", "000000ab-7");
        let ids = r#"{"0":["GPU-2","GPU-1"],"1":["GPU-2"]}"#;
        let checkpoint = read_text(&file(&[entry_text("nvidia.com/gpu", ids, &response)])).unwrap();
        let entry = &checkpoint.entries[0];
        assert_eq!((entry.pod_uid.as_str(), entry.container.as_str()), ("u1", "main"));
        let devices: Vec<String> = entry.devices.iter().map(ToString::to_string).collect();
        // An id with two NUMA nodes is one device.
        assert_eq!(devices, ["GPU-1", "GPU-2"]);
        assert_eq!(entry.allocation.unwrap().to_string(), "000000ab-7");
    }

    #[test]
    fn another_plugins_response_has_no_allocation_id() {
        let other = response("NVIDIA_VISIBLE_DEVICES", "GPU-1");
        for response in [other.as_str(), "", "!!! not base64"] {
            let text = entry_text("nvidia.com/gpu", r#"{"-1":["GPU-1"]}"#, response);
            let checkpoint = read_text(&file(&[text])).unwrap();
            assert_eq!(checkpoint.entries[0].allocation, None, "{response:?}");
        }
    }

    #[test]
    fn entries_of_other_resources_are_not_parsed() {
        let odd = entry_text("vendor.com/thing", r#"["not","a","map"]"#, "secret");
        let odder = entry_text("not a resource", "17", "secret");
        let checkpoint = read_text(&file(&[odd, odder])).unwrap();
        assert!(checkpoint.entries.is_empty());
        assert_eq!(checkpoint.foreign, 0);
    }

    #[test]
    fn entries_with_foreign_ids_are_counted() {
        let text = entry_text("nvidia.com/gpu", r#"{"-1":["a device"]}"#, "");
        assert_eq!(read_text(&file(&[text])).unwrap().foreign, 1);
    }

    #[test]
    fn without_a_resource_filter_no_entry_of_a_gpu_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let read_any = |entries: &[String]| {
            std::fs::write(folder.path().join(CHECKPOINT_FILE), file(entries)).unwrap();
            read(folder.path(), None)
        };
        for resource in ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"] {
            let malformed = entry_text(resource, r#"["GPU-1"]"#, "");
            assert!(matches!(read_any(&[malformed]), Err(CheckpointError::Format { .. })), "{resource}");
            let foreign = entry_text(resource, r#"{"-1":["a device"]}"#, "");
            assert_eq!(read_any(&[foreign]).unwrap().foreign, 1, "{resource}");
        }
        for resource in ["example.com/nic", "nvidia.com/hostdev"] {
            let malformed = entry_text(resource, r#"["GPU-1"]"#, "");
            let checkpoint = read_any(&[malformed]).unwrap();
            assert_eq!((checkpoint.entries.len(), checkpoint.foreign), (0, 0), "{resource}");
        }
    }

    #[test]
    fn an_unknown_format_is_an_error_without_the_content() {
        let malformed = entry_text("nvidia.com/gpu", r#"["GPU-1"]"#, "");
        for text in [
            "",
            "null",
            "{",
            "{\"Data\":[]}",
            "\u{0}secret",
            &file(&[malformed]),
            &file(&["{\"PodUID\":\"secret\"}".to_owned()]),
        ] {
            let error = read_text(text).unwrap_err();
            assert!(matches!(error, CheckpointError::Format { .. }), "{text:?}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn null_lists_and_unknown_fields_are_accepted() {
        let text = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null,"New":1},"V":2}"#;
        assert!(read_text(text).unwrap().entries.is_empty());
    }

    #[test]
    fn only_a_regular_file_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(CHECKPOINT_FILE);
        let error = || read(folder.path(), Some(&resources())).unwrap_err();
        assert!(matches!(error(), CheckpointError::Missing { .. }));
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, file(&[])).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(matches!(error(), CheckpointError::NotAFile { .. }));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(matches!(error(), CheckpointError::NotAFile { .. }));
        fs::remove_dir(&path).unwrap();
        // An ordinary open of a pipe without a writer would block.
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(matches!(error(), CheckpointError::NotAFile { .. }));
    }

    #[test]
    fn a_file_beyond_the_limit_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = fs::File::create(folder.path().join(CHECKPOINT_FILE)).unwrap();
        file.set_len(CHECKPOINT_BYTES_MAX + 1).unwrap();
        let error = read(folder.path(), Some(&resources())).unwrap_err();
        assert!(matches!(error, CheckpointError::TooLarge { .. }), "{error}");
    }
}
