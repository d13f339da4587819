//! Whether an operator lets a GPU be granted, and how far it is emptied.
//!
//! `active -> cordoned -> draining -> drained -> active`; uncordoning leads back from any of them.

use super::change::Change;
use super::ledger::{GpuState, Ledger};
use super::names::PartId;
use super::part_state::PartState;
use super::time::{Now, Timing};

/// The drain state of one GPU, in kubectl's words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Drain {
    /// Granted as offered.
    #[default]
    Active,
    /// Nothing new is granted; what is held stays (I3, I4).
    Cordoned(Mark),
    /// Cordoned, and to be emptied.
    Draining(Mark, Order),
    /// Cordoned, and nobody holds any of it.
    Drained(Mark),
}

/// Who did it, when and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Who: the token's name, or `config`.
    pub by: String,
    /// Why, in the operator's words; may be empty.
    pub why: String,
    /// When, milliseconds since 1970.
    pub since_wall_ms: u64,
}

/// How a GPU is to be emptied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Whether its pods are asked to leave, through the API server. Held devices are listed
    /// Unhealthy meanwhile, so that no freed one is given away again.
    pub evict: bool,
    /// By when, milliseconds since 1970. By the wall clock, since it outlives a restart.
    pub deadline_wall_ms: Option<u64>,
    /// What becomes of a drain that is not done by then.
    pub at_deadline: AtDeadline,
}

/// What becomes of a drain at its deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtDeadline {
    /// It goes on, and is shown as late.
    #[default]
    Wait,
    /// Pods that are still there are deleted, whatever their disruption budgets say.
    Delete,
    /// It is called off; the GPU stays cordoned.
    GiveUp,
}

impl Drain {
    /// As the API writes it.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Cordoned(_) => "cordoned",
            Self::Draining(..) => "draining",
            Self::Drained(_) => "drained",
        }
    }

    /// Who turned it, when and why; nobody did while it is active.
    #[must_use]
    pub fn mark(&self) -> Option<&Mark> {
        match self {
            Self::Active => None,
            Self::Cordoned(mark) | Self::Draining(mark, _) | Self::Drained(mark) => Some(mark),
        }
    }

    /// Its order while it is being emptied.
    #[must_use]
    pub fn order(&self) -> Option<&Order> {
        match self {
            Self::Draining(_, order) => Some(order),
            _ => None,
        }
    }

    /// Whether its holders are being asked to leave.
    #[must_use]
    pub fn evicts(&self) -> bool {
        self.order().is_some_and(|order| order.evict)
    }

    /// After a cordon: what is cordoned in any way stays as it is, but for another reason.
    pub(super) fn cordoned(&self, mark: &Mark) -> Self {
        let Some(first) = self.mark() else {
            return Self::Cordoned(mark.clone());
        };
        let why = newest_why(first, mark);
        if why == first.why {
            return self.clone();
        }
        let mark = Mark { by: mark.by.clone(), why, since_wall_ms: first.since_wall_ms };
        match self {
            Self::Active | Self::Cordoned(_) => Self::Cordoned(mark),
            Self::Draining(_, order) => Self::Draining(mark, *order),
            Self::Drained(_) => Self::Drained(mark),
        }
    }

    /// After an order to drain. A new order takes the place of an old one.
    pub(super) fn ordered(&self, mark: &Mark, order: Order) -> Self {
        match self {
            Self::Drained(_) => self.clone(),
            Self::Draining(first, _) => {
                let why = newest_why(first, mark);
                Self::Draining(Mark { by: mark.by.clone(), why, since_wall_ms: first.since_wall_ms }, order)
            }
            Self::Cordoned(first) => {
                Self::Draining(Mark { why: newest_why(first, mark), ..mark.clone() }, order)
            }
            Self::Active => Self::Draining(mark.clone(), order),
        }
    }

    /// After a drain was called off: still cordoned.
    pub(super) fn called_off(&self) -> Self {
        match self {
            Self::Draining(mark, _) | Self::Drained(mark) => Self::Cordoned(mark.clone()),
            Self::Active | Self::Cordoned(_) => self.clone(),
        }
    }
}

impl Order {
    /// Whether its deadline is over.
    #[must_use]
    pub fn is_late(&self, now: Now) -> bool {
        self.deadline_wall_ms.is_some_and(|deadline| now.wall_ms >= deadline)
    }
}

/// What time does to the drains of all GPUs: deadlines, and holders that came.
pub(super) fn ticked(ledger: &Ledger, now: Now) -> Vec<Change> {
    ledger.gpus.iter().filter_map(|(gpu, state)| tick_one(ledger, gpu, state, now)).collect()
}

fn tick_one(ledger: &Ledger, gpu: &PartId, state: &GpuState, now: Now) -> Option<Change> {
    let turned = |drain| Some(Change::DrainTurned { gpu: gpu.clone(), drain });
    let held = held(ledger, gpu);
    match &state.drain {
        // A container may come again to what it held (I4): then it is not empty after all.
        Drain::Drained(mark) if held => turned(Drain::Draining(mark.clone(), Order::default())),
        // An empty one is on its way to drained, however late.
        Drain::Draining(mark, order)
            if order.at_deadline == AtDeadline::GiveUp
                && order.is_late(now)
                && (held || parts(ledger, gpu).any(|p| busy(ledger, &p.part.id)) || busy(ledger, gpu)) =>
        {
            turned(Drain::Cordoned(Mark { why: given_up(&mark.why), ..mark.clone() }))
        }
        _ if held && state.empty.is_some() => Some(Change::Emptied { gpu: gpu.clone(), empty: None }),
        _ => None,
    }
}

