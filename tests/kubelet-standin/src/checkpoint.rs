//! `kubelet_internal_checkpoint`: written on every Allocate and every list, never
//! on a purge, by a temporary file and a rename.
//!
//! The kubelet's checksum is a hash over a Go value's printed form; here it is
//! FNV-1a over the data's JSON. Both are a number that a reader of the file cannot
//! know how to check.

use crate::devices::{Held, Manager, PodDevices};
use crate::proto::v1beta1::ContainerAllocateResponse;
use crate::world::{World, lock};
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
    /// As the kubelet does.
    #[default]
    Normal,
    /// Not at all: the file stays as it was.
    Frozen,
    /// Bytes that are no JSON.
    Garbage,
    /// The first half of the right bytes.
    Truncated,
    /// Right, with fields of a version to come at every level.
    Newer,
    /// The device ids as a list instead of a map by NUMA node: another format under the same names.
    Reshaped,
    /// Right, but for its checksum: the kubelet itself would not use it.
    WrongSum,
    /// A symbolic link to the right bytes in another file.
    Symlink,
    /// A folder in its place, which nobody can read as a file, not even root.
    Folder,
}

/// As it is read; [`render`] writes the same.
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

/// What a starting kubelet takes from the file.
pub(crate) struct Restored {
    pub(crate) pod_devices: PodDevices,
    pub(crate) resources: Vec<String>,
}

/// Reads the file as a starting kubelet does: any doubt, and it is not used.
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
            .insert(entry.resource_name, Held { by_numa, response });
    }
    let registered = file.data.registered_devices.unwrap_or_default();
    Some(Restored { pod_devices, resources: registered.into_keys().collect() })
}

/// Writes the file, in the way the mode says. A failure to write is the kubelet's
/// log line and nothing more, so it is ignored here.
pub(crate) fn write(world: &World, manager: &Manager, mode: CheckpointMode) {
    let folder = world.device_plugins();
    let bytes = render(world, manager);
    let _ = match mode {
        CheckpointMode::Normal => replace(&folder, &bytes),
        CheckpointMode::Frozen => Ok(()),
        CheckpointMode::Garbage => replace(&folder, b"\x00\xffnot a checkpoint"),
        CheckpointMode::Truncated => replace(&folder, &bytes[..bytes.len() / 2]),
        CheckpointMode::Newer => replace(&folder, &newer(&bytes)),
        CheckpointMode::Reshaped => replace(&folder, &reshaped(&bytes)),
        CheckpointMode::WrongSum => replace(&folder, &wrong_sum(&bytes)),
        CheckpointMode::Symlink => link(&folder, &bytes),
        CheckpointMode::Folder => in_the_way(&folder),
    };
    world.touch();
}

fn render(world: &World, manager: &Manager) -> Vec<u8> {
    let mut entries = Vec::new();
    for (uid, containers) in &manager.pod_devices {
        for (container, resources) in containers {
            for (resource, held) in resources {
                entries.push(entry(uid, container, resource, held));
            }
        }
    }
    lock(&world.rng).shuffle(&mut entries);
    let registered = manager.healthy.iter().map(|(resource, ids)| {
        let ids = world.shuffled(ids.iter().cloned());
        (resource.clone(), Some(ids).filter(|ids| !ids.is_empty()))
    });
    let data = Data {
        pod_device_entries: Some(entries).filter(|e| !e.is_empty()),
        registered_devices: Some(registered.collect()),
    };
    // Strings, maps with string keys and numbers: this cannot fail. The data are the greater part of
    // the work of an admission, so they are put into words once, for the sum and for the file.
    let data = serde_json::to_vec(&data).unwrap_or_default();
    let checksum = sum(&data);
    let mut file = Vec::with_capacity(data.len() + 64);
    file.extend_from_slice(b"{\"Data\":");
    file.extend_from_slice(&data);
    file.extend_from_slice(format!(",\"Checksum\":{checksum}}}").as_bytes());
    file
}

fn entry(uid: &str, container: &str, resource: &str, held: &Held) -> Entry {
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
    sum(&serde_json::to_vec(data).unwrap_or_default())
}

fn sum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A new inode under the old name.
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

fn newer(bytes: &[u8]) -> Vec<u8> {
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

fn reshaped(bytes: &[u8]) -> Vec<u8> {
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

fn wrong_sum(bytes: &[u8]) -> Vec<u8> {
    let Ok(mut file) = serde_json::from_slice::<serde_json::Value>(bytes) else {
        return Vec::new();
    };
    file["Checksum"] = 1.into();
    serde_json::to_vec(&file).unwrap_or_default()
}

fn link(folder: &Path, bytes: &[u8]) -> io::Result<()> {
    let elsewhere = folder.join("checkpoint-elsewhere");
    fs::write(&elsewhere, bytes)?;
    let target = folder.join(CHECKPOINT_FILE);
    let _ = fs::remove_file(&target);
    symlink(&elsewhere, &target)
}

fn in_the_way(folder: &Path) -> io::Result<()> {
    let target = folder.join(CHECKPOINT_FILE);
    let _ = fs::remove_file(&target);
    fs::create_dir_all(&target)
}
