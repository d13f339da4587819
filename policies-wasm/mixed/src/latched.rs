//! `advertise: latched`: which GPU is in which mode.
//!
//! A GPU changes over only if it is usable, nobody holds anything on it, nobody has for
//! `settleSeconds`, its new mode is short of its reserve, and its old mode has more than its own.
//! So each change makes the sum of both shortages smaller, and none is ever taken back without new
//! demand.

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

/// What to list each GPU as, and when to look again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// In the order of the GPUs.
    pub(crate) modes: Vec<Mode>,
    /// Set while a GPU that is wanted in the other mode still settles.
    pub(crate) again_after_seconds: Option<u32>,
}

pub(crate) fn plan(gpus: &[Gpu<'_>], reserve: Reserve, settle_seconds: u32) -> Plan {
    let mut plan = Plan { modes: first_modes(gpus, reserve), again_after_seconds: None };
    for wanted in [Mode::Whole, Mode::Shared] {
        plan.change_over(gpus, reserve, settle_seconds, wanted);
    }
    plan
}

/// Modes of GPUs that have none get one at once: nobody was promised them. The last ones become
/// shares, as many as the reserve lacks; all others are whole, which also wins where there are too
/// few GPUs for both.
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
    /// Changes GPUs over to `wanted` while that mode is short and the other can spare one.
    fn change_over(&mut self, gpus: &[Gpu<'_>], reserve: Reserve, settle: u32, wanted: Mode) {
        let mut lacks = reserve.of(wanted).saturating_sub(self.room(gpus, wanted));
        let other = wanted.other();
        let mut spare = self.room(gpus, other).saturating_sub(reserve.of(other));
        let mut candidates: Vec<_> =
            (0..gpus.len()).filter(|&n| gpus[n].usable && !gpus[n].held && self.modes[n] == other).collect();
        // Whole GPUs gather at the front, shared ones at the back, as at first.
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

    /// Usable GPUs of a mode on which something can be had.
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
