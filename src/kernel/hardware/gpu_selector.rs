//! Selectors of GPUs in the configuration (`gpus.exclude`).

use crate::hardware::gpu::{Inventory, Part, UnidentifiedGpu};
use crate::ids::names::PartId;
use crate::ids::pci::PciBusId;
use std::fmt;

/// Selects GPUs by one property.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuSelector {
    /// NVML's index, which may be another GPU's after a reboot or a change of the hardware.
    Index(u32),
    /// The UUID.
    Uuid(PartId),
    /// The PCI bus id.
    PciBus(PciBusId),
    /// The product name as NVML reports it; a `*` at its end matches any text.
    Model(String),
}

impl GpuSelector {
    /// Parses a selector: a number is an index, a text in the form of a UUID or of a PCI bus id is one, and every other
    /// text is a model.
    ///
    /// # Errors
    /// Why it can select no GPU.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() {
            return text.parse().map(Self::Index).map_err(|_| "an index is at most 4294967295");
        }
        if let Ok(bus) = PciBusId::parse(text) {
            return Ok(Self::PciBus(bus));
        }
        match PartId::parse(text) {
            Ok(id) if id.as_str().starts_with("MIG-") => {
                Err("exclude the GPU of this MIG instance, by its own UUID")
            }
            Ok(id) if id.is_nvidia_uuid() => Ok(Self::Uuid(id)),
            _ if text.trim_end_matches('*').trim().is_empty() => Err("it would exclude every GPU"),
            _ => Ok(Self::Model(text.to_owned())),
        }
    }

    /// Whether it selects this GPU.
    #[must_use]
    pub fn selects(&self, gpu: &Part) -> bool {
        match self {
            Self::Index(index) => gpu.gpu_index == *index,
            Self::Uuid(id) => gpu.id == *id,
            Self::PciBus(bus) => gpu.pci_bus == Some(*bus),
            Self::Model(model) => match model.strip_suffix('*') {
                Some(beginning) => gpu.model.starts_with(beginning),
                None => gpu.model == *model,
            },
        }
    }

    /// Whether it selects this GPU, whose UUID and model are not known.
    fn selects_unidentified(&self, gpu: &UnidentifiedGpu) -> bool {
        match self {
            Self::Index(index) => gpu.index == Some(*index),
            Self::PciBus(bus) => gpu.pci_bus == Some(*bus),
            Self::Uuid(_) | Self::Model(_) => false,
        }
    }
}

impl fmt::Display for GpuSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Uuid(id) => write!(f, "{id}"),
            Self::PciBus(bus) => write!(f, "{bus}"),
            Self::Model(model) => f.write_str(model),
        }
    }
}

impl Inventory {
    /// Marks the GPUs that these selectors select as excluded, and leaves out those of them whose UUID is not known.
    /// Returns the selectors that select none.
    pub fn exclude<'s>(&mut self, selectors: &'s [GpuSelector]) -> Vec<&'s GpuSelector> {
        let gpus: Vec<&Part> = self.parts.iter().filter(|part| part.is_whole_gpu()).collect();
        let unidentified = std::mem::take(&mut self.unidentified);
        let is_used = |selector: &&GpuSelector| {
            gpus.iter().any(|gpu| selector.selects(gpu))
                || unidentified.iter().any(|gpu| selector.selects_unidentified(gpu))
        };
        let unused = selectors.iter().filter(|selector| !is_used(selector)).collect();
        let selected = |gpu: &&&Part| selectors.iter().any(|selector| selector.selects(gpu));
        self.excluded = gpus.iter().filter(selected).map(|gpu| gpu.gpu.clone()).collect();
        let is_left = |gpu: &UnidentifiedGpu| !selectors.iter().any(|s| s.selects_unidentified(gpu));
        self.unidentified = unidentified.into_iter().filter(is_left).collect();
        unused
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::names::GpuId;

    fn gpu() -> Part {
        Part {
            model: "NVIDIA T400 4GB".into(),
            pci_bus: PciBusId::parse("0000:1b:00.0").ok(),
            ..Part::whole_gpu(GpuId::parse("GPU-8a56a4bc-e184-a047-2620-be19fdf913d5").unwrap(), 3)
        }
    }

    #[test]
    fn a_gpu_is_selected_by_index_uuid_bus_id_or_model_in_any_spelling() {
        for text in [
            "3",
            "gpu-8A56A4BC-e184-a047-2620-be19fdf913d5",
            "1B:00.0",
            "00000000:1b:00.0",
            "NVIDIA T400 4GB",
            "NVIDIA T4*",
        ] {
            assert!(GpuSelector::parse(text).unwrap().selects(&gpu()), "{text}");
        }
        for text in ["4", "GPU-8a56a4bc-e184-a047-2620-be19fdf913d6", "1c:00.0", "T400", "NVIDIA T400"] {
            assert!(!GpuSelector::parse(text).unwrap().selects(&gpu()), "{text}");
        }
        for text in ["", "*", " ", "99999999999", "MIG-8a56a4bc-e184-a047-2620-be19fdf913d5"] {
            assert!(GpuSelector::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_selector_that_selects_no_gpu_is_returned() {
        let mut inventory = Inventory { parts: vec![gpu()], ..Inventory::default() };
        let selectors = [GpuSelector::Index(3), GpuSelector::Index(7)];
        assert_eq!(inventory.exclude(&selectors), [&selectors[1]]);
        assert!(inventory.excluded.contains(&gpu().gpu));
    }

    #[test]
    fn a_gpu_whose_uuid_is_not_known_is_left_out_by_index_or_bus_id() {
        let lost = |index, bus| UnidentifiedGpu {
            index,
            pci_bus: PciBusId::parse(bus).ok(),
            reason: "it does not answer".into(),
        };
        let unidentified = vec![lost(Some(7), "0000:db:00.0"), lost(None, "0000:dc:00.0"), lost(Some(9), "")];
        let mut inventory = Inventory { unidentified: unidentified.clone(), ..Inventory::default() };
        let selectors = ["7", "DC:00.0"].map(|text| GpuSelector::parse(text).unwrap());
        assert!(inventory.exclude(&selectors).is_empty());
        assert_eq!(inventory.unidentified, unidentified[2..]);
    }
}
