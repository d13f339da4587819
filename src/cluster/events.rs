//! Tells what happens to GPUs as events of the node and of pods, so that `kubectl describe` shows it.
//! Nobody waits for it: what cannot be told in time is dropped and counted.

use super::Settings;
use super::bypass::Bypasses;
use super::client::{ANSWER_MAX, words};
use super::news::{About, Notice, news};
use super::policies::Policies;
use super::wait::{self, Backoff};
use berth_core::admission::{Door, Standings};
use berth_kernel::ledger::Ledger;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{Receiver, Sender};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Most events of a minute: a drain of a GPU with 48 shares tells of each pod, and some more.
const EVENTS_PER_MINUTE_MAX: u32 = 60;
/// Most events of a minute about GPUs that are used past every grant. They have an allowance of their
/// own: whoever starts processes for it must not keep a drain or a sick GPU from being told. What is
/// beyond waits.
const BYPASSES_PER_MINUTE_MAX: u32 = 20;
/// Most events of a minute about policies: each of a stack of 16 fails, is suspended, and is asked again.
const POLICIES_PER_MINUTE_MAX: u32 = 48;
/// Events that may wait for an API server that is away: what two minutes may bring. At a note of
/// 1 KiB that is 128 KiB.
pub(super) const EVENTS_WAITING_MAX: usize = 128;
/// How many of these those about bypasses and policies may not take.
const KEPT_FREE: usize = EVENTS_WAITING_MAX / 2;
/// How often one event is tried. With waits that double from a second that is half a minute.
const TRIES_MAX: u32 = 6;
/// Kinds of event that are remembered, to count what repeats instead of telling it anew.
const REMEMBERED_MAX: usize = 64;
/// Who reports, as `kubectl describe` shows it.
const CONTROLLER: &str = "berth";
const MINUTE: Duration = Duration::from_secs(60);

/// Compares snapshots for ever. From the very start, so that what happens while the API server is not
/// reached yet is told later, and what turned while no daemon ran, too: `told` is how the store had it.
pub(super) async fn collect(settings: &Settings, door: &Door, told: Arc<Ledger>, out: Sender<Notice>) {
    let mut snapshots = door.watch();
    snapshots.mark_changed();
    let mut standings = door.watch_standings();
    standings.mark_changed();
    let mut collector = Collector::new(told, Instant::now());
    loop {
        let due = collector.policies.due();
        let ended = tokio::select! {
            changed = snapshots.changed() => changed.is_err(),
            changed = standings.changed() => changed.is_err(),
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => false,
        };
        if ended {
            return std::future::pending().await;
        }
        sleep(settings.gather).await;
        let now = snapshots.borrow_and_update().clone();
        collector.step(now, &out, Instant::now());
        let fare = standings.borrow_and_update().clone();
        collector.policies(fare, &out, Instant::now());
    }
}

/// What was told, and how much more may be.
struct Collector {
    told: Arc<Ledger>,
    allowance: Allowance,
    bypasses: Bypasses,
    of_bypasses: Allowance,
    policies: Policies,
    of_policies: Allowance,
}

impl Collector {
    fn new(told: Arc<Ledger>, now: Instant) -> Self {
        Self {
            told,
            allowance: Allowance::new(EVENTS_PER_MINUTE_MAX, now),
            bypasses: Bypasses::default(),
            of_bypasses: Allowance::new(BYPASSES_PER_MINUTE_MAX, now),
            policies: Policies::default(),
            of_policies: Allowance::new(POLICIES_PER_MINUTE_MAX, now),
        }
    }

    fn step(&mut self, ledger: Arc<Ledger>, out: &Sender<Notice>, now: Instant) {
        for notice in news(&self.told, &ledger) {
            if !self.allowance.take(now) || out.try_send(notice).is_err() {
                self.allowance.dropped += 1;
            }
        }
        // Nobody else sends meanwhile, so this room stays.
        let room = out.capacity().saturating_sub(KEPT_FREE).min(self.of_bypasses.left(now));
        for notice in self.bypasses.news(&ledger, room) {
            if !self.of_bypasses.take(now) || out.try_send(notice).is_err() {
                self.allowance.dropped += 1;
            }
        }
        self.told = ledger;
        self.say_dropped(now);
    }

