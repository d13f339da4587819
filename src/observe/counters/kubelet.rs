//! Counters of the kubelet front end: calls, registrations, streams and reconcile passes.

use super::histogram::Histogram;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// From an answer read from a snapshot to the longest wait of an Allocate.
const CALL_US: &[u64] =
    &[100, 250, 500, 1_000, 2_500, 5_000, 10_000, 50_000, 250_000, 1_000_000, 5_000_000, 10_000_000];
/// A pass calls the kubelet twice and waits up to a second for its checkpoint.
const PASS_US: &[u64] =
    &[1_000, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000];

/// A call of the device plugin API or of the DRA API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rpc {
    /// The plugin's capabilities.
    GetDevicePluginOptions,
    /// The stream of devices.
    ListAndWatch,
    /// The devices to prefer.
    GetPreferredAllocation,
    /// The grant of devices to a container.
    Allocate,
    /// Runs before a container starts; the plugin does not request it.
    PreStartContainer,
    /// The grant of devices to claims. A call that does not prepare all of its claims counts as FAILED_PRECONDITION.
    NodePrepareResources,
    /// The release of claims.
    NodeUnprepareResources,
}

/// All methods.
pub const METHODS: [Rpc; 7] = [
    Rpc::GetDevicePluginOptions,
    Rpc::ListAndWatch,
    Rpc::GetPreferredAllocation,
    Rpc::Allocate,
    Rpc::PreStartContainer,
    Rpc::NodePrepareResources,
    Rpc::NodeUnprepareResources,
];

impl Rpc {
    /// The method's name in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::GetDevicePluginOptions => "GetDevicePluginOptions",
            Self::ListAndWatch => "ListAndWatch",
            Self::GetPreferredAllocation => "GetPreferredAllocation",
            Self::Allocate => "Allocate",
            Self::PreStartContainer => "PreStartContainer",
            Self::NodePrepareResources => "NodePrepareResources",
            Self::NodeUnprepareResources => "NodeUnprepareResources",
        }
    }
}

/// gRPC's status codes, indexed by number.
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
/// Index in [`CODES`] of calls whose caller went away.
const CANCELLED: usize = 1;

/// State of a resource's registration at the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationState {
    /// No kubelet is running.
    Waiting,
    /// A kubelet is running and has not accepted the registration yet.
    Registering,
    /// The kubelet has accepted the registration.
    Registered,
    /// Another plugin registers the same resource.
    Contested,
}

impl RegistrationState {
    /// All states.
    pub const ALL: [Self; 4] = [Self::Waiting, Self::Registering, Self::Registered, Self::Contested];

    /// The state as a metric label.
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

/// How an attempt to register a resource ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationOutcome {
    /// The kubelet accepted it.
    Registered,
    /// The kubelet refused it, or did not answer in time.
    Refused,
    /// The system denies this process the connection to kubelet.sock.
    Denied,
    /// No process answers on kubelet.sock.
    Unreachable,
    /// The kubelet accepted it and did not call ListAndWatch.
    NotWatched,
}

impl RegistrationOutcome {
    const ALL: [Self; 5] =
        [Self::Registered, Self::Refused, Self::Denied, Self::Unreachable, Self::NotWatched];

    /// The outcome as a metric label.
    fn as_str(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::Refused => "refused",
            Self::Denied => "denied",
            Self::Unreachable => "unreachable",
            Self::NotWatched => "notWatched",
        }
    }
}

/// What the kubelet's `List` answered. Without it no allocation ends.
#[derive(Clone, Debug, Default)]
pub struct PodListStatus {
    /// Whether it has answered since the daemon started.
    pub answered: bool,
    /// Why the last call failed, and since when calls fail; `None` if it was answered, or before the first call.
    pub error: Option<(String, Instant)>,
}

/// Registration and streams of one resource at the kubelet.
#[derive(Clone, Copy, Debug)]
pub struct RegistrationStatus {
    /// State of the registration; `None` while the resource has no plugin.
    pub at: Option<RegistrationState>,
    /// Open ListAndWatch streams.
    pub streams: usize,
    /// Whether the resource has been registered since the daemon started.
    pub was_registered: bool,
    /// When `at` or `streams` last changed.
    pub since: Instant,
}

