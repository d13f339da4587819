//! Scans all GPUs; GPUs that do not answer are kept as they were at their last scan.

use super::events::WatchedGpu;
use super::facts::{self, CallError, GpuScan, KnownFacts};
use super::fence::{Fence, Lane, Pending, Stuck};
use super::links::LinkCache;
use super::{NvmlOptions, Session, map};
use berth_kernel::gpu::{Inventory, PARTS_MAX, Part, Reading, Usage};
use berth_kernel::names::BadName;
use berth_kernel::ports::GpusError;
use berth_kernel::process::PROCESSES_PER_GPU_MAX;
use nvml_wrapper::error::NvmlError;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tracing::warn;

/// Most GPUs that are scanned: each may have seven instances, and the number of parts is limited.
const GPUS_MAX: usize = PARTS_MAX / 8;

/// A GPU as it was when it last answered.
struct LastScan {
    part: Part,
    instances: Vec<Part>,
    known: KnownFacts,
    handle: usize,
    /// Uncorrectable ECC errors so far. The counter is reset when the driver is loaded.
    uncorrectable: Option<u64>,
}

/// Scans GPUs, and keeps the results of earlier scans. NVML's indices do not change while the driver is loaded, so a
/// GPU that does not answer is identified by its index.
#[derive(Default)]
pub(super) struct Scanner {
    gpus: BTreeMap<u32, LastScan>,
    links: LinkCache,
    /// Indices of GPUs without a known UUID for which a warning was logged.
    warned: BTreeSet<u32>,
}

type ScanResult = Result<Result<GpuScan, CallError>, Stuck>;

impl Scanner {
    /// Scans all GPUs.
    pub(super) fn scan(
        &mut self,
        session: &Session,
        fence: &Fence,
        options: &NvmlOptions,
    ) -> Result<Inventory, GpusError> {
        let nvml = Arc::clone(&session.nvml);
        let count = fence.run(Lane::Node, options.deadline, move |steps| {
            steps.at("nvmlDeviceGetCount_v2");
            nvml.device_count()
        });
        let mut inventory = Inventory {
            driver_version: session.driver_version.clone(),
            cuda_version: session.cuda_version.clone(),
            ..Inventory::default()
        };
        match count {
            Ok(Ok(count)) => self.scan_all(session, fence, options, count, &mut inventory)?,
            Ok(Err(error)) => return Err(driver_error("NVML cannot count the GPUs", error)),
            // The whole driver hangs: the GPUs are still attached, but each has an error.
            Err(stuck) if !self.gpus.is_empty() => {
                for last in self.gpus.values() {
                    last.add_with_error(&stuck.to_string(), &mut inventory);
                }
            }
            Err(stuck) => {
                return Err(GpusError {
                    what: format!(
                        "{stuck}: the NVIDIA driver hangs; if `nvidia-smi` hangs too, reboot the node"
                    ),
                    source: None,
                });
            }
        }
        let gpus = inventory.parts.iter().map(Part::gpu).collect();
        inventory.links = self.links.between_present(&gpus);
        session.events.set_gpus(self.watched());
        Ok(inventory)
    }

    fn scan_all(
        &mut self,
        session: &Session,
        fence: &Fence,
        options: &NvmlOptions,
        count: u32,
        inventory: &mut Inventory,
    ) -> Result<(), GpusError> {
        let most = u32::try_from(GPUS_MAX).unwrap_or(u32::MAX);
        let indices: Vec<u32> = (0..count.min(most)).collect();
        self.gpus.retain(|index, _| *index < count);
        let scans = self.run_scans(session, fence, options, &indices);
        let mut answered = BTreeSet::new();
        let mut failed = Vec::new();
        for (index, scan) in scans {
            match scan {
                Ok(Ok(scan)) => {
                    if self.record(index, scan, inventory) {
                        answered.insert(index);
                    }
                }
                Ok(Err(CallError { call, error })) if is_driver_error(&error) => {
                    return Err(driver_error(call, error));
                }
                Ok(Err(CallError { call, error })) => {
                    failed.push((index, map::gpu_error_text(call, &error)));
                }
                Err(stuck) => failed.push((index, stuck.to_string())),
            }
        }
        self.add_failed(failed, inventory);
        let parts: Vec<Part> =
            answered.iter().filter_map(|index| Some(self.gpus.get(index)?.part.clone())).collect();
        let parts: Vec<&Part> = parts.iter().collect();
        self.links.read_missing(&session.nvml, fence, &parts);
        // In NVML's order, each GPU before its instances, whether it answered or not.
        inventory.parts.sort_by_key(|part| part.gpu_index);
        Ok(())
    }

    /// All GPUs as they were at their last scan, each with this error; `None` if no GPU was ever found. While the
    /// driver cannot be used, the GPUs are still attached.
    pub(super) fn last_with_error(&self, error: &str) -> Option<Inventory> {
        let mut inventory = Inventory::default();
        for last in self.gpus.values() {
            last.add_with_error(error, &mut inventory);
        }
        let gpus = inventory.parts.iter().map(Part::gpu).collect();
        inventory.links = self.links.between_present(&gpus);
        (!inventory.parts.is_empty()).then_some(inventory)
    }

