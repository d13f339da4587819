//! What the kubelet front end counts: its calls, its registrations and streams, its rounds.

use super::times::Times;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// From an answer out of a snapshot to the longest that an Allocate waits.
const CALL_US: &[u64] =
    &[100, 250, 500, 1_000, 2_500, 5_000, 10_000, 50_000, 250_000, 1_000_000, 5_000_000, 10_000_000];
/// A round asks the kubelet twice and waits up to a second for its checkpoint.
const ROUND_US: &[u64] =
    &[1_000, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000];

/// A call of the device plugin API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rpc {
    /// What the plugin can do.
    GetDevicePluginOptions,
    /// The stream of devices.
    ListAndWatch,
    /// Where to place.
    GetPreferredAllocation,
    /// A grant.
    Allocate,
    /// Before a container starts; never asked for.
    PreStartContainer,
}

/// All calls.
pub const METHODS: [Rpc; 5] = [
    Rpc::GetDevicePluginOptions,
    Rpc::ListAndWatch,
    Rpc::GetPreferredAllocation,
    Rpc::Allocate,
    Rpc::PreStartContainer,
];

impl Rpc {
    /// As the API calls it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::GetDevicePluginOptions => "GetDevicePluginOptions",
            Self::ListAndWatch => "ListAndWatch",
            Self::GetPreferredAllocation => "GetPreferredAllocation",
            Self::Allocate => "Allocate",
            Self::PreStartContainer => "PreStartContainer",
        }
    }
}

/// gRPC's status codes by their numbers.
pub const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];
/// Of a caller that went.
const CANCELLED: usize = 1;

/// Where the registration of a resource stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// For a kubelet.
    Waiting,
    /// The kubelet is there and does not have it yet.
    Registering,
    /// It is registered, and its devices are watched.
    Registered,
    /// Another plugin registers it.
    Contested,
}

impl At {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Waiting, Self::Registering, Self::Registered, Self::Contested];

    /// In a word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Registering => "registering",
            Self::Registered => "registered",
            Self::Contested => "contested",
        }
    }
}

/// One resource at the kubelet.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// Where its registration stands; `None` before its plugin began.
    pub at: Option<At>,
    /// Streams on which its devices are watched.
    pub streams: usize,
    /// Whether it was registered since the daemon started.
    pub was_registered: bool,
    /// When either of the first two changed.
    pub since: Instant,
}

/// See the module.
#[derive(Debug)]
pub struct KubeletFigures {
    calls: [[AtomicU64; CODES.len()]; METHODS.len()],
    times: [Times; METHODS.len()],
    refusals: Mutex<BTreeMap<&'static str, u64>>,
    registered: AtomicU64,
    refused: AtomicU64,
    standings: Mutex<BTreeMap<String, Standing>>,
    rounds: Mutex<BTreeMap<&'static str, u64>>,
    /// How long rounds take.
    pub round_times: Times,
}

impl Default for KubeletFigures {
    fn default() -> Self {
        Self {
            calls: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))),
            times: std::array::from_fn(|_| Times::new(CALL_US)),
            refusals: Mutex::default(),
            registered: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            standings: Mutex::default(),
            rounds: Mutex::default(),
            round_times: Times::new(ROUND_US),
        }
    }
}

