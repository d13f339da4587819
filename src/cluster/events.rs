//! Publishes changes of GPUs and policies as Kubernetes events of the node and of pods, which `kubectl describe` shows.
//! Nothing waits for them: events that cannot be published in time are dropped and counted.

use super::pending_event::{Bypasses, PendingEvent, Regarding};
use super::settings::Settings;
use berth_core::policy_transitions::PolicyTransition;
use berth_core::stack::PolicyStatuses;
use berth_core::transition_stream::{Batch, Batches};
use berth_kube::{ANSWER_MAX, Backoff, error_chain, random};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{Receiver, Sender};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Most events in a minute: a drain of a GPU with 48 shares creates one for each pod, and some more.
const EVENTS_PER_MINUTE_MAX: u32 = 60;
/// Most events in a minute about GPUs that are used without an allocation. They have an allowance of their own: many
/// such processes must not suppress the events of a drain or of an unhealthy GPU. Events beyond it wait.
const BYPASSES_PER_MINUTE_MAX: u32 = 20;
/// Most events in a minute about policies: each of a stack of 16 fails, is suspended, and is called again.
const POLICIES_PER_MINUTE_MAX: u32 = 48;
/// Most events that wait while the API server is unreachable: those of two minutes. With notes of 1 KiB that is 128
/// KiB.
pub(super) const EVENTS_WAITING_MAX: usize = 128;
/// How many of these are reserved for events other than those about bypasses and policies.
const RESERVED: usize = EVENTS_WAITING_MAX / 2;
/// Most requests for one event. With waits that double from a second that is half a minute.
const TRIES_MAX: u32 = 6;
/// Most recent events that are kept, so that a repetition increases the count of an event instead of creating another.
const RECENT_MAX: usize = 64;
/// The reporting controller, as `kubectl describe` shows it.
const CONTROLLER: &str = "berth";
const MINUTE: Duration = Duration::from_secs(60);
/// The faults of one policy are one event in this time, however many there are: with a stack of 16 that is 16 events a
/// minute at most. A suspension always is an event.
const FAULT_EVENT_INTERVAL: Duration = MINUTE;

/// Queues the events of each batch; never returns. It runs from the start of the daemon, so that changes before the
/// first connection to the API server are published later. The batch of the first scan contains the changes that
/// happened while no daemon ran.
pub(super) async fn collect(batches: &mut Batches, out: Sender<PendingEvent>) {
    let mut collector = Collector::new(Instant::now());
    loop {
        let due = collector.policies.next_due();
        tokio::select! {
            batch = batches.recv() => match batch {
                Some(batch) => collector.step(&batch, &out, Instant::now()),
                None => return std::future::pending().await,
            },
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                collector.step_policies(&[], &out, Instant::now());
            }
        }
    }
}

/// Computes the events of batches, within allowances for each minute.
struct Collector {
    allowance: Allowance,
    bypasses: Bypasses,
    bypass_allowance: Allowance,
    policies: PolicyEvents,
    policy_allowance: Allowance,
}

impl Collector {
    fn new(now: Instant) -> Self {
        Self {
            allowance: Allowance::new(EVENTS_PER_MINUTE_MAX, now),
            bypasses: Bypasses::default(),
            bypass_allowance: Allowance::new(BYPASSES_PER_MINUTE_MAX, now),
            policies: PolicyEvents::default(),
            policy_allowance: Allowance::new(POLICIES_PER_MINUTE_MAX, now),
        }
    }

    fn step(&mut self, batch: &Batch, out: &Sender<PendingEvent>, now: Instant) {
        let ledger = &batch.ledger;
        let events = batch.transitions.iter().filter_map(|one| PendingEvent::of_transition(one, ledger));
        for event in events {
            if !self.allowance.take(now) || out.try_send(event).is_err() {
                self.allowance.dropped += 1;
            }
        }
        // This is the only sender, so the capacity does not shrink meanwhile.
        let max = out.capacity().saturating_sub(RESERVED).min(self.bypass_allowance.left(now));
        for event in self.bypasses.events(ledger, max) {
            if !self.bypass_allowance.take(now) || out.try_send(event).is_err() {
                self.allowance.dropped += 1;
            }
        }
        self.policies.active = Arc::clone(&batch.statuses);
        self.step_policies(&batch.policies, out, now);
    }

    /// Queues the events of policies, also those that are due without a transition. Like those of bypasses, they leave
    /// the reserved part of the queue free.
    fn step_policies(&mut self, transitions: &[PolicyTransition], out: &Sender<PendingEvent>, now: Instant) {
        for event in self.policies.events(transitions, now) {
            let allowed = out.capacity() > RESERVED && self.policy_allowance.take(now);
            if !allowed || out.try_send(event).is_err() {
                self.allowance.dropped += 1;
            }
        }
        self.log_dropped(now);
    }

