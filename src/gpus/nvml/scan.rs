//! Scans all GPUs; GPUs that do not answer are kept as they were at their last scan.

use super::events::WatchedGpu;
use super::facts::{self, GpuParts, GpuScan, Identity, LoadScan};
use super::fence::{CallFailure, Lane, Pending, Steps};
use super::invoke::ReadError;
use super::links::LinkCache;
use super::{Session, map};
use berth_kernel::hardware::gpu::{
    ECC, Inventory, PARTS_MAX, Part, RECOVERY_IMEX, Reading, ScanError, UnidentifiedGpu,
};
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::pci::PciBusId;
use berth_kernel::node::ports::GpusError;
use nvml_wrapper::error::NvmlError;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;

/// Most GPUs that are scanned: each may have seven instances, and the number of parts is limited.
const GPUS_MAX: usize = PARTS_MAX / 8;

/// Scans GPUs, and keeps the results of earlier scans. NVML's indices do not change while the driver is loaded, so a
/// GPU that does not answer is identified by its index.
pub(super) struct Scanner {
    /// The last scans that were answered, by NVML index.
    gpus: BTreeMap<u32, GpuScan>,
    links: LinkCache,
    /// Lanes whose last calls exceeded their deadline, with the number of these calls.
    overdue: BTreeMap<Lane, u32>,
    /// What is known of GPUs that never answered every call, by NVML index.
    identities: BTreeMap<u32, Arc<Mutex<Identity>>>,
    /// The GPUs of the last scan without a known UUID.
    unidentified: Vec<UnidentifiedGpu>,
    /// The newest time of a GPU's samples by process, by NVML index, microseconds since 1970.
    sampled_us: BTreeMap<u32, u64>,
}

type ScanResult = Result<Result<GpuScan, ReadError>, CallFailure>;

/// A job of a series.
type SeriesJob = Box<dyn FnOnce(&Steps) -> SeriesAnswer + Send>;

/// The answer of a job of a series.
enum SeriesAnswer {
    Facts(Box<Result<GpuScan, ReadError>>),
    Load(LoadScan),
}

/// Calls in a row that may exceed their deadline before a GPU counts as hung: a driver that wakes a GPU up, or that
/// another program uses, is slow at times.
const OVERDUE_MAX: u32 = 2;

impl Scanner {
    /// A scanner that has found nothing yet, and reads NVLinks again at this interval.
    pub(super) fn new(links_interval: Duration) -> Self {
        Self {
            gpus: BTreeMap::new(),
            links: LinkCache::new(links_interval),
            overdue: BTreeMap::new(),
            identities: BTreeMap::new(),
            unidentified: Vec::new(),
            sampled_us: BTreeMap::new(),
        }
    }

    /// Scans all GPUs.
    pub(super) fn scan(&mut self, session: &Session) -> Result<Inventory, GpusError> {
        let nvml = Arc::clone(&session.library.nvml);
        let count = session.fence.run(Lane::Node, session.options.deadline, move |steps| {
            steps.at("nvmlDeviceGetCount_v2");
            nvml.device_count()
        });
        let mut inventory = Inventory {
            driver_version: session.library.driver_version.clone(),
            cuda_version: session.library.cuda_version.clone(),
            ..Inventory::default()
        };
        match count {
            Ok(Ok(count)) => {
                self.overdue.remove(&Lane::Node);
                self.scan_all(session, count, &mut inventory)?;
            }
            Ok(Err(error)) => return Err(driver_error("NVML cannot count the GPUs", error)),
            // The whole driver is slow or hangs: the GPUs are still attached.
            Err(failure) if !self.gpus.is_empty() => {
                let error = self.failure_error(Lane::Node, &failure, session);
                self.add_all(error.as_ref(), &mut inventory);
            }
            Err(failure) => {
                let what =
                    format!("{failure}: the NVIDIA driver hangs; if `nvidia-smi` hangs too, reboot the node");
                return Err(GpusError { what, source: None });
            }
        }
        self.add_links(&mut inventory);
        session.events.set_gpus(self.watched());
        Ok(inventory)
    }

