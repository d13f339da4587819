//! `kubelet_internal_checkpoint`: written on every Allocate and every list, never
//! on a purge, by a temporary file and a rename.
//!
//! The kubelet's checksum is a hash of a Go value's printed form; here it is FNV-1a of
//! the data's JSON. No other program can verify either.

use crate::devices::{Holding, Manager, PodDevices};
use crate::node_state::{NodeState, lock};
use crate::proto::v1beta1::ContainerAllocateResponse;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use prost::Message;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::symlink,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

/// The file's name inside `device-plugins/`.
pub const CHECKPOINT_FILE: &str = "kubelet_internal_checkpoint";

/// How the checkpoint is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckpointMode {
    /// As in the kubelet.
    #[default]
    Normal,
    /// Not at all: the file remains unchanged.
    Frozen,
    /// Bytes that are not JSON.
    Garbage,
    /// The first half of the correct bytes.
    Truncated,
    /// Correct, with fields of a future version at every level.
    Newer,
    /// The device ids as a list instead of a map by NUMA node: another format with the same names.
    Reshaped,
    /// Correct except for the checksum: the kubelet itself would not use it.
    WrongSum,
    /// A symbolic link to the correct bytes in another file.
    Symlink,
    /// A folder instead of the file, which even root cannot read.
    Folder,
}

/// The file's content as it is read; [`render`] writes the same.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: Data,
    checksum: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    /// Go writes `null` for an empty list.
    pod_device_entries: Option<Vec<Entry>>,
    registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    #[serde(rename = "ContainerName")]
    container_name: String,
    #[serde(rename = "ResourceName")]
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    device_ids: BTreeMap<String, Vec<String>>,
    #[serde(rename = "AllocResp")]
    alloc_resp: String,
}

/// The state that a starting kubelet restores from the file.
pub(crate) struct Restored {
    pub(crate) pod_devices: PodDevices,
    pub(crate) resources: Vec<String>,
}

/// Reads the file as a starting kubelet does: after any error it is ignored.
pub(crate) fn read(folder: &Path) -> Option<Restored> {
    let bytes = fs::read(folder.join(CHECKPOINT_FILE)).ok()?;
    let file: File = serde_json::from_slice(&bytes).ok()?;
    if file.checksum != checksum(&file.data) {
        return None;
    }
    let mut pod_devices = PodDevices::new();
    for entry in file.data.pod_device_entries.unwrap_or_default() {
        let response = STANDARD.decode(&entry.alloc_resp).ok();
        let response = response.and_then(|b| ContainerAllocateResponse::decode(&*b).ok());
        let Some(response) = response else { continue };
        let numa = entry.device_ids.into_iter();
        let by_numa = numa.filter_map(|(node, ids)| Some((node.parse().ok()?, ids))).collect();
        pod_devices
            .entry(entry.pod_uid)
            .or_default()
            .entry(entry.container_name)
            .or_default()
            .insert(entry.resource_name, Holding { by_numa, response });
    }
    let registered = file.data.registered_devices.unwrap_or_default();
    Some(Restored { pod_devices, resources: registered.into_keys().collect() })
}

/// Writes the file according to `mode`. The kubelet only logs a failed write, so errors are
/// ignored.
pub(crate) fn write(node: &NodeState, manager: &Manager, mode: CheckpointMode) {
    let folder = node.device_plugins();
    let bytes = render(node, manager);
    let _ = match mode {
        CheckpointMode::Normal => replace(&folder, &bytes),
        CheckpointMode::Frozen => Ok(()),
        CheckpointMode::Garbage => replace(&folder, b"\x00\xffnot a checkpoint"),
        CheckpointMode::Truncated => replace(&folder, &bytes[..bytes.len() / 2]),
        CheckpointMode::Newer => replace(&folder, &with_newer_fields(&bytes)),
        CheckpointMode::Reshaped => replace(&folder, &with_id_lists(&bytes)),
        CheckpointMode::WrongSum => replace(&folder, &with_wrong_checksum(&bytes)),
        CheckpointMode::Symlink => replace_with_link(&folder, &bytes),
        CheckpointMode::Folder => replace_with_folder(&folder),
    };
    node.notify_changed();
}

