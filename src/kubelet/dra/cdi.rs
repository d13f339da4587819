//! The CDI specification of each prepared claim: the variables and mounts of its allocations. The GPU itself comes from
//! the specification that containers of the device plugin use, too.
//!
//! Containers of a pod start again with the ids that the kubelet has kept, so a claim's specification must be there as long
//! as the claim is prepared: after a reboot, which empties `/var/run`, and after a deletion.

use super::DriverSettings;
use crate::convert;
use crate::edits::{DeviceListStrategy, Edits, device_name};
use crate::settings::CurrentEdits;
use berth_core::KernelHandle;
use berth_files::FolderEvents;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::hardware::gpu::Part;
use berth_kernel::node::ledger::Ledger;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// The version of the specifications: the oldest that has all of their fields (cdi `SPEC.md`).
const CDI_VERSION: &str = "0.5.0";
/// The class of the devices of claims; the vendor is the driver.
const CLASS: &str = "berth";
/// The interval of checks besides those after events of the folder.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// The wait before a check, so that many changes at once cause one. The specification of a claim is written by the call that
/// prepares it, which a check at the same time would delay.
const BURST_WINDOW: Duration = Duration::from_millis(200);
/// The wait after a failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The interval where the folder's events cannot be received.
const CHECK_INTERVAL_WITHOUT_EVENTS: Duration = Duration::from_secs(1);

/// The specifications of the claims that are prepared.
pub(super) struct Specifications {
    driver: String,
    folder: PathBuf,
    edits: CurrentEdits,
    kernel: KernelHandle,
    /// Held while files change, so that none is removed by a snapshot that is older than its claim's grant.
    writing: tokio::sync::Mutex<()>,
}

impl Specifications {
    pub(super) fn new(settings: &DriverSettings, kernel: KernelHandle) -> Self {
        let DriverSettings { driver, cdi_dir, edits, .. } = settings;
        Self {
            driver: driver.clone(),
            folder: cdi_dir.clone(),
            edits: edits.clone(),
            kernel,
            writing: tokio::sync::Mutex::default(),
        }
    }

    /// The CDI ids of the device at this index of an allocation: that with its variables and mounts, and that of the GPU.
    pub(super) fn cdi_ids(&self, allocation: &Allocation, index: usize, part: &Part) -> Vec<String> {
        let own = format!("{}/{CLASS}={}", self.driver, cdi_name(allocation, index));
        vec![own, self.cdi_id_of_part(part)]
    }

    /// The CDI id of a GPU or instance.
    pub(super) fn cdi_id_of_part(&self, part: &Part) -> String {
        let edits = self.edits.borrow();
        format!("{}={}", edits.cdi_kind, device_name(part, edits.id_strategy))
    }