    /// Scans one GPU after the other; once one of them has hung, all others at the same time, so that a scan takes two
    /// deadlines at most, however many hang.
    fn run_scans(
        &self,
        session: &Session,
        fence: &Fence,
        options: &NvmlOptions,
        indices: &[u32],
    ) -> Vec<(u32, ScanResult)> {
        let start = |index: u32| -> Result<Pending<Result<GpuScan, CallError>>, Stuck> {
            let known = self.gpus.get(&index).map(|last| last.known.clone());
            let (nvml, sysfs) = (Arc::clone(&session.nvml), options.sysfs.clone());
            fence.start(Lane::Gpu(index), options.deadline, move |steps| {
                facts::scan_gpu(&nvml, index, &known.unwrap_or_default(), &sysfs, steps)
            })
        };
        let mut done = Vec::new();
        let mut rest = indices.iter().copied();
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

    /// Records a scan, and adds it to the inventory. Returns false if a UUID from NVML cannot be used as a part's id.
    fn record(&mut self, index: u32, scan: GpuScan, inventory: &mut Inventory) -> bool {
        let new = match LastScan::new(index, &scan) {
            Ok(new) => new,
            Err(error) => {
                self.warn_once(index, &error.to_string());
                return false;
            }
        };
        self.warned.remove(&index);
        inventory.parts.push(new.part.clone());
        inventory.parts.extend(new.instances.iter().cloned());
        let usages = scan.instances.iter().map(|(_, _, usage)| usage);
        let usages = std::iter::once(&scan.usage).chain(usages);
        for (part, usage) in std::iter::once(&new.part).chain(&new.instances).zip(usages) {
            if let Some(usage) = usage {
                inventory.usage.insert(part.id.clone(), Usage::clone(usage));
            }
        }
        let reading = |source: &str, code, detail| Reading {
            part: new.part.id.clone(),
            source: source.to_owned(),
            code,
            detail,
        };
        inventory.signs.extend(scan.problems.into_iter().map(|p| reading(p.source, p.code, p.detail)));
        let last = self.gpus.values().find(|last| last.part.id == new.part.id);
        let counts = last.and_then(|last| last.uncorrectable).zip(new.uncorrectable);
        if let Some((old, now)) = counts.filter(|(old, now)| now > old) {
            let errors = now - old;
            let detail = format!("{errors} uncorrectable ECC errors since the last scan");
            inventory.signs.push(reading("ecc", errors, detail));
        }
        if let Some(processes) = &scan.processes {
            let processes = processes.iter().map(|one| one.to_process(&new.part.id, &new.instances));
            inventory.processes.insert(new.part.id.clone(), processes.take(PROCESSES_PER_GPU_MAX).collect());
        }
        self.gpus.insert(index, new);
        true
    }

    /// Adds the GPUs that did not answer, as they were at their last scan. A GPU that answered under another index is
    /// left out: then the driver has renumbered its GPUs.
    fn add_failed(&mut self, failed: Vec<(u32, String)>, inventory: &mut Inventory) {
        for (index, error) in failed {
            let is_missing = |last: &&LastScan| !inventory.parts.iter().any(|p| p.id == last.part.id);
            match self.gpus.get(&index).filter(is_missing) {
                Some(last) => last.add_with_error(&error, inventory),
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
        let watched = |(index, gpu): (&u32, &LastScan)| WatchedGpu {
            handle: gpu.handle,
            index: *index,
            gpu: gpu.part.id.clone(),
            instances: gpu
                .instances
                .iter()
                .filter_map(|part| {
                    let mig = part.mig.as_ref()?;
                    Some(((mig.gpu_instance, mig.compute_instance), part.id.clone()))
                })
                .collect(),
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

impl LastScan {
    fn new(index: u32, scan: &GpuScan) -> Result<Self, BadName> {
        let part = map::gpu_part(&scan.facts, index, scan.mig_enabled)?;
        let instances = scan.instances.iter();
        Ok(Self {
            instances: instances
                .clone()
                .map(|(facts, index, _)| map::instance_part(facts, *index, &part))
                .collect::<Result<_, _>>()?,
            part,
            handle: scan.handle,
            uncorrectable: scan.uncorrectable,
            known: KnownFacts {
                gpu: Some(scan.facts.clone()),
                instances: instances.map(|(facts, ..)| facts.clone()).collect(),
            },
        })
    }

    /// Adds the GPU as it was at its last scan, with this error.
    fn add_with_error(&self, error: &str, inventory: &mut Inventory) {
        inventory.parts.push(self.part.clone());
        inventory.parts.extend(self.instances.iter().cloned());
        inventory.scan_errors.insert(self.part.id.clone(), error.to_owned());
    }
}