/// What is added to the reason of a drain that was given up.
const GIVEN_UP: &str = "drain given up at its deadline";

/// The reason of a drain that was given up.
fn given_up(why: &str) -> String {
    let why = operators_why(why);
    if why.is_empty() { GIVEN_UP.to_owned() } else { format!("{why}; {GIVEN_UP}") }
}

/// Whether a GPU is cordoned since a drain of it was given up at its deadline.
#[must_use]
pub fn was_given_up(drain: &Drain) -> bool {
    matches!(drain, Drain::Cordoned(mark) if operators_why(&mark.why) != mark.why)
}

/// A reason without what [`given_up`] added to it, now or in the words of older stores (in parentheses).
fn operators_why(why: &str) -> &str {
    let without = why.strip_suffix(')').and_then(|why| why.strip_suffix(GIVEN_UP)?.strip_suffix('('));
    let Some(rest) = without.or_else(|| why.strip_suffix(GIVEN_UP)) else { return why };
    match rest.strip_suffix("; ").or_else(|| rest.strip_suffix(' ')) {
        Some(why) => why,
        None if rest.is_empty() => rest,
        // These are the operator's own words.
        None => why,
    }
}

/// The reason after a new order: its own, or the operator's of the one before. That an earlier drain was
/// given up is over with it.
fn newest_why(first: &Mark, mark: &Mark) -> String {
    if mark.why.is_empty() { operators_why(&first.why).to_owned() } else { mark.why.clone() }
}

/// Since when a GPU that is drained has nobody on it, monotonic milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Empty {
    /// Since when no look found anybody, those among them that could not tell.
    pub unused_since_mono_ms: u64,
    /// Since when every look saw that there is nobody; `None` if the newest could not tell.
    pub seen_since_mono_ms: Option<u64>,
}

/// What a look found on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Processes.
    Busy,
    /// No process, or the GPU is gone.
    Empty,
    /// The GPU could not be asked, or does not tell.
    Unknown,
}

/// What a look does to the drain of one GPU. Only looks make a GPU drained: a pod that was deleted
/// by force leaves the kubelet's `List` while its processes still run.
pub(super) fn looked(
    ledger: &Ledger,
    gpu: &PartId,
    found: impl FnOnce() -> Found,
    timing: &Timing,
    now: Now,
) -> Option<Change> {
    let state = ledger.gpus.get(gpu)?;
    let emptied = |empty| (state.empty != empty).then(|| Change::Emptied { gpu: gpu.clone(), empty });
    let Drain::Draining(mark, _) = &state.drain else {
        return emptied(None);
    };
    if held(ledger, gpu) {
        return emptied(None);
    }
    let seen = match found() {
        Found::Busy => return emptied(None),
        Found::Empty => true,
        Found::Unknown => false,
    };
    if state.empty.is_some_and(|empty| empty.lasted(seen, timing, now)) {
        let drain = Drain::Drained(Mark { since_wall_ms: now.wall_ms, ..mark.clone() });
        return Some(Change::DrainTurned { gpu: gpu.clone(), drain });
    }
    let (before, now) = (state.empty, now.mono_ms);
    emptied(Some(Empty {
        unused_since_mono_ms: before.map_or(now, |empty| empty.unused_since_mono_ms),
        // What nobody could see in between says nothing of it: two looks must see that it is empty, and
        // all between them.
        seen_since_mono_ms: seen.then(|| before.and_then(|empty| empty.seen_since_mono_ms).unwrap_or(now)),
    }))
}

impl Empty {
    /// Whether that is so for long enough at a look that sees nobody (`seen`), or cannot tell.
    fn lasted(self, seen: bool, timing: &Timing, now: Now) -> bool {
        let seen = self.seen_since_mono_ms.filter(|_| seen);
        // A GPU that cannot be asked is drained all the same once its last pod had time to die: broken
        // GPUs are what is drained most. So is one that can be asked only now and then.
        let unseen_ms = timing.drained_unseen_ms.max(timing.drained_ms);
        seen.is_some_and(|since| now.passed(since, timing.drained_ms))
            || now.passed(self.unused_since_mono_ms, unseen_ms)
    }
}

fn held(ledger: &Ledger, gpu: &PartId) -> bool {
    parts(ledger, gpu).any(PartState::held)
}

/// By the newest look.
fn busy(ledger: &Ledger, part: &PartId) -> bool {
    ledger.processes_on(part).is_some_and(|processes| processes > 0)
}

fn parts<'l>(ledger: &'l Ledger, gpu: &'l PartId) -> impl Iterator<Item = &'l PartState> {
    ledger.parts.values().map(AsRef::as_ref).filter(move |p| p.part.gpu() == gpu)
}

#[cfg(test)]
mod tests;