/// Counters of the kubelet front end.
#[derive(Debug)]
pub struct KubeletCounters {
    calls: [[AtomicU64; CODES.len()]; METHODS.len()],
    durations: [Histogram; METHODS.len()],
    refusals: Mutex<BTreeMap<&'static str, u64>>,
    outcomes: [AtomicU64; RegistrationOutcome::ALL.len()],
    pod_list: Mutex<PodListStatus>,
    registrations: Mutex<BTreeMap<String, RegistrationStatus>>,
    passes: Mutex<BTreeMap<&'static str, u64>>,
    /// Durations of reconcile passes.
    pub pass_durations: Histogram,
}

impl Default for KubeletCounters {
    fn default() -> Self {
        Self {
            calls: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))),
            durations: std::array::from_fn(|_| Histogram::new(CALL_US)),
            refusals: Mutex::default(),
            outcomes: std::array::from_fn(|_| AtomicU64::new(0)),
            pod_list: Mutex::default(),
            registrations: Mutex::default(),
            passes: Mutex::default(),
            pass_durations: Histogram::new(PASS_US),
        }
    }
}

impl KubeletCounters {
    /// Starts a call. It is counted when the guard is dropped, as cancelled unless [`CountedCall::end`] was called.
    #[must_use]
    pub fn begin(&self, rpc: Rpc) -> CountedCall<'_> {
        CountedCall { counters: self, rpc, began: Instant::now(), code: CANCELLED }
    }

    /// Number of calls of a method by status code, in the order of [`CODES`].
    #[must_use]
    pub fn calls(&self, rpc: Rpc) -> [u64; CODES.len()] {
        std::array::from_fn(|code| self.calls[rpc as usize][code].load(Ordering::Relaxed))
    }

    /// Durations of a method's calls.
    #[must_use]
    pub fn durations(&self, rpc: Rpc) -> &Histogram {
        &self.durations[rpc as usize]
    }

    /// Counts an Allocate that was not granted, by kind of refusal.
    pub fn count_refusal(&self, kind: &'static str) {
        *self.refusals.lock().entry(kind).or_default() += 1;
    }

    /// Allocates that were not granted, by kind of refusal.
    #[must_use]
    pub fn refusals(&self) -> BTreeMap<&'static str, u64> {
        self.refusals.lock().clone()
    }

    /// Counts an attempt to register.
    pub fn count_registration(&self, outcome: RegistrationOutcome) {
        self.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Attempts to register by outcome.
    #[must_use]
    pub fn registration_outcomes(&self) -> [(&'static str, u64); RegistrationOutcome::ALL.len()] {
        RegistrationOutcome::ALL
            .map(|one| (one.as_str(), self.outcomes[one as usize].load(Ordering::Relaxed)))
    }

    /// Records that the kubelet's `List` was answered.
    pub fn pod_list_answered(&self) {
        *self.pod_list.lock() = PodListStatus { answered: true, error: None };
    }

    /// Records that the kubelet's `List` failed.
    pub fn pod_list_failed(&self, why: String) {
        let mut status = self.pod_list.lock();
        let since = status.error.as_ref().map_or_else(Instant::now, |(_, since)| *since);
        status.error = Some((why, since));
    }

    /// What the kubelet's `List` answered.
    #[must_use]
    pub fn pod_list(&self) -> PodListStatus {
        self.pod_list.lock().clone()
    }

    /// Sets the state of a resource's registration; `None` once its plugin has ended.
    pub fn set_registration(&self, resource: &str, at: Option<RegistrationState>) {
        self.change(resource, |status| {
            status.was_registered |= at == Some(RegistrationState::Registered);
            status.at = at;
        });
        if at.is_none() {
            self.registrations.lock().retain(|name, status| name != resource || status.streams > 0);
        }
    }

    /// Records the start of a ListAndWatch stream.
    pub fn stream_began(&self, resource: &str) {
        self.change(resource, |status| status.streams += 1);
    }

    /// Records the end of a ListAndWatch stream.
    pub fn stream_ended(&self, resource: &str) {
        self.change(resource, |status| status.streams = status.streams.saturating_sub(1));
        self.registrations.lock().retain(|_, status| status.at.is_some() || status.streams > 0);
    }

    fn change(&self, resource: &str, change: impl FnOnce(&mut RegistrationStatus)) {
        let mut registrations = self.registrations.lock();
        let fresh = RegistrationStatus { at: None, streams: 0, was_registered: false, since: Instant::now() };
        let status = registrations.entry(resource.to_owned()).or_insert(fresh);
        let before = (status.at, status.streams);
        change(status);
        if (status.at, status.streams) != before {
            status.since = Instant::now();
        }
    }

    /// All resources that have a plugin or a stream.
    #[must_use]
    pub fn registrations(&self) -> BTreeMap<String, RegistrationStatus> {
        self.registrations.lock().clone()
    }

    /// Counts a reconcile pass by outcome: `applied`, `partial` or `failed`.
    pub fn count_pass(&self, outcome: &'static str, took: Duration) {
        *self.passes.lock().entry(outcome).or_default() += 1;
        self.pass_durations.add(took);
    }

    /// Reconcile passes by outcome.
    #[must_use]
    pub fn passes(&self) -> BTreeMap<&'static str, u64> {
        self.passes.lock().clone()
    }
}

