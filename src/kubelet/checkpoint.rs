//! The kubelet's own record of who holds what: `kubelet_internal_checkpoint`.
//!
//! An internal format without a version, so: only entries of our resources are looked into,
//! unknown fields are passed over, what cannot be understood is an error and never a guess, and
//! none of it is logged, since other plugins' answers may hold secrets.

use super::convert::allocation_key;
use super::folder::FileId;
use super::wire::v1beta1::ContainerAllocateResponse;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use berth_kernel::names::{AllocationId, DeviceId, Resource};
use berth_kernel::reconcile::CheckpointEntry;
use prost::Message;
use rustix::fs::{Mode, OFlags};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The file's name inside `device-plugins/`.
pub const CHECKPOINT_FILE: &str = "kubelet_internal_checkpoint";
/// Most bytes that are read. A node of 250 pods with ten resources each and 16 KiB of answer for
/// each needs 40 MiB.
pub const CHECKPOINT_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// What the file said, and which file it was.
#[derive(Debug)]
pub struct Checkpoint {
    /// Entries of our resources.
    pub entries: Vec<CheckpointEntry>,
    /// Entries under our resource names with ids that can be nobody's but another plugin's.
    pub foreign: usize,
    /// Changes whenever the kubelet writes.
    pub file: FileId,
}

/// The checkpoint could not be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// There is none: this kubelet has not seen a device plugin yet.
    #[error("there is no checkpoint at {path}")]
    Missing {
        /// Where it would be.
        path: PathBuf,
    },
    /// It could not be opened or read.
    #[error("cannot read the kubelet's checkpoint at {path}")]
    Io {
        /// Where it is.
        path: PathBuf,
        /// The system's words.
        #[source]
        source: io::Error,
    },
    /// A link, a folder, a pipe: not what a kubelet writes.
    #[error("the kubelet's checkpoint at {path} is not a regular file")]
    NotAFile {
        /// Where it is.
        path: PathBuf,
    },
    /// More than is ever read.
    #[error("the kubelet's checkpoint at {path} has {bytes} bytes; at most {limit} are read")]
    TooLarge {
        /// Where it is.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Not the format that this release knows.
    #[error("the kubelet's checkpoint at {path} is not in the format that this release knows ({what})")]
    Format {
        /// Where it is.
        path: PathBuf,
        /// What was not understood; never the content.
        what: String,
    },
}

/// Reads the checkpoint in this folder. `ours` says which resources are looked into; with `None`
/// every entry is taken whose ids could be ours, under whatever resource: what pods hold of a GPU
/// counts, even if the GPU is offered otherwise now.
///
/// # Errors
/// If it is not there, not a regular file, too large, or not understood.
pub fn read(folder: &Path, ours: Option<&BTreeSet<Resource>>) -> Result<Checkpoint, CheckpointError> {
    let path = folder.join(CHECKPOINT_FILE);
    let (bytes, file) = read_file(&path)?;
    let format = |what: &str| CheckpointError::Format { path: path.clone(), what: what.to_owned() };
    // serde_json quotes no content in its own errors but names; the place is enough.
    let parsed: Whole<'_> = serde_json::from_slice(&bytes)
        .map_err(|e| format(&format!("line {}, column {}", e.line(), e.column())))?;
    let mut entries = Vec::new();
    let mut foreign = 0;
    for raw in parsed.data.pod_device_entries.unwrap_or_default() {
        let Ok(resource) = Resource::parse(&raw.resource_name) else {
            continue;
        };
        let known = ours.map(|ours| ours.contains(&resource));
        if known == Some(false) {
            continue;
        }
        match entry(&raw, resource) {
            Ok(Some(entry)) => entries.push(entry),
            // Another plugin may write there what it likes; but of GPUs every entry counts: one that is
            // passed over would have a GPU that is in use granted again.
            Ok(None) | Err(_) if known.is_none() && !names_gpus(&raw.resource_name) => {}
            Ok(None) => foreign += 1,
            Err(what) => return Err(format(what)),
        }
    }
    Ok(Checkpoint { entries, foreign, file })
}

