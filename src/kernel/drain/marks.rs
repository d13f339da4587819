//! Marks take a GPU out of use: cordons and drains, at most one per owner. The drain state of a GPU follows
//! from its marks.
//!
//! `active -> cordoned -> draining -> drained -> active`; without marks a GPU is active.

use crate::drain::eviction::EvictionMethod;
use crate::ids::names::BadName;
use crate::ids::time::Now;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Most marks of one GPU.
pub const MARKS_MAX: usize = 8;
/// Most bytes of the owners, authors and reasons of one GPU's marks: JSON doubles a quote or backslash, so a
/// record has at most 2 x 7000 bytes of text and 8 x 150 of the rest, less than 16 KiB.
pub const MARKS_TEXT_BYTES_MAX: usize = 7000;
/// Longest owner in bytes: `api:` and the longest name of a caller, with room for other kinds.
pub const OWNER_BYTES_MAX: usize = 160;

/// The first bytes of an owner that is a GPUMaintenance.
const MAINTENANCE: &str = "fleet:";
/// The first bytes of an owner that is a DeviceTaintRule.
const TAINT_RULE: &str = "taintRule:";

/// The owner of a mark: `api:` with the name of a caller, `fleet:` with the UID of a GPUMaintenance, `taintRule:` with the UID
/// of a DeviceTaintRule, or `operator` for a mark from a store in which marks had no owner. Other kinds of later releases
/// are kept as they are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner(Arc<str>);

impl Owner {
    /// A caller of the admin API; the name is cut to fit.
    #[must_use]
    pub fn api(caller: &str) -> Self {
        let text = format!("api:{caller}");
        Self(text[..text.floor_char_boundary(OWNER_BYTES_MAX)].into())
    }

    /// The GPUMaintenance with this UID.
    ///
    /// # Errors
    /// If the UID makes the owner longer than [`OWNER_BYTES_MAX`], or holds a control character.
    pub fn maintenance(uid: &str) -> Result<Self, BadName> {
        Self::parse(&format!("{MAINTENANCE}{uid}"))
    }

    /// The DeviceTaintRule with this UID.
    ///
    /// # Errors
    /// If the UID makes the owner longer than [`OWNER_BYTES_MAX`], or holds a control character.
    pub fn taint_rule(uid: &str) -> Result<Self, BadName> {
        Self::parse(&format!("{TAINT_RULE}{uid}"))
    }

    /// Whether it is a GPUMaintenance.
    #[must_use]
    pub fn is_maintenance(&self) -> bool {
        self.0.starts_with(MAINTENANCE)
    }

    /// Whether it is a DeviceTaintRule.
    #[must_use]
    pub fn is_taint_rule(&self) -> bool {
        self.0.starts_with(TAINT_RULE)
    }

    /// Whether it is an object of the API server: a GPUMaintenance or a DeviceTaintRule. Its mark is removed when the object is
    /// deleted, and by no command that names all owners.
    #[must_use]
    pub fn is_object(&self) -> bool {
        self.is_maintenance() || self.is_taint_rule()
    }

    /// The owner of a mark that was made before marks had owners. Each caller may remove it.
    #[must_use]
    pub fn operator() -> Self {
        Self("operator".into())
    }

    /// Parses an owner of any kind.
    ///
    /// # Errors
    /// If it is empty, longer than [`OWNER_BYTES_MAX`], or holds a control character.
    pub fn parse(text: &str) -> Result<Self, BadName> {
        if text.is_empty() || text.len() > OWNER_BYTES_MAX || text.chars().any(char::is_control) {
            return Err(BadName::new("owner", text, "1 to 160 bytes without control characters"));
        }
        Ok(Self(text.into()))
    }

    /// The owner as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The owners whose marks a command changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owners {
    /// All owners except GPUMaintenances and DeviceTaintRules, whose marks are removed when the object is deleted.
    All,
    /// This owner. If it is a caller, [`Owner::operator`], too.
    One(Owner),
}

impl Owners {
    fn contains(&self, owner: &Owner) -> bool {
        match self {
            Self::All => !owner.is_object(),
            Self::One(one) => one == owner || (!one.is_object() && *owner == Owner::operator()),
        }
    }
}

/// The author of a mark, as a command names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Author {
    /// The owner of the mark.
    pub owner: Owner,
    /// The name of the caller.
    pub by: String,
    /// The caller's reason; may be empty.
    pub why: String,
}

impl Author {
    /// A caller of the admin API.
    #[must_use]
    pub fn api(by: String, why: String) -> Self {
        Self { owner: Owner::api(&by), by, why }
    }
}