/// Guard of a call in progress.
#[derive(Debug)]
pub struct CountedCall<'f> {
    counters: &'f KubeletCounters,
    rpc: Rpc,
    began: Instant,
    code: usize,
}

impl CountedCall<'_> {
    /// Ends the call with this gRPC status code.
    pub fn end(mut self, code: i32) {
        let unknown = 2;
        self.code = usize::try_from(code).ok().filter(|code| *code < CODES.len()).unwrap_or(unknown);
    }
}

impl Drop for CountedCall<'_> {
    fn drop(&mut self) {
        self.counters.calls[self.rpc as usize][self.code].fetch_add(1, Ordering::Relaxed);
        // A ListAndWatch lasts as long as the kubelet.
        if self.rpc != Rpc::ListAndWatch {
            self.counters.durations[self.rpc as usize].add(self.began.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_counts_once_and_without_an_end_as_cancelled() {
        let counters = KubeletCounters::default();
        counters.begin(Rpc::Allocate).end(0);
        counters.begin(Rpc::Allocate).end(9);
        counters.begin(Rpc::Allocate).end(99);
        drop(counters.begin(Rpc::Allocate));
        counters.begin(Rpc::ListAndWatch).end(0);
        let calls = counters.calls(Rpc::Allocate);
        let by_code = [0, 1, 2, 9].map(|code| calls[code]);
        assert_eq!((by_code, calls.iter().sum::<u64>()), ([1, 1, 1, 1], 4));
        assert_eq!(counters.durations(Rpc::Allocate).read().counts.iter().sum::<u64>(), 4);
        assert_eq!(counters.durations(Rpc::ListAndWatch).read().counts.iter().sum::<u64>(), 0);
        assert_eq!(counters.calls(Rpc::ListAndWatch)[0], 1);
    }

    #[test]
    fn a_resource_is_listed_as_long_as_it_has_a_plugin_or_a_stream() {
        let counters = KubeletCounters::default();
        counters.set_registration("x/a", Some(RegistrationState::Registering));
        assert!(!counters.registrations()["x/a"].was_registered);
        counters.stream_began("x/a");
        counters.set_registration("x/a", Some(RegistrationState::Registered));
        counters.set_registration("x/a", Some(RegistrationState::Waiting));
        let status = counters.registrations()["x/a"];
        assert_eq!((status.streams, status.was_registered), (1, true));
        counters.set_registration("x/a", None);
        assert_eq!(counters.registrations()["x/a"].streams, 1);
        counters.stream_ended("x/a");
        assert!(counters.registrations().is_empty());
    }
}