impl KubeletFigures {
    /// A call begins. It counts when the value that is returned is dropped: as cancelled, if nobody said
    /// with which code it ended.
    #[must_use]
    pub fn begin(&self, rpc: Rpc) -> Call<'_> {
        Call { figures: self, rpc, began: Instant::now(), code: CANCELLED }
    }

    /// How often a call ended with each code, in the order of [`CODES`].
    #[must_use]
    pub fn calls(&self, rpc: Rpc) -> [u64; CODES.len()] {
        std::array::from_fn(|code| self.calls[rpc as usize][code].load(Ordering::Relaxed))
    }

    /// How long a call takes.
    #[must_use]
    pub fn times(&self, rpc: Rpc) -> &Times {
        &self.times[rpc as usize]
    }

    /// An Allocate that was not granted, and why in a word.
    pub fn refused_allocate(&self, kind: &'static str) {
        *self.refusals.lock().entry(kind).or_default() += 1;
    }

    /// Allocates that were not granted, by why.
    #[must_use]
    pub fn refusals(&self) -> BTreeMap<&'static str, u64> {
        self.refusals.lock().clone()
    }

    /// The kubelet took a registration, or not.
    pub fn register_answered(&self, taken: bool) {
        let count = if taken { &self.registered } else { &self.refused };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Registrations that were taken, and that were refused.
    #[must_use]
    pub fn registers(&self) -> [(&'static str, u64); 2] {
        [
            ("registered", self.registered.load(Ordering::Relaxed)),
            ("refused", self.refused.load(Ordering::Relaxed)),
        ]
    }

    /// A resource's registration stands somewhere else; `None`: its plugin has ended.
    pub fn turned(&self, resource: &str, at: Option<At>) {
        self.change(resource, |standing| {
            standing.was_registered |= at == Some(At::Registered);
            standing.at = at;
        });
        if at.is_none() {
            self.standings.lock().retain(|name, standing| name != resource || standing.streams > 0);
        }
    }

    /// A stream began.
    pub fn stream_began(&self, resource: &str) {
        self.change(resource, |standing| standing.streams += 1);
    }

    /// A stream ended.
    pub fn stream_ended(&self, resource: &str) {
        self.change(resource, |standing| standing.streams = standing.streams.saturating_sub(1));
        self.standings.lock().retain(|_, standing| standing.at.is_some() || standing.streams > 0);
    }

    fn change(&self, resource: &str, change: impl FnOnce(&mut Standing)) {
        let mut standings = self.standings.lock();
        let fresh = Standing { at: None, streams: 0, was_registered: false, since: Instant::now() };
        let standing = standings.entry(resource.to_owned()).or_insert(fresh);
        let before = (standing.at, standing.streams);
        change(standing);
        if (standing.at, standing.streams) != before {
            standing.since = Instant::now();
        }
    }

    /// All resources at the kubelet.
    #[must_use]
    pub fn standings(&self) -> BTreeMap<String, Standing> {
        self.standings.lock().clone()
    }

    /// A round ended: `applied`, `partial` or `failed`.
    pub fn round(&self, outcome: &'static str, took: Duration) {
        *self.rounds.lock().entry(outcome).or_default() += 1;
        self.round_times.add(took);
    }

    /// Rounds by outcome.
    #[must_use]
    pub fn rounds(&self) -> BTreeMap<&'static str, u64> {
        self.rounds.lock().clone()
    }
}

/// A call under way.
#[derive(Debug)]
pub struct Call<'f> {
    figures: &'f KubeletFigures,
    rpc: Rpc,
    began: Instant,
    code: usize,
}

impl Call<'_> {
    /// It ends with this code, by gRPC's number.
    pub fn end(mut self, code: i32) {
        let unknown = 2;
        self.code = usize::try_from(code).ok().filter(|code| *code < CODES.len()).unwrap_or(unknown);
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.figures.calls[self.rpc as usize][self.code].fetch_add(1, Ordering::Relaxed);
        // A stream lasts as long as the kubelet.
        if self.rpc != Rpc::ListAndWatch {
            self.figures.times[self.rpc as usize].add(self.began.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_counts_once_and_one_that_nobody_waits_for_is_cancelled() {
        let figures = KubeletFigures::default();
        figures.begin(Rpc::Allocate).end(0);
        figures.begin(Rpc::Allocate).end(9);
        figures.begin(Rpc::Allocate).end(99);
        drop(figures.begin(Rpc::Allocate));
        figures.begin(Rpc::ListAndWatch).end(0);
        let calls = figures.calls(Rpc::Allocate);
        let by_code = [0, 1, 2, 9].map(|code| calls[code]);
        assert_eq!((by_code, calls.iter().sum::<u64>()), ([1, 1, 1, 1], 4));
        assert_eq!(figures.times(Rpc::Allocate).read().counts.iter().sum::<u64>(), 4);
        assert_eq!(figures.times(Rpc::ListAndWatch).read().counts.iter().sum::<u64>(), 0);
        assert_eq!(figures.calls(Rpc::ListAndWatch)[0], 1);
    }

    #[test]
    fn a_resource_is_there_as_long_as_its_plugin_or_a_stream_is() {
        let figures = KubeletFigures::default();
        figures.turned("x/a", Some(At::Registering));
        assert!(!figures.standings()["x/a"].was_registered);
        figures.stream_began("x/a");
        figures.turned("x/a", Some(At::Registered));
        figures.turned("x/a", Some(At::Waiting));
        let standing = figures.standings()["x/a"];
        assert_eq!((standing.streams, standing.was_registered), (1, true));
        figures.turned("x/a", None);
        assert_eq!(figures.standings()["x/a"].streams, 1);
        figures.stream_ended("x/a");
        assert!(figures.standings().is_empty());
    }
}
