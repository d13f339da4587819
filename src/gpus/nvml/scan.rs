//! Scans all GPUs; GPUs that do not answer are kept as they were at their last scan.

use super::events::WatchedGpu;
use super::facts::{self, GpuParts, GpuScan, ReadError};
use super::fence::{Lane, Pending, Stuck};
use super::links::LinkCache;
use super::{Session, map};
use berth_kernel::gpu::{ECC, Inventory, PARTS_MAX, Part, Reading};
use berth_kernel::ports::GpusError;
use nvml_wrapper::error::NvmlError;
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
    /// Indices of GPUs without a known UUID for which a warning was logged.
    warned: BTreeSet<u32>,
}

type ScanResult = Result<Result<GpuScan, ReadError>, Stuck>;

impl Scanner {
    /// A scanner that has found nothing yet, and reads NVLinks again at this interval.
    pub(super) fn new(links_interval: Duration) -> Self {
        Self { gpus: BTreeMap::new(), links: LinkCache::new(links_interval), warned: BTreeSet::new() }
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
            Ok(Ok(count)) => self.scan_all(session, count, &mut inventory)?,
            Ok(Err(error)) => return Err(driver_error("NVML cannot count the GPUs", error)),
            // The whole driver hangs: the GPUs are still attached, but each has an error.
            Err(stuck) if !self.gpus.is_empty() => {
                self.add_all_with_error(&stuck.to_string(), &mut inventory);
            }
            Err(stuck) => {
                let what =
                    format!("{stuck}: the NVIDIA driver hangs; if `nvidia-smi` hangs too, reboot the node");
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
        let (mut answered, mut failed) = (Vec::new(), Vec::new());
        for (index, scan) in self.run_scans(session, count) {
            match scan {
                Ok(Ok(scan)) => {
                    answered.push(scan.parts.gpu.clone());
                    self.record(index, scan, inventory);
                }
                Ok(Err(ReadError::Uuid(error))) => self.warn_once(index, &error.to_string()),
                Ok(Err(ReadError::Call(call, error))) if is_driver_error(&error) => {
                    return Err(driver_error(call, error));
                }
                Ok(Err(ReadError::Call(call, error))) => {
                    failed.push((index, map::gpu_error_text(call, &error)));
                }
                Err(stuck) => failed.push((index, stuck.to_string())),
            }
        }
        self.add_failed(failed, inventory);
        self.links.read_missing(&session.library.nvml, &session.fence, &answered);
        // In NVML's order, each GPU before its instances, whether it answered or not.
        inventory.parts.sort_by_key(|part| part.gpu_index);
        Ok(())
    }

    /// All GPUs as they were at their last scan, each with this error; `None` if no GPU was ever found. While the
    /// driver cannot be used, the GPUs are still attached.
    pub(super) fn last_with_error(&self, error: &str) -> Option<Inventory> {
        let mut inventory = Inventory::default();
        self.add_all_with_error(error, &mut inventory);
        self.add_links(&mut inventory);
        (!inventory.parts.is_empty()).then_some(inventory)
    }

    fn add_all_with_error(&self, error: &str, inventory: &mut Inventory) {
        for last in self.gpus.values() {
            last.parts.add_with_error(error, inventory);
        }
    }

    fn add_links(&self, inventory: &mut Inventory) {
        let gpus = inventory.parts.iter().map(Part::gpu).collect();
        inventory.links = self.links.between_present(&gpus);
    }

    /// Scans one GPU after the other; once one of them has hung, all others at the same time, so that a scan takes two
    /// deadlines at most, however many hang.
    fn run_scans(&self, session: &Session, count: u32) -> Vec<(u32, ScanResult)> {
        let options = &session.options;
        let start = |index: u32| -> Result<Pending<Result<GpuScan, ReadError>>, Stuck> {
            let last = self.gpus.get(&index);
            let (known, rows) = (last.map(|last| last.parts.clone()), last.and_then(|last| last.rows));
            let (nvml, sysfs) = (Arc::clone(&session.library.nvml), options.sysfs.clone());
            session.fence.start(Lane::Gpu(index), options.deadline, move |steps| {
                facts::scan_gpu(&nvml, index, known, rows, &sysfs, steps)
            })
        };
        let mut done = Vec::new();
        let mut rest = (0..count).take(GPUS_MAX);
        for index in rest.by_ref() {
            // A lane that is overdue already fails at once, and does not count.
            let (waited, scan) = match start(index) {
                Ok(pending) => (true, pending.wait()),
                Err(stuck) => (false, Err(stuck)),
            };
            let hung = waited && scan.is_err();
            done.push((index, scan));
            if hung {
                break;
            }
        }
        let concurrent: Vec<_> = rest.map(|index| (index, start(index))).collect();
        done.extend(concurrent.into_iter().map(|(index, started)| (index, started.and_then(Pending::wait))));
        done
    }

    /// Records a scan, and adds it to the inventory.
    fn record(&mut self, index: u32, mut scan: GpuScan, inventory: &mut Inventory) {
        self.warned.remove(&index);
        scan.parts.add_to(inventory);
        let id = &scan.parts.gpu.id;
        inventory.usage.extend(std::mem::take(&mut scan.usage));
        inventory.signs.append(&mut scan.signs);
        inventory.processes.extend(scan.processes.take().map(|processes| (id.clone(), processes)));
        let last = self.gpus.values().find(|last| last.parts.gpu.id == *id);
        // The counter is reset when the driver is loaded.
        let counts = last.and_then(|last| last.uncorrectable).zip(scan.uncorrectable);
        if let Some((old, now)) = counts.filter(|(old, now)| now > old) {
            let errors = now - old;
            inventory.signs.push(Reading {
                part: id.clone(),
                source: ECC.to_owned(),
                code: errors,
                detail: format!("{errors} uncorrectable ECC errors since the last scan"),
            });
        }
        self.gpus.insert(index, scan);
    }

    /// Adds the GPUs that did not answer, as they were at their last scan. A GPU that answered under another index is
    /// left out: then the driver has renumbered its GPUs.
    fn add_failed(&mut self, failed: Vec<(u32, String)>, inventory: &mut Inventory) {
        for (index, error) in failed {
            let is_missing = |last: &&GpuScan| !inventory.parts.iter().any(|p| p.id == last.parts.gpu.id);
            match self.gpus.get(&index).filter(is_missing) {
                Some(last) => last.parts.add_with_error(&error, inventory),
                None => self.warn_once(index, &error),
            }
        }
    }

    fn warn_once(&mut self, index: u32, why: &str) {
        if self.warned.insert(index) {
            warn!(index, why, "a GPU is not offered: NVML did not report its UUID");
        }
    }

    /// The GPUs whose events are collected.
    fn watched(&self) -> Vec<WatchedGpu> {
        let watched = |(index, scan): (&u32, &GpuScan)| {
            let instances = scan.parts.instances.iter();
            WatchedGpu {
                handle: scan.handle,
                index: *index,
                gpu: scan.parts.gpu.id.clone(),
                instances: instances
                    .filter_map(|part| Some((map::mig_ids(part)?, part.id.clone())))
                    .collect(),
            }
        };
        self.gpus.iter().map(watched).collect()
    }
}

/// Whether an error on one GPU concerns the whole driver: it was unloaded, or replaced by one of another version than
/// this library.
fn is_driver_error(error: &NvmlError) -> bool {
    matches!(error, NvmlError::Uninitialized | NvmlError::DriverNotLoaded | NvmlError::LibRmVersionMismatch)
}

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

    /// Adds the GPU as it was at its last scan, with this error.
    fn add_with_error(&self, error: &str, inventory: &mut Inventory) {
        self.add_to(inventory);
        inventory.scan_errors.insert(self.gpu.id.clone(), error.to_owned());
    }
}
