//! The state file: what the fake shows, as one value.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::event::{Event, EventKind};
use crate::fault::Fault;
use crate::gpu::{Gpu, RecoveryAction, pci_address};
use crate::instance::Profile;
use crate::link::{Level, NvLink, Pair, Remote};

/// The largest state file that is read, in bytes. Sixteen GPUs with 18 links and a hundred processes each take about
/// 200 KiB.
const FILE_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// `NVML_DEVICE_UUID_BUFFER_SIZE` less the terminating NUL.
const UUID_CHARS_MAX: usize = 79;

/// Everything that the fake shows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// `nvmlSystemGetDriverVersion`.
    #[serde(default = "default_driver_version")]
    pub driver_version: String,
    /// `nvmlSystemGetCudaDriverVersion`: 1000 x major + 10 x minor.
    #[serde(default = "default_cuda_version")]
    pub cuda_version: u32,
    /// The GPUs; a GPU's index is its position.
    pub gpus: Vec<Gpu>,
    /// GPUs that join the list after `nvmlInit` are shown only after the next one, as with a real driver. By default at
    /// once.
    #[serde(default, skip_serializing_if = "is_false")]
    pub counts_at_init: bool,
    /// The event types that every GPU supports (`nvmlDeviceGetSupportedEventTypes`); by default all that the fake has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supported_events: Option<u64>,
    /// A wait on an event set returns at once where there is no event, as a driver may for a set without event types.
    #[serde(default, skip_serializing_if = "is_false")]
    pub empty_wait_at_once: bool,
    /// The inode of a library file that no longer fits the loaded driver: `nvmlInit` of that copy answers
    /// `LIB_RM_VERSION_MISMATCH` until the program opens another file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stale_library: Option<u64>,
    /// A file to which each call appends the name of its symbol and the UUID of its GPU, a line each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_log: Option<PathBuf>,
    /// So much of the stack each call uses, KiB, as the functions of a real driver may.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stack_kib: u32,
    /// What enforces memory limits of cgroups; absent: nothing, as with a driver before r615.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limits: Option<LimitBackend>,
    /// Pairs of GPUs whose common ancestor is not what [`State::level`] derives.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub topology: Vec<Pair>,
    /// What happened to GPUs, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<Event>,
    /// Calls that are slow, hang or fail.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_false(value: &bool) -> bool {
    !*value
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

fn default_driver_version() -> String {
    "570.172.08".to_owned()
}

fn default_cuda_version() -> u32 {
    12_080
}

impl Default for State {
    fn default() -> Self {
        Self {
            driver_version: default_driver_version(),
            cuda_version: default_cuda_version(),
            gpus: Vec::new(),
            counts_at_init: false,
            supported_events: None,
            empty_wait_at_once: false,
            stale_library: None,
            call_log: None,
            stack_kib: 0,
            memory_limits: None,
            topology: Vec::new(),
            events: Vec::new(),
            faults: Vec::new(),
        }
    }
}

/// What enforces memory limits of cgroups in the kernel. They differ in what NVML answers where no limit is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitBackend {
    /// The controller `dmem` of Linux 6.14: `NOT_FOUND`.
    Dmem,
    /// The controller `misc`: `NOT_SUPPORTED`.
    Misc,
}

