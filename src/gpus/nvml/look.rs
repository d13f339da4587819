//! One look at all GPUs, and the memory of earlier ones.

use super::events::Watched;
use super::facts::{self, Failed, Known, Visit};
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

/// Most GPUs that are looked at: each may have seven instances, and parts are limited.
const GPUS_MAX: usize = PARTS_MAX / 8;

/// A GPU as it was when it last answered.
struct Remembered {
    part: Part,
    instances: Vec<Part>,
    known: Known,
    handle: usize,
    /// Uncorrectable ECC errors so far. The counter begins anew with the driver.
    uncorrectable: Option<u64>,
}

/// What earlier looks found. NVML's indices do not move while the driver is loaded, so a GPU that
/// does not answer is known by its index.
#[derive(Default)]
pub(super) struct Memory {
    gpus: BTreeMap<u32, Remembered>,
    links: LinkCache,
    /// Indices of GPUs that never answered and were warned of.
    nameless: BTreeSet<u32>,
}

type Visited = Result<Result<Visit, Failed>, Stuck>;

impl Memory {
    /// Looks at every GPU.
    pub(super) fn look(
        &mut self,
        session: &Session,
        fence: &Fence,
        options: &NvmlOptions,
    ) -> Result<Inventory, GpusError> {
        let nvml = Arc::clone(&session.nvml);
        let counted = fence.run(Lane::Node, options.deadline, move |steps| {
            steps.at("nvmlDeviceGetCount_v2");
            nvml.device_count()
        });
        let mut inventory = Inventory {
            driver_version: session.driver_version.clone(),
            cuda_version: session.cuda_version.clone(),
            ..Inventory::default()
        };
        match counted {
            Ok(Ok(count)) => self.visit_all(session, fence, options, count, &mut inventory)?,
            Ok(Err(error)) => return Err(unusable("NVML cannot count the GPUs", error)),
            // The whole driver hangs. The GPUs are still there, and none of them can be trusted.
            Err(stuck) if !self.gpus.is_empty() => {
                for old in self.gpus.values() {
                    old.remembered(&stuck.to_string(), &mut inventory);
                }
            }
            Err(stuck) => {
                return Err(GpusError {
                    what: format!(
                        "{stuck}: the NVIDIA driver hangs; see whether `nvidia-smi` does too, then reboot the node"
                    ),
                    source: None,
                });
            }
        }
        let gpus = inventory.parts.iter().map(Part::gpu).collect();
        inventory.links = self.links.among(&gpus);
        session.events.watch(self.watched());
        Ok(inventory)
    }

    fn visit_all(
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
        let visits = self.visits(session, fence, options, &indices);
        let mut answered = BTreeSet::new();
        let mut failed = Vec::new();
        for (index, visited) in visits {
            match visited {
                Ok(Ok(visit)) => {
                    if self.note(index, visit, inventory) {
                        answered.insert(index);
                    }
                }
                Ok(Err(Failed { call, error })) if is_the_drivers(&error) => {
                    return Err(unusable(call, error));
                }
                Ok(Err(Failed { call, error })) => {
                    failed.push((index, map::gpu_trouble(call, &error)));
                }
                Err(stuck) => failed.push((index, stuck.to_string())),
            }
        }
        self.tell_failed(failed, inventory);
        let parts: Vec<Part> =
            answered.iter().filter_map(|index| Some(self.gpus.get(index)?.part.clone())).collect();
        let parts: Vec<&Part> = parts.iter().collect();
        self.links.read_missing(&session.nvml, fence, &parts);
        // In NVML's order, each GPU before its instances, whether it answered or not.
        inventory.parts.sort_by_key(|part| part.gpu_index);
        Ok(())
    }

    /// All GPUs as they were, in trouble; `None` if none was ever seen. They are still there, and while
    /// their driver cannot be asked, none of them can be trusted.
    pub(super) fn all_in_trouble(&self, trouble: &str) -> Option<Inventory> {
        let mut inventory = Inventory::default();
        for old in self.gpus.values() {
            old.remembered(trouble, &mut inventory);
        }
        let gpus = inventory.parts.iter().map(Part::gpu).collect();
        inventory.links = self.links.among(&gpus);
        (!inventory.parts.is_empty()).then_some(inventory)
    }