    fn scan_all(
        &mut self,
        session: &Session,
        count: u32,
        inventory: &mut Inventory,
    ) -> Result<(), GpusError> {
        self.gpus.retain(|index, _| *index < count);
        self.sampled_us.retain(|index, _| *index < count);
        self.identities.retain(|index, _| *index < count);
        let (mut answered, mut failed) = (Vec::new(), Vec::new());
        let (mut scans, mut loads) = self.run_scans(session, count);
        // Before any GPU is recorded, so that all of them are reported with the error, or none.
        let concerns_driver = |scan: &ScanResult| matches!(scan, Ok(Err(ReadError::Call(_, error))) if map::is_driver_error(error));
        let failed_driver = scans.iter().position(|(_, scan)| concerns_driver(scan));
        if let Some((_, Ok(Err(ReadError::Call(call, error))))) =
            failed_driver.map(|at| scans.swap_remove(at))
        {
            return Err(driver_error(call, error));
        }
        for (index, scan) in scans {
            match scan {
                Ok(Ok(scan)) if answered.iter().any(|other: &Part| other.id == scan.parts.gpu.id) => {
                    session.start_gpu(index);
                    let reason = format!("another GPU has the same UUID, {}", scan.parts.gpu.id);
                    inventory.unidentified.push(self.unidentified_at(index, reason));
                }
                Ok(Ok(scan)) => {
                    session.start_gpu(index);
                    self.overdue.remove(&Lane::Gpu(index));
                    answered.push(scan.parts.gpu.clone());
                    if let Some(LoadScan { load, sampled_us }) = loads.remove(&index) {
                        inventory.loads.insert(scan.parts.gpu.gpu.clone(), load);
                        self.sampled_us.extend(sampled_us.map(|sampled_us| (index, sampled_us)));
                    }
                    self.record(index, scan, inventory);
                }
                Ok(Err(ReadError::Uuid(error))) => failed.push((index, Some(error.to_string().into()))),
                Ok(Err(ReadError::Call(call, error))) => {
                    failed.push((index, Some(map::gpu_error_text(call, &error).into())));
                }
                Err(failure) if self.gpus.contains_key(&index) => {
                    failed.push((index, self.failure_error(Lane::Gpu(index), &failure, session)));
                }
                Err(failure) => failed.push((index, Some(ScanError::not_ready(failure.to_string())))),
            }
        }
        self.add_failed(failed, inventory);
        for index in (0..count).skip(GPUS_MAX) {
            let reason = format!("more than {GPUS_MAX} GPUs cannot be used");
            inventory.unidentified.push(self.unidentified_at(index, reason));
        }
        if let Some(attached) = &session.attached {
            add_unlisted(attached, inventory);
        }
        self.warn_of_new(&inventory.unidentified);
        self.links.read_missing(&session.library.nvml, &session.fence, &answered);
        // In NVML's order, each GPU before its instances, whether it answered or not.
        inventory.parts.sort_by_key(|part| part.gpu_index);
        Ok(())
    }

    /// The GPU with this index, which cannot be listed for this reason.
    fn unidentified_at(&self, index: u32, reason: impl Into<String>) -> UnidentifiedGpu {
        let identity = self.identities.get(&index).map(|identity| identity.lock().clone());
        let pci_bus = identity.and_then(|identity| identity.pci_bus);
        UnidentifiedGpu { index: Some(index), pci_bus, reason: reason.into() }
    }

    /// All GPUs as they were at their last scan, each with this error; `None` if no GPU was ever found. While the
    /// driver cannot be used, the GPUs are still attached.
    pub(super) fn last_with_error(&self, error: &str) -> Option<Inventory> {
        let mut inventory = Inventory::default();
        self.add_all(Some(&error.into()), &mut inventory);
        self.add_links(&mut inventory);
        (!inventory.parts.is_empty()).then_some(inventory)
    }