    /// Tells of policies. Like bypasses, they leave room for what becomes of GPUs.
    fn policies(&mut self, standings: Arc<Standings>, out: &Sender<Notice>, now: Instant) {
        for notice in self.policies.news(standings, now) {
            let room = out.capacity() > KEPT_FREE && self.of_policies.take(now);
            if !room || out.try_send(notice).is_err() {
                self.allowance.dropped += 1;
            }
        }
        self.say_dropped(now);
    }

    fn say_dropped(&mut self, now: Instant) {
        if let Some(dropped) = self.allowance.dropped_to_say(now) {
            tracing::warn!(dropped, "events were too many to be told to the API server");
        }
    }
}

/// How many events may still be told.
struct Allowance {
    per_minute: u32,
    left: u32,
    since: Instant,
    dropped: u64,
    said: Option<Instant>,
}

impl Allowance {
    fn new(per_minute: u32, now: Instant) -> Self {
        Self { per_minute, left: per_minute, since: now, dropped: 0, said: None }
    }

    /// How many there are.
    fn left(&mut self, now: Instant) -> usize {
        if now.duration_since(self.since) >= MINUTE {
            *self = Self { left: self.per_minute, since: now, ..*self };
        }
        self.left as usize
    }

    /// Takes one, if there is one. They come back all at once, a minute after the first was taken.
    fn take(&mut self, now: Instant) -> bool {
        let taken = self.left(now) > 0;
        self.left = self.left.saturating_sub(1);
        taken
    }

    /// How many were dropped so far, if that is to be said: at most once a minute.
    fn dropped_to_say(&mut self, now: Instant) -> Option<u64> {
        let said = self.said.is_some_and(|said| now.duration_since(said) < MINUTE);
        if self.dropped == 0 || said {
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.dropped))
    }
}

/// Tells what is collected, for ever.
pub(super) async fn publish(settings: &Settings, client: Client, notices: &mut Receiver<Notice>) {
    let mut teller = Teller { client, node: settings.node.clone(), known: VecDeque::new() };
    let mut said = false;
    while let Some(notice) = notices.recv().await {
        match teller.tell(&notice, settings).await {
            Ok(()) => said = false,
            Err(why) if !std::mem::replace(&mut said, true) => {
                tracing::warn!(reason = notice.reason, why, "an event could not be told to the API server");
            }
            Err(_) => {}
        }
    }
    std::future::pending::<()>().await;
}

struct Teller {
    client: Client,
    node: String,
    /// What was told lately. The library tells events apart by everything but their note, and that is
    /// where ours name the GPU: so each has a recorder of its own, which counts its repetitions.
    known: VecDeque<(Notice, Recorder)>,
}

