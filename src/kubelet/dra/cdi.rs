//! The CDI specification of each prepared claim: the variables and mounts of its allocations. The files that its containers
//! find are written here, too. The GPU itself comes from
//! the specification that containers of the device plugin use, too.
//!
//! Containers of a pod start again with the ids that the kubelet has kept, so a claim's specification must be there as long
//! as the claim is prepared: after a reboot, which empties `/var/run`, and after a deletion.

use super::DriverSettings;
use super::metadata::{self, Publisher};
use super::record;
use crate::convert;
use crate::edits::{DeviceListStrategy, Edits, device_name};
use crate::settings::CurrentEdits;
use berth_core::KernelHandle;
use berth_files::FolderEvents;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::hardware::gpu::Part;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::publish::Versions;
use berth_observe::counters::DriverVersions;
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

/// What a prepared claim needs.
struct Wanted {
    /// Its CDI specification.
    specification: String,
    /// The files that its containers find, and its record: paths on the node, and contents.
    files: Vec<(PathBuf, String)>,
}

/// The specifications of the claims that are prepared.
pub(super) struct Specifications {
    driver: String,
    pool: String,
    folder: PathBuf,
    /// The folder of the files that the claims' containers find, by claim.
    grants: PathBuf,
    edits: CurrentEdits,
    kernel: KernelHandle,
    /// Held while files change, so that none is removed by a snapshot that is older than its claim's grant.
    writing: tokio::sync::Mutex<()>,
}