    /// Adds all GPUs as they were at their last scan, with this error.
    fn add_all(&self, error: Option<&ScanError>, inventory: &mut Inventory) {
        for last in self.gpus.values() {
            last.parts.add_with_error(error.cloned(), inventory);
        }
        inventory.unidentified.clone_from(&self.unidentified);
    }

    /// The error of a GPU whose calls have no result; `None` while they are only slow.
    fn failure_error(&mut self, lane: Lane, failure: &CallFailure, session: &Session) -> Option<ScanError> {
        let hung = match failure {
            CallFailure::Hung { running, is_new, .. } => {
                let calls = self.overdue.entry(lane).or_default();
                *calls += u32::from(*is_new);
                *calls >= OVERDUE_MAX || *running >= session.options.hung_after
            }
            CallFailure::NotMade(_) => true,
        };
        hung.then(|| ScanError::not_ready(failure.to_string()))
    }

    fn add_links(&self, inventory: &mut Inventory) {
        let gpus = inventory.parts.iter().map(|part| &part.gpu).collect();
        inventory.links = self.links.between_present(&gpus);
    }

    /// Scans one GPU after the other; once one of them has hung, all others at the same time, so that a scan takes two
    /// deadlines at most, however many hang. GPUs that still have to start are scanned at the same time, too.
    ///
    /// The loads are read by the same thread, after all GPUs were scanned one by one: a load that is slow leaves out
    /// the loads after it, and nothing else. GPUs that were scanned at the same time have none.
    fn run_scans(
        &mut self,
        session: &Session,
        count: u32,
    ) -> (Vec<(u32, ScanResult)>, BTreeMap<u32, LoadScan>) {
        for index in (0..count).filter(|index| !self.gpus.contains_key(index)) {
            self.identities.entry(index).or_default();
        }
        let options = &session.options;
        let job = |index: u32| {
            let known = self.gpus.get(&index).map(|last| last.parts.clone());
            let (nvml, sysfs) = (Arc::clone(&session.library.nvml), options.sysfs.clone());
            let identity = self.identities.get(&index).map(Arc::clone).unwrap_or_default();
            move |steps: &Steps| facts::scan_gpu(&nvml, index, known, &identity, &sysfs, steps)
        };
        let start = |index: u32| -> Result<Pending<Result<GpuScan, ReadError>>, CallFailure> {
            let deadline = if session.is_started(index) { options.deadline } else { options.first_contact };
            session.fence.start(Lane::Gpu(index), deadline, job(index))
        };
        let mut done = Vec::new();
        let (starting, started): (Vec<u32>, Vec<u32>) =
            (0..count).take(GPUS_MAX).partition(|index| !session.is_started(*index));
        let starting: Vec<_> = starting.into_iter().map(|index| (index, start(index))).collect();
        done.extend(starting.into_iter().map(|(index, scan)| (index, scan.and_then(Pending::wait))));
        let facts = started.iter().map(|index| {
            let job = job(*index);
            let job: SeriesJob = Box::new(move |steps| SeriesAnswer::Facts(Box::new(job(steps))));
            (Lane::Gpu(*index), job)
        });
        let load = started.iter().map(|index| {
            let (nvml, index) = (Arc::clone(&session.library.nvml), *index);
            let sampled_us = self.sampled_us.get(&index).copied();
            let job: SeriesJob =
                Box::new(move |steps| SeriesAnswer::Load(facts::scan_load(&nvml, index, sampled_us, steps)));
            (Lane::Gpu(index), job)
        });
        let (answers, failure) = session.fence.run_series(facts.chain(load).collect(), options.deadline);
        // A load without an answer is no reason to scan anything again.
        let failure = failure.filter(|_| answers.len() < started.len());
        let (mut scans, mut loads) = (Vec::new(), BTreeMap::new());
        for (answer, index) in answers.into_iter().zip(started.iter().chain(&started)) {
            match answer {
                Some(SeriesAnswer::Load(load)) => {
                    loads.insert(*index, load);
                }
                Some(SeriesAnswer::Facts(scan)) => scans.push(Some(*scan)),
                None => scans.push(None),
            }
        }
        let mut results =
            scans.into_iter().map(|scan| scan.map(Ok)).chain(failure.map(|failure| Some(Err(failure))));
        // Those whose lane is in use, as by a call that hung before: that fails at once. And those after one that hung.
        let mut others = Vec::new();
        for index in started {
            match results.next().flatten() {
                Some(scan) => done.push((index, scan)),
                None => others.push(index),
            }
        }
        let concurrent: Vec<_> = others.into_iter().map(|index| (index, start(index))).collect();
        done.extend(concurrent.into_iter().map(|(index, started)| (index, started.and_then(Pending::wait))));
        (done, loads)
    }