    fn log_dropped(&mut self, now: Instant) {
        if let Some(dropped) = self.allowance.take_dropped(now) {
            tracing::warn!(
                dropped,
                "events were dropped: there were more than a minute allows, or the API server did not accept them in time"
            );
        }
    }
}

/// How many more events may be published in a minute.
struct Allowance {
    per_minute: u32,
    left: u32,
    since: Instant,
    dropped: u64,
    logged: Option<Instant>,
}

impl Allowance {
    fn new(per_minute: u32, now: Instant) -> Self {
        Self { per_minute, left: per_minute, since: now, dropped: 0, logged: None }
    }

    /// How many are left.
    fn left(&mut self, now: Instant) -> usize {
        if now.duration_since(self.since) >= MINUTE {
            *self = Self { left: self.per_minute, since: now, ..*self };
        }
        self.left as usize
    }

    /// Takes one, if one is left. All come back at once, a minute after the first was taken.
    fn take(&mut self, now: Instant) -> bool {
        let taken = self.left(now) > 0;
        self.left = self.left.saturating_sub(1);
        taken
    }

    /// How many were dropped since the last line, if a line is to be logged: at most once a minute.
    fn take_dropped(&mut self, now: Instant) -> Option<u64> {
        let logged = self.logged.is_some_and(|logged| now.duration_since(logged) < MINUTE);
        if self.dropped == 0 || logged {
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.dropped))
    }
}

/// Computes the events of policies from their transitions.
#[derive(Debug, Default)]
struct PolicyEvents {
    /// The policies of the active stack, by label.
    active: Arc<PolicyStatuses>,
    /// By the policy's label.
    faults: BTreeMap<String, Faults>,
}

/// The faults of one policy that had no event yet.
#[derive(Debug, Default)]
struct Faults {
    times: u64,
    /// The text of the last one.
    last: String,
    /// When its next event may be published; `None`: at once.
    not_before: Option<Instant>,
}

impl PolicyEvents {
    /// The events that are due after these transitions.
    fn events(&mut self, transitions: &[PolicyTransition], now: Instant) -> Vec<PendingEvent> {
        self.faults.retain(|label, _| self.active.contains_key(label));
        let mut events = Vec::new();
        for transition in transitions {
            match transition {
                PolicyTransition::Failed { label, times, last } => {
                    let faults = self.faults.entry(label.clone()).or_default();
                    faults.times += times;
                    faults.last.clone_from(last);
                }
                PolicyTransition::Suspended { label, .. } => {
                    // Its text has the last fault.
                    if let Some(faults) = self.faults.get_mut(label) {
                        faults.times = 0;
                    }
                    events.push(PendingEvent::of_policy(transition));
                }
                PolicyTransition::Resumed { .. } => events.push(PendingEvent::of_policy(transition)),
            }
        }
        for (label, faults) in &mut self.faults {
            if faults.times > 0 && faults.not_before.is_none_or(|at| now >= at) {
                let (times, last) = (std::mem::take(&mut faults.times), std::mem::take(&mut faults.last));
                let failed = PolicyTransition::Failed { label: label.clone(), times, last };
                events.push(PendingEvent::of_policy(&failed));
                faults.not_before = Some(now + FAULT_EVENT_INTERVAL);
            }
        }
        events
    }

    /// When faults that had no event yet may have one.
    fn next_due(&self) -> Option<Instant> {
        self.faults.values().filter(|faults| faults.times > 0).filter_map(|faults| faults.not_before).min()
    }
}

/// Publishes the queued events; never returns. Of consecutive failures only the first is logged.
pub(super) async fn publish(settings: &Settings, client: Client, events: &mut Receiver<PendingEvent>) {
    let mut publisher = Publisher { client, node: settings.node.clone(), recent: VecDeque::new() };
    let mut logged = false;
    while let Some(event) = events.recv().await {
        match publisher.publish(&event, settings).await {
            Ok(()) => logged = false,
            Err(why) if !std::mem::replace(&mut logged, true) => {
                tracing::warn!(reason = event.reason, why, "an event could not be sent to the API server");
            }
            Err(_) => {}
        }
    }
    std::future::pending::<()>().await;
}

struct Publisher {
    client: Client,
    node: String,
    /// The recent events, each with its own recorder, which counts its repetitions. One recorder is not enough: the
    /// library ignores the note when it compares events, and only the note names the GPU.
    recent: VecDeque<(PendingEvent, Recorder)>,
}