/// One owner's cordon or drain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Whether it also drains the GPU.
    pub kind: MarkKind,
    /// The name of the caller.
    pub by: String,
    /// The caller's reason; may be empty.
    pub why: String,
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// Whether it was a drain that was given up at its deadline.
    pub expired: bool,
}

/// The kind of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkKind {
    /// Nothing new is granted; existing allocations stay (I3, I4).
    Cordon,
    /// Cordoned and drained.
    Drain(Order),
}

impl Mark {
    /// A cordon of this author.
    #[must_use]
    pub fn cordon(by: &str, why: &str, since_wall_ms: u64) -> Self {
        Self { kind: MarkKind::Cordon, by: by.into(), why: why.into(), since_wall_ms, expired: false }
    }

    /// The reason, and whether its drain was given up.
    #[must_use]
    pub fn reason(&self) -> String {
        const GIVEN_UP: &str = "drain given up at its deadline";
        match (self.expired, self.why.as_str()) {
            (false, why) => why.to_owned(),
            (true, "") => GIVEN_UP.to_owned(),
            (true, why) => format!("{why}; {GIVEN_UP}"),
        }
    }

    /// The order of a drain.
    #[must_use]
    pub fn order(&self) -> Option<&Order> {
        match &self.kind {
            MarkKind::Cordon => None,
            MarkKind::Drain(order) => Some(order),
        }
    }

    /// The reason of a new mark of the same owner: its own, or else the previous one.
    fn newest_why(&self, author: &Author) -> String {
        if author.why.is_empty() { self.why.clone() } else { author.why.clone() }
    }
}

/// How a GPU is to be drained.
#[derive(Clone, Copy, Debug, Default)]
pub struct Order {
    /// Whether its pods are evicted through the API server. Held devices are listed Unhealthy meanwhile,
    /// so that the kubelet does not allocate a freed one again.
    pub evict: bool,
    /// The deadline, milliseconds since 1970: what is recorded and shown. It follows a clock that is set.
    pub deadline_wall_ms: Option<u64>,
    /// The deadline by the monotonic clock of this process, which is what counts: a clock that is set must not end a
    /// drain and delete pods. `None` in a command and in a record, whose times [`Order::anchored`] converts.
    pub deadline_mono_ms: Option<u64>,
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
    /// It is given up; the GPU stays cordoned.
    GiveUp,
}

/// Orders are the same if an operator gave the same; the monotonic deadline is derived.
impl PartialEq for Order {
    fn eq(&self, other: &Self) -> bool {
        let given = |order: &Self| (order.evict, order.deadline_wall_ms, order.at_deadline);
        given(self) == given(other)
    }
}

impl Eq for Order {}

/// The clock was set if the recorded deadline differs from the monotonic one by more than this.
const CLOCK_SET_MS: u64 = 10_000;

impl Order {
    /// The order with its deadline by the monotonic clock, at most `longest_ms` from now: after a restart a wrong clock
    /// must not extend it.
    #[must_use]
    pub fn anchored(self, longest_ms: u64, now: Now) -> Self {
        let left = |deadline: u64| deadline.saturating_sub(now.wall_ms).min(longest_ms);
        let deadline_mono_ms = self.deadline_wall_ms.map(|at| now.mono_ms.saturating_add(left(at)));
        Self { deadline_mono_ms, ..self }
    }

    /// In how many milliseconds its deadline is; 0 after it, `None` without one.
    #[must_use]
    pub fn left_ms(&self, now: Now) -> Option<u64> {
        let of_record = || Some(self.deadline_wall_ms?.saturating_sub(now.wall_ms));
        self.deadline_mono_ms.map(|at| at.saturating_sub(now.mono_ms)).or_else(of_record)
    }

    /// Whether its deadline has passed.
    #[must_use]
    pub fn is_late(&self, now: Now) -> bool {
        self.left_ms(now) == Some(0)
    }

    /// The deadline to record after the clock was set; `None` if the recorded one is right, or has passed.
    fn moved_deadline(&self, now: Now) -> Option<u64> {
        let deadline = now.wall_ms.saturating_add(self.left_ms(now).filter(|left| *left > 0)?);
        (deadline.abs_diff(self.deadline_wall_ms?) > CLOCK_SET_MS).then_some(deadline)
    }

    /// Whether its deadline has passed and it is to be given up then. An empty GPU becomes drained instead.
    pub(crate) fn must_give_up(&self, now: Now) -> bool {
        self.at_deadline == AtDeadline::GiveUp && self.is_late(now)
    }