impl Specifications {
    pub(super) fn new(settings: &DriverSettings, kernel: KernelHandle) -> Self {
        let DriverSettings { driver, node, cdi_dir, edits, .. } = settings;
        Self {
            driver: driver.clone(),
            pool: node.clone(),
            folder: cdi_dir.clone(),
            grants: settings.grants_folder(),
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

    /// Writes the specification of a claim that is prepared, and the files that its containers find.
    ///
    /// # Errors
    /// If a folder cannot be written.
    pub(super) async fn write(&self, uid: &str, ledger: &Ledger) -> io::Result<()> {
        let Some(wanted) = self.wanted(ledger, Some(uid)).remove(uid) else { return Ok(()) };
        let _writing = self.writing.lock().await;
        let path = self.path(uid);
        let write = move || {
            for (path, content) in wanted.files {
                write_atomically(&path, &content, Durability::NotSynced)?;
            }
            write_atomically(&path, &wanted.specification, Durability::SyncedBeforeRename)
        };
        // One task for all of them, since the kubelet waits.
        tokio::task::spawn_blocking(write).await.map_err(io::Error::other)?
    }

    /// Removes the specification of a claim that was released, and the files that its containers find.
    pub(super) async fn remove(&self, uid: &str) {
        let _writing = self.writing.lock().await;
        let path = self.path(uid);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(path = %path.display(), %error, "a CDI specification could not be removed; the next check removes it");
        }
        if let Err(error) = remove_folder(&self.grants.join(uid)) {
            tracing::debug!(claim = uid, %error, "the files of a claim could not be removed; the next check removes them");
        }
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.folder.join(format!("{}{uid}{SUFFIX}", self.prefix()))
    }

    /// The names of all specifications of this driver's claims begin with it.
    fn prefix(&self) -> String {
        format!("{}-{CLASS}_", self.driver)
    }

    /// What prepared claims need, by their UIDs: all of them, or one.
    fn wanted(&self, ledger: &Ledger, only: Option<&str>) -> BTreeMap<String, Wanted> {
        let mut by_claim: BTreeMap<&str, Vec<&Allocation>> = BTreeMap::new();
        for allocation in ledger.live.values() {
            let request = allocation.origin.claim();
            if let Some(request) = request.filter(|request| only.is_none_or(|uid| request.claim.uid == uid)) {
                by_claim.entry(&request.claim.uid).or_default().push(allocation);
            }
        }
        let DriverVersions { driver, cuda } = self.kernel.counters().gpus.versions();
        let (publisher, versions) =
            (Publisher { driver: &self.driver, pool: &self.pool }, Versions { driver, cuda });
        let edits = Edits {
            strategies: [DeviceListStrategy::CdiCri].into(),
            pass_device_specs: false,
            ..Edits::clone(&self.edits.borrow())
        };
        let wanted = |(uid, allocations): (&str, Vec<&Allocation>)| {
            let folder = self.grants.join(uid);
            let file = |allocation| metadata::file(ledger, allocation, &allocations, publisher, &versions);
            let files: Vec<_> = allocations.iter().map(|allocation| file(allocation)).collect();
            let devices = allocations.iter().zip(&files).flat_map(|(allocation, file)| {
                let file = file.as_ref().map(|file| (folder.join(&file.path), &file.container_paths));
                let edits = container_edits(allocation, ledger, &edits, file.as_ref());
                (0..allocation.devices.len())
                    .map(move |index| json!({"name": cdi_name(allocation, index), "containerEdits": edits}))
            });
            let devices: Vec<Value> = devices.collect();
            let kind = format!("{}/{CLASS}", self.driver);
            let specification =
                json!({"cdiVersion": CDI_VERSION, "kind": kind, "devices": devices}).to_string();
            let record =
                record::content(ledger, &allocations).map(|content| (folder.join(record::FILE), content));
            let files =
                files.into_iter().flatten().map(|file| (folder.join(file.path), file.content)).chain(record);
            (uid.to_owned(), Wanted { specification, files: files.collect() })
        };
        by_claim.into_iter().map(wanted).collect()
    }

    /// Writes the specifications and files that are missing or differ, and removes those of claims that are not prepared.
    ///
    /// # Errors
    /// The first error; all other files are up to date then.
    pub(super) async fn bring_up_to_date(self: &Arc<Self>) -> io::Result<()> {
        let _writing = self.writing.lock().await;
        let wanted = self.wanted(&self.kernel.snapshot(), None);
        let specifications = Arc::clone(self);
        let compare = move || specifications.write_those_that_differ(wanted);
        tokio::task::spawn_blocking(compare).await.map_err(io::Error::other)?
    }

    fn write_those_that_differ(&self, wanted: BTreeMap<String, Wanted>) -> io::Result<()> {
        let mut found = self.found()?;
        // The folder is watched, so it is there although no claim is prepared.
        fs::create_dir_all(&self.grants).map_err(|error| at(&self.grants, &error))?;
        let mut result = self.remove_files_of_others(&wanted);
        for (uid, Wanted { specification, files }) in wanted {
            // The specification names them, so they come first.
            for (path, content) in files {
                // One that cannot be read is written again.
                let known = berth_files::read(&path, BYTES_MAX).unwrap_or_default();
                if known != content.as_bytes()
                    && let Err(error) = write_atomically(&path, &content, Durability::NotSynced)
                {
                    result = Err(error);
                }
            }
            let path = self.path(&uid);
            let known = path.file_name().and_then(|name| found.remove(name));
            if known.as_deref() != Some(specification.as_bytes())
                && let Err(error) = write_atomically(&path, &specification, Durability::SyncedBeforeRename)
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

    /// Removes the files of claims that are not prepared.
    fn remove_files_of_others(&self, wanted: &BTreeMap<String, Wanted>) -> io::Result<()> {
        let entries = match fs::read_dir(&self.grants) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
        let others = names.filter(|name| name.to_str().is_none_or(|uid| !wanted.contains_key(uid)));
        let removed: Vec<_> = others.map(|name| remove_folder(&self.grants.join(name))).collect();
        removed.into_iter().collect()
    }

    /// The specifications of this driver's claims, with their contents.
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

    /// Keeps the specifications and files up to date; never returns.
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
                events.as_mut().is_some_and(|events| events.watch([&*self.folder, &*self.grants]).is_ok())
                    && self.folder.is_dir()
                    && self.grants.is_dir();
            if is_due || !is_same {
                let (folder, files) = (self.folder.display(), self.grants.display());
                if let Err(error) = self.bring_up_to_date().await {
                    tracing::warn!(%folder, %files, %error, "the CDI specifications or files of claims cannot be written or removed");
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

/// What an allocation changes in its containers, besides their GPUs. `file`: its file, on the node and in the containers.
fn container_edits(
    allocation: &Allocation,
    ledger: &Ledger,
    edits: &Edits,
    file: Option<&(PathBuf, &[String; 2])>,
) -> Value {
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
    let files = file.iter().flat_map(|(path, container_paths)| {
        container_paths.iter().map(move |container_path| {
            json!({"hostPath": path, "containerPath": container_path, "options": ["ro", "nosuid", "nodev", "bind"]})
        })
    });
    let mounts: Vec<Value> = mounts.chain(files).collect();
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

/// Removes a folder, or a file of that name.
fn remove_folder(path: &Path) -> io::Result<()> {
    let removed = match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => fs::remove_file(path),
        removed => removed,
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(path, &error)),
        _ => Ok(()),
    }
}

/// The error with the path that it is about.
fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// A reader of the folder finds the old file or the new one. The name of the temporary file has no suffix that a container
/// runtime reads.
fn write_atomically(path: &Path, text: &str, durability: Durability) -> io::Result<()> {
    let write = || {
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
        let temporary = path.with_extension(&TEMPORARY_SUFFIX[1..]);
        let written = File::create(&temporary).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            if durability == Durability::SyncedBeforeRename {
                file.sync_all()?;
            }
            fs::rename(&temporary, path)
        });
        written.inspect_err(|_| drop(fs::remove_file(&temporary)))
    };
    write().map_err(|error| at(path, &error))
}

/// Whether a file's content is on the disk before the file has its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Durability {
    SyncedBeforeRename,
    /// The content may be lost when the power fails; the check at the next start writes it again.
    NotSynced,
}