impl Publisher {
    /// Publishes one event, with retries.
    async fn publish(&mut self, pending: &PendingEvent, settings: &Settings) -> Result<(), String> {
        let recorder = self.recorder(pending);
        let event = Event {
            type_: if pending.warning { EventType::Warning } else { EventType::Normal },
            reason: pending.reason.into(),
            note: Some(pending.note.clone()),
            action: pending.action.into(),
            secondary: None,
        };
        let regarding = self.reference(&pending.regarding);
        let mut backoff = Backoff::new(settings.connection.retry_interval);
        let mut tries = 1;
        loop {
            let why = match timeout(ANSWER_MAX, recorder.publish(&event, &regarding)).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(kube::Error::Api(status))) if is_final(status.code) => {
                    // The API server may have removed the event: the next repetition creates it again.
                    self.recent.retain(|(recent, _)| recent != pending);
                    let hint = if status.code == 403 {
                        " (the daemon needs: create and patch events of events.k8s.io; ClusterRole berth-events, see deploy/cluster-role.yaml)"
                    } else {
                        ""
                    };
                    return Err(format!("{}{hint}", status.message));
                }
                Ok(Err(error)) => error_chain(&error),
                Err(_) => format!("no answer within {} s", ANSWER_MAX.as_secs()),
            };
            if tries == TRIES_MAX {
                return Err(why);
            }
            tries += 1;
            let wait = backoff.next(random());
            sleep(settings.connection.retry_after.delay(wait, Instant::now())).await;
        }
    }

    fn recorder(&mut self, event: &PendingEvent) -> Recorder {
        if let Some((_, recorder)) = self.recent.iter().find(|(recent, _)| recent == event) {
            return recorder.clone();
        }
        let reporter = Reporter { controller: CONTROLLER.into(), instance: Some(self.node.clone()) };
        let recorder = Recorder::new(self.client.clone(), reporter);
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back((event.clone(), recorder.clone()));
        recorder
    }

    /// The reference to the object of an event. For the node the UID is its name, as in the kubelet's own events:
    /// `kubectl describe node` searches by it.
    fn reference(&self, regarding: &Regarding) -> ObjectReference {
        match regarding {
            Regarding::Node => ObjectReference {
                kind: Some("Node".into()),
                name: Some(self.node.clone()),
                uid: Some(self.node.clone()),
                ..ObjectReference::default()
            },
            Regarding::Pod { namespace, name, uid } => ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Pod".into()),
                namespace: Some(namespace.clone()),
                name: Some(name.clone()),
                uid: Some(uid.clone()),
                ..ObjectReference::default()
            },
        }
    }
}

/// Whether another request would have the same answer: true for each 4xx but 429.
fn is_final(code: u16) -> bool {
    (400..500).contains(&code) && code != 429
}

#[cfg(test)]
mod tests {
    use super::super::pending_event::tests::Node;
    use super::*;
    use berth_core::stack::PolicyStatus;
    use berth_kernel::ids::time::Now;
    use berth_kernel::node::transitions::Transitions;
    use tokio::sync::mpsc;

    /// A batch with the transitions to the node's ledger.
    fn batch(transitions: &mut Transitions, node: &Node) -> Batch {
        let ledger = Arc::new(node.ledger.clone());
        Batch {
            at: Now::default(),
            transitions: transitions.step(Arc::clone(&ledger)),
            ledger,
            policies: Vec::new(),
            statuses: Arc::default(),
            refused: Vec::new(),
        }
    }

    #[test]
    fn an_allowance_limits_the_events_of_a_minute() {
        let start = Instant::now();
        let mut allowance = Allowance::new(EVENTS_PER_MINUTE_MAX, start);
        let mut take = |seconds, n: u32| {
            let now = start + Duration::from_secs(seconds);
            (0..n).filter(|_| allowance.take(now)).count()
        };
        assert_eq!(take(0, EVENTS_PER_MINUTE_MAX + 5), 60);
        assert_eq!(take(59, 1), 0);
        assert_eq!(take(60, EVENTS_PER_MINUTE_MAX + 5), 60);
    }

