//! The drain state of a GPU: whether it may be granted, and the progress of emptying it.
//!
//! `active -> cordoned -> draining -> drained -> active`; uncordoning leads back from any of them.

use super::time::Now;

/// The drain state of one GPU, named as in kubectl.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Drain {
    /// It is granted as offered.
    #[default]
    Active,
    /// Nothing new is granted; existing allocations stay (I3, I4).
    Cordoned(Mark),
    /// Cordoned and being drained.
    Draining(Mark, Order),
    /// Cordoned, with no allocations and no processes left.
    Drained(Mark),
}

/// The author, time and reason of a cordon or drain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The name of the caller's token, or `config`.
    pub by: String,
    /// The operator's reason; may be empty.
    pub why: String,
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
}

/// How a GPU is to be drained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Whether its pods are evicted through the API server. Held devices are listed Unhealthy meanwhile,
    /// so that the kubelet does not allocate a freed one again.
    pub evict: bool,
    /// The deadline, milliseconds since 1970; a wall clock time, because it must survive a restart.
    pub deadline_wall_ms: Option<u64>,
    /// What happens at the deadline if the drain is not complete.
    pub at_deadline: AtDeadline,
}

/// What happens to an incomplete drain at its deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtDeadline {
    /// It continues, and is reported as late.
    #[default]
    Wait,
    /// The remaining pods are deleted, regardless of their disruption budgets.
    Delete,
    /// It is cancelled; the GPU stays cordoned.
    GiveUp,
}

impl Drain {
    /// Its value in the API.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Cordoned(_) => "cordoned",
            Self::Draining(..) => "draining",
            Self::Drained(_) => "drained",
        }
    }

    /// The mark of the cordon or drain; `None` while active.
    #[must_use]
    pub fn mark(&self) -> Option<&Mark> {
        match self {
            Self::Active => None,
            Self::Cordoned(mark) | Self::Draining(mark, _) | Self::Drained(mark) => Some(mark),
        }
    }

    /// The order of a drain in progress.
    #[must_use]
    pub fn order(&self) -> Option<&Order> {
        match self {
            Self::Draining(_, order) => Some(order),
            _ => None,
        }
    }

    /// Whether its holders are being evicted.
    #[must_use]
    pub fn evicts(&self) -> bool {
        self.order().is_some_and(|order| order.evict)
    }

    /// The state after a cordon. A GPU that is already out of use keeps its state and takes the new reason.
    pub(super) fn after_cordon(&self, mark: &Mark) -> Self {
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

    /// The state after an order to drain. A new order replaces an old one.
    pub(super) fn after_order(&self, mark: &Mark, order: Order) -> Self {
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

    /// The state after a drain is cancelled: still cordoned.
    pub(super) fn after_cancel(&self) -> Self {
        match self {
            Self::Draining(mark, _) | Self::Drained(mark) => Self::Cordoned(mark.clone()),
            Self::Active | Self::Cordoned(_) => self.clone(),
        }
    }
}

impl Order {
    /// Whether its deadline has passed.
    #[must_use]
    pub fn is_late(&self, now: Now) -> bool {
        self.deadline_wall_ms.is_some_and(|deadline| now.wall_ms >= deadline)
    }
}

/// Suffix of the reason of a drain that was given up. Stores contain it.
const GIVEN_UP: &str = "drain given up at its deadline";

/// The reason with the suffix [`GIVEN_UP`].
pub(super) fn with_given_up(why: &str) -> String {
    let why = without_given_up(why);
    if why.is_empty() { GIVEN_UP.to_owned() } else { format!("{why}; {GIVEN_UP}") }
}

/// Whether a GPU is cordoned because its drain was given up at the deadline.
#[must_use]
pub fn was_given_up(drain: &Drain) -> bool {
    matches!(drain, Drain::Cordoned(mark) if without_given_up(&mark.why) != mark.why)
}

/// The reason without the suffix of [`with_given_up`], which older stores have in parentheses.
fn without_given_up(why: &str) -> &str {
    let in_parentheses = why.strip_suffix(')').and_then(|why| why.strip_suffix(GIVEN_UP)?.strip_suffix('('));
    let Some(before) = in_parentheses.or_else(|| why.strip_suffix(GIVEN_UP)) else { return why };
    match before.strip_suffix("; ").or_else(|| before.strip_suffix(' ')) {
        Some(operators) => operators,
        None if before.is_empty() => before,
        // The operator's reason happens to end with the same text.
        None => why,
    }
}

/// The reason after a new order: its own, or else the operator's previous reason without the suffix of a
/// drain that was given up.
fn newest_why(first: &Mark, mark: &Mark) -> String {
    if mark.why.is_empty() { without_given_up(&first.why).to_owned() } else { mark.why.clone() }
}

/// Since when a draining GPU has no processes, monotonic milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Empty {
    /// Since when no scan found a process, including scans that could not list processes.
    pub unused_since_mono_ms: u64,
    /// Since when every scan listed no process; `None` if the newest scan could not list processes.
    pub seen_since_mono_ms: Option<u64>,
}
