//! The parameters of `memory`.

use berth_policy_sdk::Selector;
use serde::Deserialize;

/// The parameters of `memory`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// The sizes that GPUs are cut into.
    pub sizes: Vec<Size>,
    /// The part of the GPU's compute that a slice gets.
    pub compute: Compute,
    /// The GPUs to cut; all if it is missing.
    pub only: Option<Vec<Selector>>,
}

/// One size of slice.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Size {
    /// The resource of these slices.
    pub resource: String,
    /// Memory of one slice, MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// The maximum number of these slices per GPU; as many as fit if it is missing.
    pub max_per_gpu: Option<u32>,
}

/// The part of the GPU's compute that a slice gets.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum Compute {
    /// No compute is reserved, and the container gets no limit: all holders of the GPU compete.
    #[default]
    None,
    /// The same percentage as of the memory.
    Proportional,
}

impl Default for Parameters {
    /// Two sizes that fit on any GPU with 16 GiB or more.
    fn default() -> Self {
        let size = |name: &str, memory_mib| Size {
            resource: format!("nvidia.com/gpu.mem-{name}"),
            memory_mib,
            max_per_gpu: None,
        };
        Self { sizes: vec![size("4g", 4_096), size("8g", 8_192)], compute: Compute::None, only: None }
    }
}
