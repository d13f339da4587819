//! Handles: what NVML's opaque pointers are here.
//!
//! A handle is a number in a pointer's place and is never followed, so that a wild one is refused and not a crash. A
//! handle stays good for the life of the process, as it names a UUID and not a place in a list: whether that GPU is
//! still there is read in each call.

use std::sync::{Mutex, PoisonError};

use crate::code::{Answer, Code};

/// Handles lie this far apart and above zero, so that they look like pointers and a neighbour is none.
const STEP: usize = 16;

/// Added to all numbers: no program has its first page mapped, and a small number is more often a mistake than a
/// handle.
const BASE: usize = 0x4e56_0000;

/// An `nvmlDevice_t`, `nvmlGpuInstance_t` or `nvmlComputeInstance_t`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Handle(usize);

/// What a handle stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// A GPU, or a MIG device, by UUID.
    Device(String),
    /// A GPU instance of the GPU with this UUID.
    GpuInstance(String, u32),
    /// A compute instance: GPU, GPU instance id, compute instance id.
    ComputeInstance(String, u32, u32),
}

/// Every meaning that ever got a handle. It grows with the number of different GPUs that the process saw, not with
/// calls.
static KNOWN: Mutex<Vec<Meaning>> = Mutex::new(Vec::new());

impl Handle {
    /// The handle of this meaning: always the same one.
    pub(crate) fn of(meaning: Meaning) -> Self {
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let at = known.iter().position(|other| *other == meaning).unwrap_or_else(|| {
            known.push(meaning);
            known.len() - 1
        });
        Self(BASE + at * STEP)
    }

    /// The handle of a GPU or MIG device.
    pub(crate) fn of_device(uuid: &str) -> Self {
        Self::of(Meaning::Device(uuid.to_owned()))
    }

    /// What the handle stands for; anything that is none of ours is an invalid argument.
    pub(crate) fn meaning(self) -> Answer<Meaning> {
        let distance =
            self.0.checked_sub(BASE).filter(|distance| distance % STEP == 0).ok_or(Code::InvalidArgument)?;
        let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(distance / STEP).cloned().ok_or(Code::InvalidArgument)
    }

    /// The UUID of a GPU or MIG device.
    pub(crate) fn device(self) -> Answer<String> {
        match self.meaning()? {
            Meaning::Device(uuid) => Ok(uuid),
            Meaning::GpuInstance(..) | Meaning::ComputeInstance(..) => Err(Code::InvalidArgument),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_stable_and_an_invalid_one_is_refused() {
        let a = Handle::of_device("GPU-handle-test");
        assert!(a == Handle::of_device("GPU-handle-test"));
        assert_eq!(a.device().unwrap(), "GPU-handle-test");
        let instance = Handle::of(Meaning::GpuInstance("GPU-handle-test".into(), 7));
        assert_eq!(instance.device(), Err(Code::InvalidArgument));
        for wild in [0, 1, BASE - STEP, BASE + 1, BASE + 1_000_000 * STEP, usize::MAX] {
            assert_eq!(Handle(wild).meaning(), Err(Code::InvalidArgument));
        }
    }
}
