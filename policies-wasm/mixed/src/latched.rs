//! `advertise: latched`: the mode of each GPU.
//!
//! A GPU changes its mode only if it is usable, has had no holder for `settleSeconds`, its new mode has
//! fewer GPUs than its reserve, and its old mode has more than its own reserve. So each change reduces the
//! sum of both shortages, and no change is reverted without new demand.

use crate::Reserve;
use crate::gpu::Gpu;

/// How a GPU is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Whole,
    Shared,
}

impl Mode {
    fn other(self) -> Self {
        match self {
            Self::Whole => Self::Shared,
            Self::Shared => Self::Whole,
        }
    }
}

/// The mode to list each GPU in, and when to plan again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// In the order of the GPUs.
    pub(crate) modes: Vec<Mode>,
    /// Set while a GPU that is needed in the other mode has had no holder for less than `settleSeconds`.
    pub(crate) again_after_seconds: Option<u32>,
}

pub(crate) fn plan(gpus: &[Gpu<'_>], reserve: Reserve, settle_seconds: u32) -> Plan {
    let mut plan = Plan { modes: first_modes(gpus, reserve), again_after_seconds: None };
    for wanted in [Mode::Whole, Mode::Shared] {
        plan.change_over(gpus, reserve, settle_seconds, wanted);
    }
    plan
}

/// GPUs without a mode get one without delay: the scheduler cannot have assigned them yet. The last ones
/// are shared, as many as the reserve lacks; all others are whole, and so are all if there are too few GPUs
/// for both.
fn first_modes(gpus: &[Gpu<'_>], reserve: Reserve) -> Vec<Mode> {
    let has_room = |mode: Mode| {
        let with_room = gpus.iter().filter(|gpu| gpu.usable && gpu.room && gpu.mode == Some(mode));
        with_room.count()
    };
    let unset = gpus.iter().filter(|gpu| gpu.usable && gpu.mode.is_none()).count();
    let whole_lacks = reserve.whole.saturating_sub(has_room(Mode::Whole));
    let shared_lacks = reserve.shared.saturating_sub(has_room(Mode::Shared));
    let mut to_share = shared_lacks.min(unset.saturating_sub(whole_lacks));
    let mut modes: Vec<_> = gpus
        .iter()
        .rev()
        .map(|gpu| match gpu.mode {
            Some(mode) => mode,
            None if gpu.usable && to_share > 0 => {
                to_share -= 1;
                Mode::Shared
            }
            None => Mode::Whole,
        })
        .collect();
    modes.reverse();
    modes
}

impl Plan {
    /// Changes GPUs to the mode `wanted` while that mode is short and the other has more than its reserve.
    fn change_over(&mut self, gpus: &[Gpu<'_>], reserve: Reserve, settle: u32, wanted: Mode) {
        let mut lacks = reserve.of(wanted).saturating_sub(self.room(gpus, wanted));
        let other = wanted.other();
        let mut spare = self.room(gpus, other).saturating_sub(reserve.of(other));
        let mut candidates: Vec<_> =
            (0..gpus.len()).filter(|&n| gpus[n].usable && !gpus[n].held && self.modes[n] == other).collect();
        // Whole GPUs are kept at the front and shared ones at the back, as in `first_modes`.
        if wanted == Mode::Shared {
            candidates.reverse();
        }
        let (settled, settling): (Vec<_>, Vec<_>) =
            candidates.into_iter().partition(|&n| gpus[n].part.idle_seconds >= settle);
        for n in settled {
            if lacks == 0 || spare == 0 {
                return;
            }
            self.modes[n] = wanted;
            lacks -= 1;
            spare -= 1;
        }
        if lacks > 0 && spare > 0 {
            let left = settling.into_iter().map(|n| settle - gpus[n].part.idle_seconds).min();
            self.again_after_seconds = [self.again_after_seconds, left].into_iter().flatten().min();
        }
    }

    /// The number of usable GPUs of a mode of which a device can be granted.
    fn room(&self, gpus: &[Gpu<'_>], mode: Mode) -> usize {
        let of_mode = gpus.iter().zip(&self.modes).filter(|(_, set)| **set == mode);
        of_mode.filter(|(gpu, _)| gpu.usable && gpu.room).count()
    }
}

impl Reserve {
    fn of(self, mode: Mode) -> usize {
        match mode {
            Mode::Whole => self.whole,
            Mode::Shared => self.shared,
        }
    }
}