    /// Records a scan, and adds it to the inventory.
    fn record(&mut self, index: u32, mut scan: GpuScan, inventory: &mut Inventory) {
        self.identities.remove(&index);
        scan.parts.add_to(inventory);
        let id = &scan.parts.gpu.gpu;
        inventory.usage.extend(std::mem::take(&mut scan.usage));
        inventory.signs.append(&mut scan.signs);
        inventory.processes.extend(scan.processes.take().map(|processes| (id.clone(), processes)));
        if let Some(reason) = &scan.fabric_error {
            inventory.scan_errors.insert(id.clone(), ScanError::not_ready(reason.clone()));
        }
        let last = self.gpus.values().find(|last| last.parts.gpu.gpu == *id);
        if let Some(errors) = scan.uncorrectable {
            // What is counted at the first scan is judged as if it had just come. The counter is reset with the GPU and
            // when the driver is loaded.
            let before = last.and_then(|last| last.uncorrectable);
            let new = errors.saturating_sub(before.unwrap_or(0));
            let since = if before.is_some() { "since the last scan" } else { "since the driver was loaded" };
            if new > 0 {
                inventory.signs.push(Reading {
                    part: id.as_part().clone(),
                    source: ECC.to_owned(),
                    code: new,
                    detail: format!("{new} uncorrectable ECC errors {since}"),
                });
            }
        }
        if last.is_some_and(|last| was_recovered(last, &scan)) {
            inventory.signs.push(facts::recovered_reading(id));
        }
        if last.is_none() && scan.parts.gpu.memory_mib == 0 {
            warn!(gpu = %id, "the memory of a GPU cannot be read: it is offered, but not in shares by memory");
        }
        let was_waiting = last.is_some_and(|last| last.fabric_error.is_some());
        if was_waiting && scan.fabric_error.is_none() {
            self.links.forget(id);
        }
        self.gpus.insert(index, scan);
    }

    /// Adds the GPUs that did not answer: as they were at their last scan, or with what they answered of their
    /// identity. One that answered under another index is not that of its last scan: then the driver has renumbered its
    /// GPUs.
    fn add_failed(&self, failed: Vec<(u32, Option<ScanError>)>, inventory: &mut Inventory) {
        for (index, error) in failed {
            let is_missing = |id: &GpuId| !inventory.parts.iter().any(|part| part.id == *id.as_part());
            if let Some(last) = self.gpus.get(&index).filter(|last| is_missing(&last.parts.gpu.gpu)) {
                last.parts.add_with_error(error, inventory);
                continue;
            }
            let error = error.unwrap_or_else(|| ScanError::not_ready("it does not answer"));
            let identity = self.identities.get(&index).map(|identity| identity.lock().clone());
            match identity.and_then(|identity| identity.into_part(index)).filter(|part| is_missing(&part.gpu))
            {
                Some(part) => {
                    inventory.incomplete.insert(part.gpu.clone());
                    inventory.scan_errors.insert(part.gpu.clone(), error);
                    inventory.parts.push(part);
                }
                None => inventory.unidentified.push(self.unidentified_at(index, error.reason)),
            }
        }
    }