impl Teller {
    async fn tell(&mut self, notice: &Notice, settings: &Settings) -> Result<(), String> {
        let recorder = self.recorder(notice);
        let event = Event {
            type_: if notice.warning { EventType::Warning } else { EventType::Normal },
            reason: notice.reason.into(),
            note: Some(notice.note.clone()),
            action: notice.action.into(),
            secondary: None,
        };
        let about = self.reference(&notice.about);
        let mut backoff = Backoff::new(settings.again);
        let mut tries = 1;
        loop {
            let why = match timeout(ANSWER_MAX, recorder.publish(&event, &about)).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(kube::Error::Api(status))) if is_final(status.code) => {
                    // A repetition of what the API server has forgotten is told as new next time.
                    self.known.retain(|(known, _)| known != notice);
                    let hint = if status.code == 403 {
                        " (the daemon needs: create and patch events of events.k8s.io; ClusterRole berth-tell, see deploy/cluster-role.yaml)"
                    } else {
                        ""
                    };
                    return Err(format!("{}{hint}", status.message));
                }
                Ok(Err(error)) => words(&error),
                Err(_) => format!("no answer within {} s", ANSWER_MAX.as_secs()),
            };
            if tries == TRIES_MAX {
                return Err(why);
            }
            tries += 1;
            let wait = backoff.next(wait::random());
            sleep(settings.retry_after.delay(wait, Instant::now())).await;
        }
    }

    fn recorder(&mut self, notice: &Notice) -> Recorder {
        if let Some((_, recorder)) = self.known.iter().find(|(known, _)| known == notice) {
            return recorder.clone();
        }
        let reporter = Reporter { controller: CONTROLLER.into(), instance: Some(self.node.clone()) };
        let recorder = Recorder::new(self.client.clone(), reporter);
        if self.known.len() == REMEMBERED_MAX {
            self.known.pop_front();
        }
        self.known.push_back((notice.clone(), recorder.clone()));
        recorder
    }

    /// The kubelet's own events of a node have its name as UID, and `kubectl describe node` looks for
    /// that.
    fn reference(&self, about: &About) -> ObjectReference {
        match about {
            About::Node => ObjectReference {
                kind: Some("Node".into()),
                name: Some(self.node.clone()),
                uid: Some(self.node.clone()),
                ..ObjectReference::default()
            },
            About::Pod { namespace, name, uid } => ObjectReference {
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

/// Whether another try would be answered the same: all errors that are ours but "too many".
fn is_final(code: u16) -> bool {
    (400..500).contains(&code) && code != 429
}

#[cfg(test)]
mod tests {
    use super::super::news::tests::Node;
    use super::*;
    use tokio::sync::mpsc;

    #[test]
    fn so_many_events_a_minute_and_no_more() {
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
    async fn bypasses_never_keep_a_drain_from_being_told() {
        let mut node = Node::new();
        let (out, mut told) = mpsc::channel(EVENTS_WAITING_MAX);
        let start = Instant::now();
        let mut collector = Collector::new(Arc::new(node.ledger.clone()), start);
        // Two hundred processes, each with a name of its own, for ten minutes; nobody takes an event.
        let many: Vec<u32> = (1000..1200).collect();
        node.later(Some(&many));
        for minute in 0..10 {
            node.later(Some(&many));
            collector.step(Arc::new(node.ledger.clone()), &out, start + minute * MINUTE);
            let waiting = EVENTS_WAITING_MAX - out.capacity();
            let most = (minute as usize + 1) * BYPASSES_PER_MINUTE_MAX as usize;
            assert_eq!(waiting, most.min(EVENTS_WAITING_MAX - KEPT_FREE));
        }
        node.cordon("fan");
        collector.step(Arc::new(node.ledger.clone()), &out, start + 10 * MINUTE);
        let reasons = std::iter::from_fn(|| told.try_recv().ok()).map(|n| n.reason);
        let reasons: Vec<_> = reasons.collect();
        assert_eq!(reasons.last(), Some(&"GPUCordoned"));
        // What found no room is told when there is some.
        collector.step(Arc::new(node.ledger.clone()), &out, start + 10 * MINUTE);
        assert_eq!(told.try_recv().unwrap().reason, "GPUBypassed");
    }

    #[tokio::test]
    async fn what_turned_while_no_daemon_ran_is_told() {
        let mut node = Node::new();
        let before = Arc::new(node.ledger.clone());
        node.look(false);
        let (out, mut told) = mpsc::channel(EVENTS_WAITING_MAX);
        Collector::new(before, Instant::now()).step(Arc::new(node.ledger.clone()), &out, Instant::now());
        assert_eq!(told.try_recv().unwrap().reason, "GPUVanished");
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn what_was_dropped_is_said_once_a_minute() {
        let start = Instant::now();
        let mut allowance = Allowance::new(1, start);
        assert_eq!(allowance.dropped_to_say(start), None, "nothing was");
        allowance.dropped = 3;
        assert_eq!(allowance.dropped_to_say(start), Some(3));
        allowance.dropped += 2;
        assert_eq!(allowance.dropped_to_say(start + Duration::from_secs(30)), None);
        assert_eq!(allowance.dropped_to_say(start + MINUTE), Some(2));
    }
}
