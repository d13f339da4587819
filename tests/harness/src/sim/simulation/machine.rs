//! The GPUs as they really are.

use super::event::Driver;
use super::rng::Rng;
use berth_kernel::hardware::gpu::{Inventory, Mig, Part, ScanError};
use berth_kernel::ids::names::{GpuId, PartId};
use std::collections::BTreeSet;

/// The node's hardware.
#[derive(Debug)]
pub(crate) struct Machine {
    /// Every part that there ever was; GPUs before their instances.
    parts: Vec<Part>,
    gone: BTreeSet<PartId>,
    failing: BTreeSet<GpuId>,
    pub(crate) driver: Driver,
}

impl Machine {
    /// One to three GPUs; at times the last is in MIG mode, with two instances.
    pub(crate) fn new(rng: &mut Rng) -> Self {
        let gpus = 1 + rng.below(3);
        let memory_mib = rng.of(&[1_000, 4_001, 81_559]);
        let whole = |i| part(&format!("GPU-{i}"), &format!("GPU-{i}"), memory_mib);
        let mut parts: Vec<Part> = (0..gpus).map(&whole).collect();
        if rng.chance(40) {
            let mut gpu = whole(gpus);
            gpu.mig_enabled = true;
            let host = gpu.id.to_string();
            parts.push(gpu);
            for i in 0..2 {
                let mut instance = part(&format!("MIG-{i}"), &host, memory_mib / 4);
                instance.mig = Some(Mig { profile: "1g.10gb".into(), gpu_instance: i, compute_instance: 0 });
                parts.push(instance);
            }
        }
        Self { parts, gone: BTreeSet::new(), failing: BTreeSet::new(), driver: Driver::Ready }
    }

    /// Some part, modulo how many there are.
    pub(crate) fn part(&self, which: u32) -> &Part {
        &self.parts[which as usize % self.parts.len()]
    }

    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }

    pub(crate) fn vanish(&mut self, which: u32) {
        let id = self.part(which).id.clone();
        self.gone.insert(id);
    }

    pub(crate) fn come_back(&mut self, which: u32) {
        let id = self.part(which).id.clone();
        self.gone.remove(&id);
    }

    pub(crate) fn trouble(&mut self, which: u32, on: bool) {
        let gpu = self.part(which).gpu.clone();
        if on {
            self.failing.insert(gpu.clone());
        } else {
            self.failing.remove(&gpu);
        }
    }

    /// Everything is there and works.
    pub(crate) fn mend(&mut self) {
        self.gone.clear();
        self.failing.clear();
        self.driver = Driver::Ready;
    }

    /// The result of a scan.
    pub(crate) fn inventory(&self) -> Inventory {
        let there = |p: &&Part| !self.gone.contains(&p.id) && !self.gone.contains(p.gpu.as_part());
        let parts: Vec<Part> = self.parts.iter().filter(there).cloned().collect();
        let gpus: BTreeSet<&GpuId> = parts.iter().map(|part| &part.gpu).collect();
        let of_all = match self.driver {
            Driver::Ready => None,
            Driver::Hung => Some(ScanError::not_ready("a call does not answer")),
            Driver::Released => Some(ScanError::not_ready("the driver was released")),
            Driver::Fabric => Some(ScanError::not_ready("its NVLink fabric is not ready")),
            Driver::Replaced => Some("the driver is not loaded".into()),
        };
        let own = |gpu: &GpuId| self.failing.contains(gpu).then(|| "it does not answer".into());
        let errors =
            gpus.into_iter().filter_map(|gpu| Some((gpu.clone(), own(gpu).or_else(|| of_all.clone())?)));
        let scan_errors = errors.collect();
        Inventory { parts, scan_errors, ..Inventory::default() }
    }
}

fn part(id: &str, gpu: &str, memory_mib: u64) -> Part {
    Part {
        id: PartId::parse(id).expect("letters and digits"),
        model: "simulated".into(),
        memory_mib,
        ..Part::whole_gpu(GpuId::parse(gpu).expect("letters and digits"), 0)
    }
}