    /// Visits one GPU after the other; once one of them has hung, all others at the same time, so
    /// that a look takes two deadlines at most however many hang.
    fn visits(
        &self,
        session: &Session,
        fence: &Fence,
        options: &NvmlOptions,
        indices: &[u32],
    ) -> Vec<(u32, Visited)> {
        let start = |index: u32| -> Result<Pending<Result<Visit, Failed>>, Stuck> {
            let known = self.gpus.get(&index).map(|old| old.known.clone());
            let (nvml, sysfs) = (Arc::clone(&session.nvml), options.sysfs.clone());
            fence.start(Lane::Gpu(index), options.deadline, move |steps| {
                facts::visit(&nvml, index, &known.unwrap_or_default(), &sysfs, steps)
            })
        };
        let mut done = Vec::new();
        let mut rest = indices.iter().copied();
        for index in rest.by_ref() {
            // A lane that is overdue answers at once, and does not count.
            let (waited, visited) = match start(index) {
                Ok(pending) => (true, pending.wait()),
                Err(stuck) => (false, Err(stuck)),
            };
            let hung = waited && visited.is_err();
            done.push((index, visited));
            if hung {
                break;
            }
        }
        let together: Vec<_> = rest.map(|index| (index, start(index))).collect();
        done.extend(together.into_iter().map(|(index, started)| (index, started.and_then(Pending::wait))));
        done
    }

    /// Takes down what a visit found. False if NVML calls a part by a name that cannot be used.
    fn note(&mut self, index: u32, visit: Visit, inventory: &mut Inventory) -> bool {
        let new = match Remembered::new(index, &visit) {
            Ok(new) => new,
            Err(error) => {
                self.warn_once(index, &error.to_string());
                return false;
            }
        };
        self.nameless.remove(&index);
        inventory.parts.push(new.part.clone());
        inventory.parts.extend(new.instances.iter().cloned());
        let usages = visit.instances.iter().map(|(_, _, usage)| usage);
        let seen = std::iter::once(&visit.usage).chain(usages);
        for (part, usage) in std::iter::once(&new.part).chain(&new.instances).zip(seen) {
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
        inventory.signs.extend(visit.signs.into_iter().map(|s| reading(s.source, s.code, s.detail)));
        let before = self.gpus.values().find(|old| old.part.id == new.part.id);
        let counted = before.and_then(|old| old.uncorrectable).zip(new.uncorrectable);
        if let Some((old, now)) = counted.filter(|(old, now)| now > old) {
            let errors = now - old;
            let detail = format!("{errors} uncorrectable ECC errors since the last look");
            inventory.signs.push(reading("ecc", errors, detail));
        }
        if let Some(running) = &visit.running {
            let told = running.iter().map(|one| one.process(&new.part.id, &new.instances));
            inventory.processes.insert(new.part.id.clone(), told.take(PROCESSES_PER_GPU_MAX).collect());
        }
        self.gpus.insert(index, new);
        true
    }

    /// GPUs that did not answer keep their last known facts, unless those turned up elsewhere,
    /// which happens when the driver has numbered its GPUs anew.
    fn tell_failed(&mut self, failed: Vec<(u32, String)>, inventory: &mut Inventory) {
        for (index, trouble) in failed {
            let seen = |old: &&Remembered| !inventory.parts.iter().any(|p| p.id == old.part.id);
            match self.gpus.get(&index).filter(seen) {
                Some(old) => old.remembered(&trouble, inventory),
                None => self.warn_once(index, &trouble),
            }
        }
    }

    fn warn_once(&mut self, index: u32, why: &str) {
        if self.nameless.insert(index) {
            warn!(index, why, "a GPU is not offered: NVML did not report its UUID");
        }
    }

    /// What the event thread is to watch.
    fn watched(&self) -> Vec<Watched> {
        let watched = |(index, gpu): (&u32, &Remembered)| Watched {
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

/// Whether an error on one GPU concerns the driver as a whole: it was unloaded, or replaced by one that
/// this copy of the library does not fit.
fn is_the_drivers(error: &NvmlError) -> bool {
    matches!(error, NvmlError::Uninitialized | NvmlError::DriverNotLoaded | NvmlError::LibRmVersionMismatch)
}

fn unusable(what: &str, error: NvmlError) -> GpusError {
    GpusError {
        what: format!(
            "{what} ({error}): see that `nvidia-smi` works on the node; NVML is opened anew with the next look"
        ),
        source: Some(Box::new(error)),
    }
}

impl Remembered {
    fn new(index: u32, visit: &Visit) -> Result<Self, BadName> {
        let part = map::gpu_part(&visit.facts, index, visit.mig_enabled)?;
        let instances = visit.instances.iter();
        Ok(Self {
            instances: instances
                .clone()
                .map(|(facts, index, _)| map::instance_part(facts, *index, &part))
                .collect::<Result<_, _>>()?,
            part,
            handle: visit.handle,
            uncorrectable: visit.uncorrectable,
            known: Known {
                gpu: Some(visit.facts.clone()),
                instances: instances.map(|(facts, ..)| facts.clone()).collect(),
            },
        })
    }

    /// The GPU as it was, and what is wrong with it.
    fn remembered(&self, trouble: &str, inventory: &mut Inventory) {
        inventory.parts.push(self.part.clone());
        inventory.parts.extend(self.instances.iter().cloned());
        inventory.troubles.insert(self.part.id.clone(), trouble.to_owned());
    }
}
