//! Simulation of a controller that creates the next pod as soon as one is refused.

use super::*;
use crate::evidence::pods::tests::{pod, view};
use crate::evidence::pods::{Pod, Stage};
use crate::hardware::gpu::{Inventory, Part};
use crate::ids::names::{DeviceId, Digest, GpuId, Resource};
use crate::node::change::{Change, Entry};
use crate::node::command::{Activation, Attempt, Command, NewStack, StackAnswer};
use crate::node::decide::decide;
use crate::node::ledger::Ledger;
use crate::policy::hooks::{AdmitRequest, FaultKind, Terms};
use crate::policy::stack::{OnFault, Permissions, Stack, StackEntry, StackOrigin};
use crate::sharing::listing::listing;
use crate::sharing::offer::{Consumes, OfferLine, PartOffer};
use std::collections::VecDeque;
use std::sync::Arc;

const GPUS: usize = 8;
/// How often the controller creates a pod, milliseconds.
const INTERVAL: u64 = 100;
/// Delay until the scheduler sees a change of the node's allocatable or the end of a pod, milliseconds.
const LAG: u64 = 1_000;
const TEN_MINUTES: u64 = 600_000;

/// A node of whole GPUs, a scheduler that sees its changes late, and the refused pods.
struct Storm {
    ledger: Ledger,
    now: Now,
    /// Updates on their way to the scheduler: arrival time, and how many devices are allocatable.
    pending_updates: VecDeque<(u64, usize)>,
    allocatable: usize,
    /// When the scheduler sees the end of each refused pod, which it counts until then.
    pending_ends: VecDeque<u64>,
    failures: usize,
    admitted: usize,
    /// The fewest devices that were listed as healthy.
    fewest_healthy: usize,
    until: u64,
}

fn resource() -> Resource {
    Resource::parse("nvidia.com/gpu").unwrap()
}

fn part(i: usize) -> Part {
    Part::whole_gpu(GpuId::parse(&format!("GPU-{i}")).unwrap(), 0)
}

impl Storm {
    fn new() -> Self {
        let mut storm = Self {
            ledger: Ledger::default(),
            now: Now::default(),
            pending_updates: VecDeque::new(),
            allocatable: GPUS,
            pending_ends: VecDeque::new(),
            failures: 0,
            admitted: 0,
            fewest_healthy: GPUS,
            until: TEN_MINUTES,
        };
        let parts: Vec<Part> = (0..GPUS).map(part).collect();
        let line = OfferLine { resource: resource(), count: 1, consumes: Consumes::Whole };
        let offer = |p: &Part| (PartOffer { part: p.id.clone(), lines: vec![line.clone()] }, "test".into());
        let offers = parts.iter().map(offer).collect();
        storm.submit(&Command::RecordScan(Inventory { parts, ..Inventory::default() }));
        storm.submit(&Command::Offer(offers));
        let stack = Stack { entries: vec![entry()], ..Stack::default() };
        storm.ledger.apply(&Entry { at: storm.now, changes: vec![Change::StackActivated(stack)] });
        storm
    }

    /// The source of all pods shows a pod of each of these namespaces that waits for a GPU.
    fn with_waiting_pods(mut self, namespaces: &[&str]) -> Self {
        let pods = namespaces.iter().map(|namespace| {
            let waiting = pod(namespace, Stage::Waiting, 1);
            Arc::new(Pod { namespace: (*namespace).into(), ..Pod::clone(&waiting) })
        });
        self.submit(&Command::Pods(view(&pods.collect::<Vec<_>>())));
        self
    }

    /// Returns whether the command was accepted.
    fn submit(&mut self, command: &Command) -> bool {
        let verdict = decide(&self.ledger, command, self.now);
        if !verdict.entry.changes.is_empty() {
            self.ledger.apply(&verdict.entry);
        }
        verdict.refusal.is_none()
    }

    fn healthy_devices(&self) -> Vec<DeviceId> {
        let listed = listing(&self.ledger, &resource()).into_iter();
        listed.filter(|l| l.healthy).map(|l| l.id).collect()
    }

    /// Runs until `until` with a policy that gives `answer`.
    fn run(mut self, answer: &StackAnswer) -> Self {
        while self.now.mono_ms < self.until {
            if self.now.mono_ms.is_multiple_of(1_000) {
                self.submit(&Command::Tick);
            }
            self.update_scheduler();
            if self.allocatable > self.pending_ends.len() + self.admitted {
                self.start_pod(answer);
            }
            let healthy = self.healthy_devices().len();
            self.fewest_healthy = self.fewest_healthy.min(healthy);
            self.pending_updates.push_back((self.now.mono_ms + LAG, healthy));
            self.now.mono_ms += INTERVAL;
            self.now.wall_ms += INTERVAL;
        }
        self
    }

