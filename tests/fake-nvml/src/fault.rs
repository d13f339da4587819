//! Calls that are slow, hang, or fail.

use serde::{Deserialize, Serialize};

use crate::code::Code;

/// What befalls some calls. The first fault of the file that matches a call counts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Symbol name as programs look it up (`nvmlDeviceGetMemoryInfo_v2`), or with `*` at its end to match every symbol
    /// that starts so: `nvmlDeviceGetMemoryInfo*`, `*`.
    pub call: String,
    /// UUID of the GPU (or MIG device) that the call must name; absent: any call of the symbol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// The call does not return as long as the file has this fault.
    #[serde(default, skip_serializing_if = "is_false")]
    pub hang: bool,
    /// The call takes so many milliseconds longer. It ends early if the fault leaves the file.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub delay_ms: u64,
    /// Only so many calls, counted by each process; absent: every call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u32>,
    /// The call answers this and does nothing else.
    #[serde(default, rename = "return", skip_serializing_if = "Option::is_none")]
    pub answer: Option<Code>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_false(value: &bool) -> bool {
    !*value
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

impl Fault {
    /// Calls of `call` hang until the fault is taken away.
    pub fn hang(call: impl Into<String>) -> Self {
        Self { hang: true, ..Self::on(call) }
    }

    /// Calls of `call` take `delay_ms` milliseconds longer.
    pub fn slow(call: impl Into<String>, delay_ms: u64) -> Self {
        Self { delay_ms, ..Self::on(call) }
    }

    /// Calls of `call` answer `code`.
    pub fn fail(call: impl Into<String>, code: Code) -> Self {
        Self { answer: Some(code), ..Self::on(call) }
    }

    /// Only calls that name this GPU.
    #[must_use]
    pub fn of_gpu(mut self, uuid: impl Into<String>) -> Self {
        self.gpu = Some(uuid.into());
        self
    }

    /// Only the next `times` calls.
    #[must_use]
    pub fn times(mut self, times: u32) -> Self {
        self.times = Some(times);
        self
    }

    fn on(call: impl Into<String>) -> Self {
        Self { call: call.into(), gpu: None, hang: false, delay_ms: 0, times: None, answer: None }
    }

    /// Whether a call of `symbol` on `gpus` (the GPU, and its MIG device if that was named) is meant.
    pub(crate) fn matches(&self, symbol: &str, gpus: &[&str]) -> bool {
        let called = match self.call.strip_suffix('*') {
            Some(start) => symbol.starts_with(start),
            None => symbol == self.call,
        };
        called && self.gpu.as_deref().is_none_or(|gpu| gpus.contains(&gpu))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_matches_by_name_by_start_and_by_gpu() {
        let any = Fault::hang("nvmlDeviceGetMemoryInfo*");
        assert!(any.matches("nvmlDeviceGetMemoryInfo_v2", &[]));
        assert!(!any.matches("nvmlDeviceGetName", &[]));
        let one = Fault::slow("nvmlDeviceGetName", 5).of_gpu("GPU-a");
        assert!(one.matches("nvmlDeviceGetName", &["GPU-a"]));
        assert!(!one.matches("nvmlDeviceGetName", &["GPU-b"]));
        assert!(!one.matches("nvmlDeviceGetName", &[]));
        assert!(!one.matches("nvmlDeviceGetNameX", &["GPU-a"]));
    }
}