fn render(node: &NodeState, manager: &Manager) -> Vec<u8> {
    let mut entries = Vec::new();
    for (uid, containers) in &manager.pod_devices {
        for (container, resources) in containers {
            for (resource, held) in resources {
                entries.push(entry(uid, container, resource, held));
            }
        }
    }
    lock(&node.rng).shuffle(&mut entries);
    let registered = manager.healthy.iter().map(|(resource, ids)| {
        let ids = node.shuffled(ids.iter().cloned());
        (resource.clone(), Some(ids).filter(|ids| !ids.is_empty()))
    });
    let data = Data {
        pod_device_entries: Some(entries).filter(|e| !e.is_empty()),
        registered_devices: Some(registered.collect()),
    };
    // Strings, maps with string keys and numbers: this cannot fail. Serialized once for the checksum and
    // the file, as it is the most expensive part of an admission.
    let data = serde_json::to_vec(&data).unwrap_or_default();
    let checksum = fnv1a(&data);
    let mut file = Vec::with_capacity(data.len() + 64);
    file.extend_from_slice(b"{\"Data\":");
    file.extend_from_slice(&data);
    file.extend_from_slice(format!(",\"Checksum\":{checksum}}}").as_bytes());
    file
}

fn entry(uid: &str, container: &str, resource: &str, held: &Holding) -> Entry {
    let by_numa = held.by_numa.iter();
    Entry {
        pod_uid: uid.to_owned(),
        container_name: container.to_owned(),
        resource_name: resource.to_owned(),
        device_ids: by_numa.map(|(node, ids)| (node.to_string(), ids.clone())).collect(),
        alloc_resp: STANDARD.encode(held.response.encode_to_vec()),
    }
}

fn checksum(data: &Data) -> u64 {
    fnv1a(&serde_json::to_vec(data).unwrap_or_default())
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Replaces the file, so that its inode changes.
fn replace(folder: &Path, bytes: &[u8]) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let target = folder.join(CHECKPOINT_FILE);
    if target.is_dir() {
        fs::remove_dir(&target)?;
    }
    let temporary = folder.join(format!(".{CHECKPOINT_FILE}{n}"));
    fs::write(&temporary, bytes)?;
    fs::rename(&temporary, &target)
}

fn with_newer_fields(bytes: &[u8]) -> Vec<u8> {
    let Ok(mut file) = serde_json::from_slice::<serde_json::Value>(bytes) else {
        return Vec::new();
    };
    file["Version"] = "v2".into();
    file["Data"]["SchemaRevision"] = 3.into();
    if let Some(entries) = file["Data"]["PodDeviceEntries"].as_array_mut() {
        for entry in entries {
            entry["PodLevel"] = serde_json::json!({ "ids": [] });
        }
    }
    serde_json::to_vec(&file).unwrap_or_default()
}

fn with_id_lists(bytes: &[u8]) -> Vec<u8> {
    let Ok(mut file) = serde_json::from_slice::<serde_json::Value>(bytes) else {
        return Vec::new();
    };
    if let Some(entries) = file["Data"]["PodDeviceEntries"].as_array_mut() {
        for entry in entries {
            let by_numa = entry["DeviceIDs"].as_object().cloned().unwrap_or_default();
            let ids = by_numa.into_iter().flat_map(|(_, ids)| ids.as_array().cloned().unwrap_or_default());
            entry["DeviceIDs"] = ids.collect();
        }
    }
    serde_json::to_vec(&file).unwrap_or_default()
}

fn with_wrong_checksum(bytes: &[u8]) -> Vec<u8> {
    let Ok(mut file) = serde_json::from_slice::<serde_json::Value>(bytes) else {
        return Vec::new();
    };
    file["Checksum"] = 1.into();
    serde_json::to_vec(&file).unwrap_or_default()
}

fn replace_with_link(folder: &Path, bytes: &[u8]) -> io::Result<()> {
    let elsewhere = folder.join("checkpoint-elsewhere");
    fs::write(&elsewhere, bytes)?;
    let target = folder.join(CHECKPOINT_FILE);
    let _ = fs::remove_file(&target);
    symlink(&elsewhere, &target)
}

fn replace_with_folder(folder: &Path) -> io::Result<()> {
    let target = folder.join(CHECKPOINT_FILE);
    let _ = fs::remove_file(&target);
    fs::create_dir_all(&target)
}