    fn update_scheduler(&mut self) {
        while let Some((_, count)) = self.pending_updates.pop_front_if(|(at, _)| *at <= self.now.mono_ms) {
            self.allocatable = count;
        }
        while self.pending_ends.pop_front_if(|at| *at <= self.now.mono_ms).is_some() {}
    }

    /// The kubelet admits or refuses a pod that the scheduler has bound to the node.
    fn start_pod(&mut self, answer: &StackAnswer) {
        // The kubelet refuses without an Allocate where its own list has no free device.
        let held = |id: &DeviceId| self.ledger.device(&resource(), id).is_some_and(|d| d.held());
        let free = self.healthy_devices().into_iter().find(|id| !held(id));
        let admitted = free.is_some_and(|id| {
            self.submit(&Command::Allocate {
                request: AdmitRequest { resource: resource(), devices: vec![id], claim: None },
                answer: answer.clone(),
                evaluated: None,
                attempt: Attempt::Last { asked_mono_ms: 0 },
            })
        });
        if admitted {
            self.admitted += 1;
        } else {
            self.failures += 1;
            self.pending_ends.push_back(self.now.mono_ms + LAG);
        }
    }
}

fn entry() -> StackEntry {
    StackEntry {
        name: "test".into(),
        digest: Digest::parse(&"a".repeat(64)).unwrap(),
        parameters: "{}".into(),
        permissions: Permissions::default(),
        on_fault: OnFault::Deny,
    }
}

fn deny() -> StackAnswer {
    StackAnswer::Deny { policy: entry().label(), reason: "not on Sundays".into() }
}

fn fail() -> StackAnswer {
    StackAnswer::Faulted { policy: entry().label(), kind: FaultKind::Trap, detail: "unreachable".into() }
}

#[test]
fn the_breaker_limits_a_storm_of_pods_of_one_namespace_that_a_failing_policy_refuses() {
    let storm = Storm::new().with_waiting_pods(&["a"]).run(&fail());
    let most = usize::try_from(LAG / INTERVAL).unwrap() + 8;
    assert!(storm.failures <= most, "{} failures", storm.failures);
    assert!(storm.failures > 3, "the breaker half-opens now and then: {}", storm.failures);
}

#[test]
fn a_policys_denials_of_one_namespace_withdraw_no_device() {
    let storm = Storm::new().with_waiting_pods(&["a"]).run(&deny());
    assert_eq!(storm.fewest_healthy, GPUS);
    let storm = Storm::new().with_waiting_pods(&["a", "b", "c"]).run(&deny());
    assert_eq!(storm.fewest_healthy, GPUS, "all of them may be of one namespace");
    let storm = Storm::new().with_waiting_pods(&[]).run(&deny());
    assert_eq!(storm.fewest_healthy, GPUS, "a pod that the source does not show yet");
}

#[test]
fn denials_of_pods_that_no_source_shows_are_limited_by_short_pauses() {
    let storm = Storm::new().run(&deny());
    assert_eq!(storm.fewest_healthy, 0);
    let most = usize::try_from(TEN_MINUTES / storm.ledger.rules.timing.breaker_pause_ms).unwrap() + 20;
    assert!(storm.failures <= most, "{} failures", storm.failures);
    assert_eq!(storm.ledger.breakers[&resource()].pause_ms, storm.ledger.rules.timing.breaker_pause_ms);
}

#[test]
fn without_a_breaker_thousands_of_pods_fail() {
    let mut storm = Storm::new();
    Arc::make_mut(&mut storm.ledger.rules).timing.breaker_window_ms = 0;
    let storm = storm.run(&deny());
    assert!(storm.failures > 3_000, "{} failures", storm.failures);
}

#[test]
fn the_breaker_is_removed_once_the_policy_allows() {
    let denied = Storm::new().run(&fail());
    assert!(denied.ledger.breakers.contains_key(&resource()));
    let allow = StackAnswer::Allow { by: vec!["test".into()], terms: Terms::default() };
    // Ten more minutes, as the longest pause is five.
    let mut later = denied;
    later.until = 2 * TEN_MINUTES;
    let later = later.run(&allow);
    assert_eq!(later.admitted, GPUS, "every GPU of the node is granted");
    assert!(later.ledger.breakers.is_empty());
}

#[test]
fn another_stack_lists_the_devices_again() {
    let mut denied = Storm::new().run(&deny());
    assert!(denied.healthy_devices().len() <= 1);
    let stack = NewStack {
        origin: StackOrigin::Api,
        failed: None,
        by: "ada".into(),
        why: String::new(),
        entries: Vec::new(),
    };
    denied.submit(&Command::Activate(Activation { stack, offers: Vec::new(), triage: Vec::new() }));
    assert_eq!(denied.healthy_devices().len(), GPUS);
}