/// Why a state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The file cannot be read or written.
    #[error("{path}: cannot be {action}")]
    Io {
        /// The file.
        path: PathBuf,
        /// `read` or `written`.
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is larger than any sensible state.
    #[error("{path}: is {bytes} bytes long; at most {FILE_BYTES_MAX} are read")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// The file is not JSON of the right form.
    #[error("{path}: is not a state file")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// The file contradicts itself.
    #[error("{path}: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

impl State {
    /// Reads and checks a state file.
    ///
    /// # Errors
    /// If it cannot be read, is not a state file, or contradicts itself.
    pub fn read(path: &Path) -> Result<Self, StateError> {
        let failed = |source| StateError::Io { path: path.to_owned(), action: "read", source };
        let bytes = fs::metadata(path).map_err(failed)?.len();
        if bytes > FILE_BYTES_MAX {
            return Err(StateError::TooLarge { path: path.to_owned(), bytes });
        }
        let text = fs::read(path).map_err(failed)?;
        let state: Self = serde_json::from_slice(&text)
            .map_err(|source| StateError::Json { path: path.to_owned(), source })?;
        state.check().map_err(|reason| StateError::Invalid { path: path.to_owned(), reason })?;
        Ok(state)
    }

    /// Writes the state beside `path` and renames it into place, so that a reader sees the old state or the new one,
    /// whole.
    ///
    /// # Errors
    /// If the state contradicts itself or the file cannot be written; the old file then stays.
    pub fn write(&self, path: &Path) -> Result<(), StateError> {
        static WRITES: AtomicU32 = AtomicU32::new(0);
        self.check().map_err(|reason| StateError::Invalid { path: path.to_owned(), reason })?;
        let text = serde_json::to_vec_pretty(self)
            .map_err(|source| StateError::Json { path: path.to_owned(), source })?;
        let failed = |source| StateError::Io { path: path.to_owned(), action: "written", source };
        let turn = WRITES.fetch_add(1, Ordering::Relaxed);
        let beside = path.with_extension(format!("new-{}-{turn}", std::process::id()));
        let written = File::create(&beside).and_then(|mut file| {
            file.write_all(&text)?;
            // A kernel may stamp two writes within one tick alike, and inode numbers are used again: a time of our own,
            // exact to the nanosecond, makes sure that every write is seen as a change.
            file.set_modified(SystemTime::now())?;
            fs::rename(&beside, path)
        });
        written.map_err(|source| {
            let _ = fs::remove_file(&beside);
            failed(source)
        })
    }

    /// The GPU with this UUID.
    pub fn gpu(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid)
    }

    /// The same, to change it.
    pub fn gpu_mut(&mut self, uuid: &str) -> Option<&mut Gpu> {
        self.gpus.iter_mut().find(|gpu| gpu.uuid == uuid)
    }

    /// The nearest common ancestor of two GPUs: as `topology` says, else `node` within a NUMA node and `system` across.
    pub fn level(&self, a: &Gpu, b: &Gpu) -> Level {
        let said = self
            .topology
            .iter()
            .find(|pair| (pair.a == a.uuid && pair.b == b.uuid) || (pair.a == b.uuid && pair.b == a.uuid));
        match said {
            Some(pair) => pair.level,
            None if a.uuid == b.uuid => Level::Internal,
            None if a.numa_node == b.numa_node => Level::Node,
            None => Level::System,
        }
    }

    /// Appends a critical XID error of a GPU and answers its sequence number.
    pub fn push_xid(&mut self, uuid: &str, xid: u64) -> u64 {
        self.push_event(uuid, EventKind::Xid, xid)
    }

    /// A memory error that is contained to one application, as NVIDIA's A100 memory error management describes it: an
    /// uncorrectable error is counted, a row waits for its remapping, XID 94 is sent, and no recovery is required.
    pub fn contained_error(&mut self, uuid: &str) {
        if let Some(gpu) = self.gpu_mut(uuid) {
            gpu.ecc.get_or_insert_default().uncorrected_volatile += 1;
            let rows = gpu.remapped_rows.get_or_insert_default();
            rows.uncorrectable += 1;
            rows.pending = true;
        }
        self.push_xid(uuid, 94);
    }

    /// The driver requires another recovery action of a GPU, and sends the event.
    pub fn require(&mut self, uuid: &str, action: RecoveryAction) {
        if let Some(gpu) = self.gpu_mut(uuid) {
            gpu.recovery_action = action;
        }
        self.push_event(uuid, EventKind::RecoveryAction, 0);
    }

    /// Appends an event of a GPU and answers its sequence number.
    fn push_event(&mut self, uuid: &str, kind: EventKind, data: u64) -> u64 {
        let seq = self.newest_event() + 1;
        self.events.push(Event {
            seq,
            gpu: uuid.to_owned(),
            kind,
            data,
            gpu_instance: None,
            compute_instance: None,
        });
        seq
    }

    /// The highest sequence number in the file; 0 without events.
    pub(crate) fn newest_event(&self) -> u64 {
        self.events.iter().map(|event| event.seq).max().unwrap_or(0)
    }

    /// The error of the state, as text.
    fn check(&self) -> Result<(), String> {
        let mut uuids = HashSet::new();
        let mut addresses = HashSet::new();
        for gpu in &self.gpus {
            check_gpu(gpu)?;
            if !addresses.insert(gpu.pci_address()) {
                return Err(format!("two GPUs have pci_bus_id {}", gpu.pci_bus_id));
            }
            let instances = gpu.mig.iter().flat_map(|mig| &mig.instances).map(|instance| &instance.uuid);
            for uuid in std::iter::once(&gpu.uuid).chain(instances) {
                check_uuid(uuid)?;
                if !uuids.insert(uuid.clone()) {
                    return Err(format!("uuid {uuid} occurs twice"));
                }
            }
        }
        for uuid in self.gpus.iter().flat_map(|gpu| gpu.nvlinks.iter().flatten()).filter_map(linked_gpu) {
            if self.gpu(uuid).is_none() {
                return Err(format!("an NVLink leads to {uuid}, which is not among the GPUs"));
            }
        }
        let mut seqs = HashSet::new();
        match self.events.iter().find(|event| event.seq == 0 || !seqs.insert(event.seq)) {
            Some(event) => Err(format!("event seq {} is 0 or occurs twice", event.seq)),
            None => Ok(()),
        }
    }
}