    /// Logs the GPUs that are not identified, each once for each reason.
    fn warn_of_new(&mut self, unidentified: &[UnidentifiedGpu]) {
        for gpu in unidentified.iter().filter(|gpu| !self.unidentified.contains(gpu)) {
            warn!(why = gpu.reason, "{gpu} is counted, but not offered: its UUID is not known");
        }
        self.unidentified = unidentified.to_vec();
    }

    /// The GPUs whose events are collected.
    fn watched(&self) -> Vec<WatchedGpu> {
        let watched = |(index, scan): (&u32, &GpuScan)| {
            let instances = scan.parts.instances.iter();
            WatchedGpu {
                handle: scan.handle,
                index: *index,
                gpu: scan.parts.gpu.gpu.clone(),
                instances: instances
                    .filter_map(|part| Some((map::mig_ids(part)?, part.id.clone())))
                    .collect(),
            }
        };
        self.gpus.iter().map(watched).collect()
    }
}

/// Adds the GPUs that the kernel driver has and NVML does not list, as after one fell off the bus before NVML was
/// opened. A GPU that NVML lists without its bus id is the one that remains, if only one does.
fn add_unlisted(attached: &BTreeSet<PciBusId>, inventory: &mut Inventory) {
    let listed = inventory.parts.iter().filter(|part| part.is_whole_gpu()).map(|part| part.pci_bus);
    let buses: Vec<_> = listed.chain(inventory.unidentified.iter().map(|gpu| gpu.pci_bus)).collect();
    let mut others = attached.iter().filter(|bus| !buses.contains(&Some(**bus)));
    match (buses.iter().filter(|bus| bus.is_none()).count(), others.clone().count()) {
        (0, _) => inventory.unidentified.extend(others.map(|bus| UnidentifiedGpu {
            index: None,
            pci_bus: Some(*bus),
            reason: "the driver has it, but NVML does not list it: check the kernel log for Xid 79, and reboot the node"
                .into(),
        })),
        (1, 1) => {
            if let Some(gpu) = inventory.unidentified.iter_mut().find(|gpu| gpu.pci_bus.is_none()) {
                gpu.pci_bus = others.next().copied();
            }
        }
        _ => {}
    }
}

/// Whether a GPU was reset, or otherwise recovered, between two scans: the driver no longer requires what it required,
/// or its counter of ECC errors began again.
fn was_recovered(last: &GpuScan, scan: &GpuScan) -> bool {
    let requires =
        |action: Option<u32>| action.is_some_and(|action| ![0, RECOVERY_IMEX].contains(&action.into()));
    let fewer_errors = last.uncorrectable.zip(scan.uncorrectable).is_some_and(|(before, now)| now < before);
    (requires(last.action) && scan.action == Some(0)) || (fewer_errors && !requires(scan.action))
}

/// The error of a scan that the whole driver failed, with the remedy.
fn driver_error(what: &str, error: NvmlError) -> GpusError {
    GpusError {
        what: format!(
            "{what} ({error}): check that `nvidia-smi` works on the node; NVML is opened again at the next scan"
        ),
        source: Some(Box::new(error)),
    }
}

impl GpuParts {
    fn add_to(&self, inventory: &mut Inventory) {
        inventory.parts.push(self.gpu.clone());
        inventory.parts.extend(self.instances.iter().cloned());
    }

    /// Adds the GPU as it was at its last scan, with this error; without one if it is only slow.
    fn add_with_error(&self, error: Option<ScanError>, inventory: &mut Inventory) {
        self.add_to(inventory);
        inventory.scan_errors.extend(error.map(|error| (self.gpu.gpu.clone(), error)));
    }
}