    /// In how many milliseconds it is to be given up; `None` if it never is, or if its deadline has passed.
    pub(crate) fn gives_up_in_ms(&self, now: Now) -> Option<u64> {
        self.left_ms(now).filter(|ms| *ms > 0 && self.at_deadline == AtDeadline::GiveUp)
    }

    /// The method by which holders are removed at `now`; `None` without eviction.
    fn eviction_method(&self, now: Now) -> Option<EvictionMethod> {
        let late = self.at_deadline == AtDeadline::Delete && self.is_late(now);
        self.evict.then_some(if late { EvictionMethod::Delete } else { EvictionMethod::Evict })
    }
}

/// The marks of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Each owner's mark; at most [`MARKS_MAX`].
    pub by_owner: BTreeMap<Owner, Mark>,
    /// Since when it is drained, milliseconds since 1970; `None` while it is not, or without a drain.
    pub drained_wall_ms: Option<u64>,
}

impl From<Mark> for Marks {
    /// One mark, of the caller of the admin API that it names.
    fn from(mark: Mark) -> Self {
        Self { by_owner: [(Owner::api(&mark.by), mark)].into(), drained_wall_ms: None }
    }
}

/// Too many or too long marks on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyMarks;

impl Marks {
    /// Whether the GPU may be granted as far as marks go.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_owner.is_empty()
    }

    /// The drain state.
    #[must_use]
    pub fn drain(&self) -> Drain {
        let drains = || self.by_owner.values().filter(|mark| mark.order().is_some());
        if let Some(since_wall_ms) = self.drained_wall_ms
            && let Some(mark) = drains().min_by_key(|mark| mark.since_wall_ms)
        {
            return Drain::Drained(Mark { since_wall_ms, ..mark.clone() });
        }
        let first = drains().min_by_key(|mark| {
            let deadline = mark.order().and_then(|order| order.deadline_wall_ms);
            (deadline.unwrap_or(u64::MAX), mark.since_wall_ms)
        });
        if let Some((mark, order)) = first.and_then(|mark| Some((mark, mark.order()?))) {
            return Drain::Draining(mark.clone(), Order { evict: self.evicts(), ..*order });
        }
        match self.by_owner.values().min_by_key(|mark| mark.since_wall_ms) {
            Some(mark) => Drain::Cordoned(mark.clone()),
            None => Drain::Active,
        }
    }

    /// Whether its holders are being evicted: the GPU is not drained yet, and a drain orders it.
    #[must_use]
    pub fn evicts(&self) -> bool {
        self.orders().any(|order| order.evict)
    }

    /// The method by which holders are removed at `now`: the strictest of all drains; `None` without eviction.
    #[must_use]
    pub fn eviction_method(&self, now: Now) -> Option<EvictionMethod> {
        self.orders().filter_map(|order| order.eviction_method(now)).max()
    }

    /// The orders of the drains in progress.
    pub fn orders(&self) -> impl Iterator<Item = &Order> {
        let marks = self.by_owner.values().filter(|_| self.drained_wall_ms.is_none());
        marks.filter_map(Mark::order)
    }

    /// The marks after a cordon. An owner's earlier mark keeps its kind and time and takes the new reason.
    pub(crate) fn with_cordon(&self, author: &Author, now: Now) -> Result<Self, TooManyMarks> {
        let Some(first) = self.by_owner.get(&author.owner) else {
            return self.with(author, Mark::cordon(&author.by, &author.why, now.wall_ms));
        };
        let why = first.newest_why(author);
        if why == first.why && !first.expired {
            return Ok(self.clone());
        }
        self.with(author, Mark { by: author.by.clone(), why, expired: false, ..first.clone() })
    }

    /// The marks after an order to drain, which replaces the owner's earlier one. A drained GPU stays drained.
    pub(crate) fn with_drain(&self, author: &Author, order: Order, now: Now) -> Result<Self, TooManyMarks> {
        let first = self.by_owner.get(&author.owner);
        let first_drain = first.filter(|mark| mark.order().is_some());
        if self.drained_wall_ms.is_some() && first_drain.is_some() {
            return Ok(self.clone());
        }
        let order = if self.drained_wall_ms.is_some() { Order::default() } else { order };
        let order = order.anchored(u64::MAX, now);
        let mark = Mark {
            kind: MarkKind::Drain(order),
            by: author.by.clone(),
            why: first.map_or_else(|| author.why.clone(), |mark| mark.newest_why(author)),
            since_wall_ms: first_drain.map_or(now.wall_ms, |mark| mark.since_wall_ms),
            expired: false,
        };
        self.with(author, mark)
    }

    fn with(&self, author: &Author, mark: Mark) -> Result<Self, TooManyMarks> {
        let mut next = self.clone();
        next.by_owner.insert(author.owner.clone(), mark);
        let lengths = next.by_owner.iter().map(|(owner, m)| owner.0.len() + m.by.len() + m.why.len());
        let is_too_long = lengths.sum::<usize>() > MARKS_TEXT_BYTES_MAX;
        if next.by_owner.len() > MARKS_MAX || is_too_long { Err(TooManyMarks) } else { Ok(next) }
    }

    /// The marks after the drains of these owners are stopped: still cordoned.
    pub(crate) fn without_drains(&self, owners: &Owners) -> Self {
        let mut next = self.clone();
        for (_, mark) in next.by_owner.iter_mut().filter(|(owner, _)| owners.contains(owner)) {
            mark.kind = MarkKind::Cordon;
        }
        next.normalized()
    }

    /// The marks after those of these owners are removed.
    pub(crate) fn without(&self, owners: &Owners) -> Self {
        let mut next = self.clone();
        next.by_owner.retain(|owner, _| !owners.contains(owner));
        next.normalized()
    }

    /// The marks after the GPU became empty; all orders are fulfilled.
    pub(crate) fn after_drained(&self, now: Now) -> Self {
        let mut next = Self { drained_wall_ms: Some(now.wall_ms), ..self.clone() };
        for mark in next.by_owner.values_mut().filter(|mark| mark.order().is_some()) {
            mark.kind = MarkKind::Drain(Order::default());
        }
        next
    }

    /// The marks after the drains that must be given up at `now` became cordons.
    pub(crate) fn after_deadlines(&self, now: Now) -> Self {
        let mut next = self.clone();
        for mark in next.by_owner.values_mut() {
            if mark.order().is_some_and(|order| order.must_give_up(now)) {
                (mark.kind, mark.expired) = (MarkKind::Cordon, true);
            }
        }
        next.normalized()
    }

    /// The marks after the clock was set: the recorded deadlines follow it. `None` if they are right.
    pub(crate) fn after_clock_was_set(&self, now: Now) -> Option<Self> {
        let mut next = self.clone();
        let mut is_set = false;
        for mark in next.by_owner.values_mut() {
            if let MarkKind::Drain(order) = &mut mark.kind
                && let Some(deadline) = order.moved_deadline(now)
                && let Some(before) = order.deadline_wall_ms.replace(deadline)
            {
                // Its beginning as well, so that its length stays what it was.
                mark.since_wall_ms = (mark.since_wall_ms + deadline).saturating_sub(before);
                is_set = true;
            }
        }
        is_set.then_some(next)
    }

    /// Marks of a record, with deadlines by the monotonic clock. The order is not older than its mark, so no deadline
    /// is further away than it was from the mark.
    #[must_use]
    pub fn restored(mut self, now: Now) -> Self {
        for mark in self.by_owner.values_mut() {
            if let MarkKind::Drain(order) = &mut mark.kind {
                let longest_ms = order.deadline_wall_ms.map(|at| at.saturating_sub(mark.since_wall_ms));
                *order = order.anchored(longest_ms.unwrap_or(u64::MAX), now);
            }
        }
        self
    }

    /// Takes the monotonic deadlines of the same orders in `before`, which this process has had since.
    pub(crate) fn carry_deadlines(&mut self, before: &Self) {
        for (owner, mark) in &mut self.by_owner {
            let known = before.by_owner.get(owner).and_then(Mark::order).copied();
            if let MarkKind::Drain(order) = &mut mark.kind
                && let Some(known) = known.filter(|known| known == order)
            {
                *order = known;
            }
        }
    }

    /// Without a drain, a GPU is not drained.
    fn normalized(mut self) -> Self {
        if self.by_owner.values().all(|mark| mark.order().is_none()) {
            self.drained_wall_ms = None;
        }
        self
    }
}

/// The drain state of one GPU, named as in kubectl. Of several marks it names the one that decides: of the drains
/// the one with the earliest deadline, else the oldest mark.
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

    /// Whether the GPU is cordoned because its drain was given up at the deadline.
    #[must_use]
    pub fn was_given_up(&self) -> bool {
        matches!(self, Self::Cordoned(mark) if mark.expired)
    }
}

/// Since when a draining GPU has no processes, monotonic milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Empty {
    /// Since when no scan found a process, including scans that could not list processes.
    pub unused_since_mono_ms: u64,
    /// Since when every scan listed no process; `None` if the newest scan could not list processes.
    pub seen_since_mono_ms: Option<u64>,
}