fn linked_gpu(link: &NvLink) -> Option<&str> {
    match &link.remote {
        Remote::Gpu(uuid) => Some(uuid),
        Remote::Switch(_) => None,
    }
}

fn check_uuid(uuid: &str) -> Result<(), String> {
    if uuid.is_empty() || uuid.len() > UUID_CHARS_MAX || uuid.contains('\0') {
        return Err(format!("uuid {uuid:?} must have 1 to {UUID_CHARS_MAX} characters without NUL"));
    }
    Ok(())
}

fn check_gpu(gpu: &Gpu) -> Result<(), String> {
    let uuid = &gpu.uuid;
    if gpu.pci_address().is_none() {
        return Err(format!("{uuid}: pci_bus_id {:?} must look like 00000000:1b:00.0", gpu.pci_bus_id));
    }
    for link in gpu.nvlinks.iter().flatten() {
        if let Remote::Switch(bus_id) = &link.remote
            && pci_address(bus_id).is_none()
        {
            return Err(format!(
                "{uuid}: an NVLink leads to switch {bus_id:?}, which must look like 00000000:d0:00.0"
            ));
        }
    }
    let mut ids = HashSet::new();
    for instance in gpu.mig.iter().flat_map(|mig| &mig.instances) {
        if Profile::of(instance).is_none() {
            return Err(format!(
                "{}: slices must be 1, 2, 3, 4 or 7, not {}, and its profile end in nothing, +me, +me.all, -me or +gfx",
                instance.uuid, instance.slices
            ));
        }
        if !ids.insert(instance.gpu_instance) {
            return Err(format!("{uuid}: two MIG devices have GPU instance {}", instance.gpu_instance));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_survives_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        let mut state = State::h100(8);
        let uuid = state.gpus[3].uuid.clone();
        state.gpus[3].run(4711, 1024);
        assert_eq!(state.push_xid(&uuid, 79), 1);
        state.faults.push(Fault::hang("nvmlDeviceGetName").of_gpu(uuid));
        state.write(&path).unwrap();
        assert_eq!(State::read(&path).unwrap(), state);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn a_short_handwritten_file_is_enough() {
        let text = r#"{"gpus": [{"uuid": "GPU-1", "name": "A", "memory_total_mib": 1024, "pci_bus_id": "0:1b:00.0"}]}"#;
        let state: State = serde_json::from_str(text).unwrap();
        assert_eq!(state.check(), Ok(()));
        assert_eq!(state.gpus[0], Gpu::new("GPU-1", "A", 1024, "0:1b:00.0"));
    }

    #[test]
    fn a_contradiction_is_reported_as_text() {
        let twice = |change: fn(&mut State)| {
            let mut state = State::h100(2);
            change(&mut state);
            state.check().unwrap_err()
        };
        assert!(twice(|state| state.gpus[1].uuid = state.gpus[0].uuid.clone()).contains("occurs twice"));
        assert!(
            twice(|state| state.gpus[1].pci_bus_id = state.gpus[0].pci_bus_id.clone()).contains("pci_bus_id")
        );
        assert!(twice(|state| state.gpus[0].pci_bus_id = "nonsense".into()).contains("must look like"));
        assert!(
            twice(|state| state.gpus[0].nvlinks[0].as_mut().unwrap().remote = Remote::Gpu("GPU-x".into()))
                .contains("GPU-x")
        );
        assert!(
            twice(|state| state.gpus[0].nvlinks[0].as_mut().unwrap().remote = Remote::Switch("x".into()))
                .contains("switch")
        );
    }

    #[test]
    fn a_misspelt_name_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        fs::write(&path, r#"{"gpus": [], "faultz": []}"#).unwrap();
        assert!(matches!(State::read(&path), Err(StateError::Json { .. })));
        assert!(matches!(
            State::read(&folder.path().join("none")),
            Err(StateError::Io { action: "read", .. })
        ));
    }
}