/// Whether a resource is one under which GPUs are listed by the names that users know.
fn names_gpus(resource: &str) -> bool {
    let of_nvidia = resource.strip_prefix("nvidia.com/");
    of_nvidia.is_some_and(|name| name.starts_with("gpu") || name.starts_with("mig-"))
}

/// Opens without following a link and without waiting for a pipe's other end.
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
        return Err(CheckpointError::TooLarge {
            path: path.to_owned(),
            bytes: metadata.len().max(read),
            limit: CHECKPOINT_BYTES_MAX,
        });
    }
    Ok((bytes, FileId::of(&metadata)))
}

#[derive(Deserialize)]
struct Whole<'a> {
    #[serde(rename = "Data", borrow)]
    data: Data<'a>,
}

#[derive(Deserialize)]
struct Data<'a> {
    /// Go writes `null` for none.
    #[serde(rename = "PodDeviceEntries", borrow)]
    pod_device_entries: Option<Vec<RawEntry<'a>>>,
}

/// An entry of anybody's; the raw fields are text that nobody has looked into yet.
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

/// One of our entries; `None` if its ids cannot be ours.
fn entry(raw: &RawEntry<'_>, resource: Resource) -> Result<Option<CheckpointEntry>, &'static str> {
    let by_numa: BTreeMap<String, Option<Vec<String>>> =
        serde_json::from_str(raw.device_ids.get()).map_err(|_| "DeviceIDs of an entry of ours")?;
    let mut devices = BTreeSet::new();
    // An id with two NUMA nodes is there twice.
    for text in by_numa.into_values().flatten().flatten() {
        let Ok(id) = DeviceId::parse(&text) else {
            return Ok(None);
        };
        devices.insert(id);
    }
    Ok(Some(CheckpointEntry {
        pod_uid: raw.pod_uid.clone().into_owned(),
        container: raw.container_name.clone().into_owned(),
        allocation: allocation_of(raw, &resource),
        resource,
        devices: devices.into_iter().collect(),
    }))
}

/// The id that we put into the environment; `None` where another plugin answered.
fn allocation_of(raw: &RawEntry<'_>, resource: &Resource) -> Option<AllocationId> {
    let text: String = serde_json::from_str(raw.alloc_resp?.get()).ok()?;
    let bytes = STANDARD.decode(text).ok()?;
    let response = ContainerAllocateResponse::decode(&*bytes).ok()?;
    let id = response.envs.get(&allocation_key(resource))?;
    AllocationId::parse(id).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn ours() -> BTreeSet<Resource> {
        BTreeSet::from([Resource::parse("nvidia.com/gpu").unwrap()])
    }

    fn read_text(text: &str) -> Result<Checkpoint, CheckpointError> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(CHECKPOINT_FILE), text).unwrap();
        read(folder.path(), Some(&ours()))
    }

    fn answer(key: &str, value: &str) -> String {
        let response = ContainerAllocateResponse {
            envs: [(key.to_owned(), value.to_owned())].into(),
            ..ContainerAllocateResponse::default()
        };
        STANDARD.encode(response.encode_to_vec())
    }

    fn entry_text(resource: &str, ids: &str, answer: &str) -> String {
        format!(
            r#"{{"PodUID":"u1","ContainerName":"main","ResourceName":"{resource}","DeviceIDs":{ids},"AllocResp":"{answer}"}}"#
        )
    }

    fn file(entries: &[String]) -> String {
        let entries = entries.join(",");
        format!(
            r#"{{"Data":{{"PodDeviceEntries":[{entries}],"RegisteredDevices":{{"nvidia.com/gpu":null}}}},"Checksum":1}}"#
        )
    }

    #[test]
    fn our_entry_is_read_with_the_id_that_we_answered() {
        let answer = answer("BERTH_ALLOCATION_ID_NVIDIA_COM_GPU", "000000ab-7");
        let ids = r#"{"0":["GPU-2","GPU-1"],"1":["GPU-2"]}"#;
        let found = read_text(&file(&[entry_text("nvidia.com/gpu", ids, &answer)])).unwrap();
        let entry = &found.entries[0];
        assert_eq!((entry.pod_uid.as_str(), entry.container.as_str()), ("u1", "main"));
        let devices: Vec<String> = entry.devices.iter().map(ToString::to_string).collect();
        // An id with two NUMA nodes is one device.
        assert_eq!(devices, ["GPU-1", "GPU-2"]);
        assert_eq!(entry.allocation.unwrap().to_string(), "000000ab-7");
    }

    #[test]
    fn another_plugins_answer_has_no_id_of_ours() {
        let other = answer("NVIDIA_VISIBLE_DEVICES", "GPU-1");
        for answer in [other.as_str(), "", "!!! not base64"] {
            let text = entry_text("nvidia.com/gpu", r#"{"-1":["GPU-1"]}"#, answer);
            let found = read_text(&file(&[text])).unwrap();
            assert_eq!(found.entries[0].allocation, None, "{answer:?}");
        }
    }

    #[test]
    fn other_resources_entries_are_not_looked_into() {
        let odd = entry_text("vendor.com/thing", r#"["not","a","map"]"#, "secret");
        let odder = entry_text("not a resource", "17", "secret");
        let found = read_text(&file(&[odd, odder])).unwrap();
        assert!(found.entries.is_empty());
        assert_eq!(found.foreign, 0);
    }

    #[test]
    fn ids_that_cannot_be_ours_are_counted() {
        let text = entry_text("nvidia.com/gpu", r#"{"-1":["a device"]}"#, "");
        assert_eq!(read_text(&file(&[text])).unwrap().foreign, 1);
    }

    #[test]
    fn before_the_first_registration_every_entry_of_a_gpu_counts() {
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
            let read = read_any(&[malformed]).unwrap();
            assert_eq!((read.entries.len(), read.foreign), (0, 0), "{resource}");
        }
    }

    #[test]
    fn what_is_not_understood_is_an_error_without_the_content() {
        let ours_odd = entry_text("nvidia.com/gpu", r#"["GPU-1"]"#, "");
        for text in [
            "",
            "null",
            "{",
            "{\"Data\":[]}",
            "\u{0}secret",
            &file(&[ours_odd]),
            &file(&["{\"PodUID\":\"secret\"}".to_owned()]),
        ] {
            let error = read_text(text).unwrap_err();
            assert!(matches!(error, CheckpointError::Format { .. }), "{text:?}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn null_lists_and_unknown_fields_are_fine() {
        let text = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null,"New":1},"V":2}"#;
        assert!(read_text(text).unwrap().entries.is_empty());
    }

    #[test]
    fn only_a_regular_file_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(CHECKPOINT_FILE);
        let error = || read(folder.path(), Some(&ours())).unwrap_err();
        assert!(matches!(error(), CheckpointError::Missing { .. }));
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, file(&[])).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(matches!(error(), CheckpointError::NotAFile { .. }));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(matches!(error(), CheckpointError::NotAFile { .. }));
        fs::remove_dir(&path).unwrap();
        // A pipe without a writer would block a plain open for ever.
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(matches!(error(), CheckpointError::NotAFile { .. }));
    }

    #[test]
    fn a_file_beyond_the_limit_is_not_read_whole() {
        let folder = tempfile::tempdir().unwrap();
        let made = fs::File::create(folder.path().join(CHECKPOINT_FILE)).unwrap();
        made.set_len(CHECKPOINT_BYTES_MAX + 1).unwrap();
        let error = read(folder.path(), Some(&ours())).unwrap_err();
        assert!(matches!(error, CheckpointError::TooLarge { .. }), "{error}");
    }
}