    /// Writes the specification of a claim that is prepared.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub(super) async fn write(&self, uid: &str, ledger: &Ledger) -> io::Result<()> {
        let Some(text) = self.wanted(ledger).remove(uid) else { return Ok(()) };
        let _writing = self.writing.lock().await;
        write_atomically(self.path(uid), text).await
    }

    /// Removes the specification of a claim that was released.
    pub(super) async fn remove(&self, uid: &str) {
        let _writing = self.writing.lock().await;
        let path = self.path(uid);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(path = %path.display(), %error, "a CDI specification could not be removed; the next check removes it");
        }
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.folder.join(format!("{}{uid}{SUFFIX}", self.prefix()))
    }

    /// The names of all specifications of this driver's claims begin with it.
    fn prefix(&self) -> String {
        format!("{}-{CLASS}_", self.driver)
    }

    /// The specifications of all prepared claims, by their UIDs.
    fn wanted(&self, ledger: &Ledger) -> BTreeMap<String, String> {
        let mut by_claim: BTreeMap<&str, Vec<&Allocation>> = BTreeMap::new();
        for allocation in ledger.live.values() {
            if let Some(request) = allocation.origin.claim() {
                by_claim.entry(&request.claim.uid).or_default().push(allocation);
            }
        }
        let edits = Edits {
            strategies: [DeviceListStrategy::CdiCri].into(),
            pass_device_specs: false,
            ..Edits::clone(&self.edits.borrow())
        };
        let text = |allocations: Vec<&Allocation>| {
            let devices = allocations.iter().flat_map(|allocation| {
                let edits = container_edits(allocation, ledger, &edits);
                (0..allocation.devices.len())
                    .map(move |index| json!({"name": cdi_name(allocation, index), "containerEdits": edits}))
            });
            let devices: Vec<Value> = devices.collect();
            let kind = format!("{}/{CLASS}", self.driver);
            json!({"cdiVersion": CDI_VERSION, "kind": kind, "devices": devices}).to_string()
        };
        by_claim.into_iter().map(|(uid, allocations)| (uid.to_owned(), text(allocations))).collect()
    }

    /// Writes the specifications that are missing or differ, and removes those of claims that are not prepared.
    ///
    /// # Errors
    /// The first error; all other files are up to date then.
    pub(super) async fn bring_up_to_date(&self) -> io::Result<()> {
        let _writing = self.writing.lock().await;
        let wanted = self.wanted(&self.kernel.snapshot());
        let mut found = self.found()?;
        let mut result = Ok(());
        for (uid, text) in wanted {
            let path = self.path(&uid);
            let known = path.file_name().and_then(|name| found.remove(name));
            if known.as_deref() != Some(text.as_bytes())
                && let Err(error) = write_atomically(path, text).await
            {
                result = Err(error);
            }
        }
        for name in found.keys() {
            if let Err(error) = fs::remove_file(self.folder.join(name))
                && error.kind() != io::ErrorKind::NotFound
            {
                result = Err(error);
            }
        }
        result
    }

    /// The files of this driver's claims, with their contents.
    fn found(&self) -> io::Result<BTreeMap<OsString, Vec<u8>>> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(error) => return Err(error),
        };
        let prefix = self.prefix();
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
        let ours = names.filter(|name| {
            let name = name.to_string_lossy();
            name.starts_with(&prefix)
                && [SUFFIX, TEMPORARY_SUFFIX].iter().any(|suffix| name.ends_with(suffix))
        });
        // One that cannot be read is written again.
        let content =
            |name: &OsString| berth_files::read(&self.folder.join(name), BYTES_MAX).unwrap_or_default();
        Ok(ours.map(|name| (name.clone(), content(&name))).collect())
    }

    /// Keeps the specifications up to date; never returns.
    pub(super) async fn keep(self: Arc<Self>) {
        let (mut snapshots, mut edits) = (self.kernel.watch(), self.edits.clone());
        let mut events = FolderEvents::new().ok();
        let mut live = None;
        let mut is_due = true;
        loop {
            let now_live = Arc::clone(&snapshots.borrow_and_update().live);
            edits.mark_unchanged();
            let is_same = live.as_ref().is_some_and(|live| Arc::ptr_eq(live, &now_live));
            let has_events =
                events.as_mut().is_some_and(|events| events.watch([self.folder.as_path()]).is_ok())
                    && self.folder.is_dir();
            if is_due || !is_same {
                let folder = self.folder.display();
                if let Err(error) = self.bring_up_to_date().await {
                    tracing::warn!(%folder, %error, "the CDI specifications of claims cannot be written");
                    // The attempt itself changes the folder.
                    sleep(RETRY_INTERVAL).await;
                    continue;
                }
                live = Some(now_live);
            }
            let interval = if has_events { CHECK_INTERVAL } else { CHECK_INTERVAL_WITHOUT_EVENTS };
            let folder_changed = async {
                match events.as_mut().filter(|_| has_events) {
                    Some(events) => events.changed().await,
                    None => std::future::pending().await,
                }
            };
            is_due = tokio::select! {
                changed = snapshots.changed() => match changed {
                    Ok(()) => false,
                    Err(_) => return std::future::pending().await,
                },
                _ = edits.changed() => true,
                () = folder_changed => true,
                () = sleep(interval) => true,
            };
            sleep(BURST_WINDOW).await;
        }
    }
}

/// The end of the specifications' names.
const SUFFIX: &str = ".json";
/// The end of the names of files that are being written.
const TEMPORARY_SUFFIX: &str = ".tmp";
/// The largest specification that is read: 2048 devices of a kilobyte.
const BYTES_MAX: u64 = 4 * 1024 * 1024;

/// The name of a device of an allocation.
fn cdi_name(allocation: &Allocation, index: usize) -> String {
    format!("{}-{index}", allocation.id)
}

/// What an allocation changes in its containers, besides their GPUs.
fn container_edits(allocation: &Allocation, ledger: &Ledger, edits: &Edits) -> Value {
    let response = convert::response(allocation, ledger, edits);
    let mut environment: Vec<String> =
        response.envs.iter().map(|(key, value)| format!("{key}={value}")).collect();
    environment.sort();
    let mut all = json!({"env": environment});
    let mounts = response.mounts.iter().map(|mount| {
        let access = if mount.read_only { "ro" } else { "rw" };
        json!({
            "hostPath": mount.host_path,
            "containerPath": mount.container_path,
            "options": [access, "nosuid", "nodev", "rbind"],
        })
    });
    let mounts: Vec<Value> = mounts.collect();
    let nodes = response.devices.iter().map(|node| {
        json!({"path": node.container_path, "hostPath": node.host_path, "permissions": node.permissions})
    });
    let nodes: Vec<Value> = nodes.collect();
    if !mounts.is_empty() {
        all["mounts"] = Value::from(mounts);
    }
    if !nodes.is_empty() {
        all["deviceNodes"] = Value::from(nodes);
    }
    all
}

/// A container runtime that reads the folder meanwhile finds the old file or the new one. The name of the temporary file
/// has no suffix that it reads.
async fn write_atomically(path: PathBuf, text: String) -> io::Result<()> {
    let write = move || {
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)?;
        let temporary = path.with_extension(&TEMPORARY_SUFFIX[1..]);
        let written = File::create(&temporary).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        });
        written.inspect_err(|_| drop(fs::remove_file(&temporary)))
    };
    tokio::task::spawn_blocking(write).await.map_err(io::Error::other)?
}