    #[tokio::test]
    async fn bypasses_never_suppress_the_event_of_a_drain() {
        let mut node = Node::new();
        let (out, mut queue) = mpsc::channel(EVENTS_WAITING_MAX);
        let start = Instant::now();
        let mut transitions = Transitions::since(Arc::new(node.ledger.clone()));
        let mut collector = Collector::new(start);
        // Two hundred processes, each with a name of its own, for ten minutes; no event is taken from the queue.
        let many: Vec<u32> = (1000..1200).collect();
        node.scan_later(Some(&many));
        for minute in 0..10 {
            node.scan_later(Some(&many));
            collector.step(&batch(&mut transitions, &node), &out, start + minute * MINUTE);
            let waiting = EVENTS_WAITING_MAX - out.capacity();
            let most = (minute as usize + 1) * BYPASSES_PER_MINUTE_MAX as usize;
            assert_eq!(waiting, most.min(EVENTS_WAITING_MAX - RESERVED));
        }
        node.cordon("fan");
        collector.step(&batch(&mut transitions, &node), &out, start + 10 * MINUTE);
        let reasons = std::iter::from_fn(|| queue.try_recv().ok()).map(|n| n.reason);
        let reasons: Vec<_> = reasons.collect();
        assert_eq!(reasons.last(), Some(&"GPUCordoned"));
        // Events that waited are queued once there is room.
        collector.step(&batch(&mut transitions, &node), &out, start + 10 * MINUTE);
        assert_eq!(queue.try_recv().unwrap().reason, "GPUBypassed");
    }

    #[test]
    fn dropped_events_are_logged_once_a_minute() {
        let start = Instant::now();
        let mut allowance = Allowance::new(1, start);
        assert_eq!(allowance.take_dropped(start), None, "none was dropped");
        allowance.dropped = 3;
        assert_eq!(allowance.take_dropped(start), Some(3));
        allowance.dropped += 2;
        assert_eq!(allowance.take_dropped(start + Duration::from_secs(30)), None);
        assert_eq!(allowance.take_dropped(start + MINUTE), Some(2));
    }

    fn failed(label: &str, times: u64) -> PolicyTransition {
        PolicyTransition::Failed { label: label.into(), times, last: "admit: it trapped".into() }
    }

    /// The events of a stack with these policies.
    fn policy_events(active: &[&str]) -> PolicyEvents {
        let active = active.iter().map(|label| ((*label).to_owned(), PolicyStatus::default())).collect();
        PolicyEvents { active: Arc::new(active), ..PolicyEvents::default() }
    }

    /// Reason, whether it is a warning, and note of each event.
    fn fields(events: Vec<PendingEvent>) -> Vec<(&'static str, bool, String)> {
        events.into_iter().map(|event| (event.reason, event.warning, event.note)).collect()
    }

    #[test]
    fn a_fault_is_an_event_at_once_and_the_following_are_one_a_minute() {
        let (mut policies, begin) = (policy_events(&["a@1", "b@2"]), Instant::now());
        let mut at = |second, all: &[_]| fields(policies.events(all, begin + Duration::from_secs(second)));
        let first = at(1, &[failed("a@1", 1)]);
        assert_eq!(first, [("PolicyFault", true, "policy a@1 failed: admit: it trapped".into())]);
        assert_eq!(at(2, &[]), [], "nothing new");
        assert_eq!(at(60, &[failed("a@1", 39)]), [], "too soon");
        assert_eq!(policies.next_due(), Some(begin + Duration::from_secs(61)));
        let mut at = |second, all: &[_]| fields(policies.events(all, begin + Duration::from_secs(second)));
        let later = at(61, &[failed("a@1", 2)]);
        assert_eq!(later[0].2, "policy a@1 failed 41 times, with the last error: admit: it trapped");
        assert_eq!(at(62, &[failed("b@2", 3)]).len(), 1, "another policy has a minute of its own");
        assert_eq!(policies.next_due(), None);
        // No event for a policy that the stack no longer has.
        policies.events(&[failed("a@1", 1)], begin + Duration::from_secs(63));
        policies.active = Arc::default();
        assert_eq!(policies.events(&[], begin + Duration::from_secs(200)), []);
        assert_eq!(policies.next_due(), None);
    }

    #[test]
    fn a_suspension_and_its_end_always_are_events() {
        let (mut policies, now) = (policy_events(&["a@1"]), Instant::now());
        let suspended = || PolicyTransition::Suspended { label: "a@1".into(), last: "fault 5".into() };
        policies.events(&[failed("a@1", 4)], now);
        let events = fields(policies.events(&[failed("a@1", 1), suspended()], now));
        assert_eq!(events.len(), 1, "the last fault is part of it: {events:?}");
        assert!(events[0].0 == "PolicySuspended" && events[0].1, "{events:?}");
        assert!(events[0].2.contains("unsuspend") && events[0].2.contains("fault 5"));
        assert_eq!(policies.events(&[], now), []);
        let again = fields(policies.events(&[PolicyTransition::Resumed { label: "a@1".into() }], now));
        assert_eq!((again[0].0, again[0].1), ("PolicyAskedAgain", false));
    }
}
