//! Simulation of a controller that creates the next pod as soon as one is refused.

use super::super::command::{Attempt, Command, Rules, StackAnswer};
use super::super::decide::decide;
use super::super::gpu::{Inventory, Part};
use super::super::ledger::Ledger;
use super::super::listing::listing;
use super::super::names::{DeviceId, PartId, Resource};
use super::super::offer::{Consumes, OfferLine, PartOffer};
use super::super::policy::{AdmitRequest, Terms};
use super::*;
use std::collections::{BTreeMap, VecDeque};

const GPUS: usize = 8;
/// How often the controller creates a pod, milliseconds.
const INTERVAL: u64 = 100;
/// Delay until the scheduler sees a change of the node's allocatable or the end of a pod, milliseconds.
const LAG: u64 = 1_000;
const TEN_MINUTES: u64 = 600_000;

/// A node of whole GPUs, a scheduler that sees its changes late, and the refused pods.
struct Storm {
    ledger: Ledger,
    rules: Rules,
    now: Now,
    /// Updates on their way to the scheduler: arrival time, and how many devices are allocatable.
    pending_updates: VecDeque<(u64, usize)>,
    allocatable: usize,
    /// When the scheduler sees the end of each refused pod, which it counts until then.
    pending_ends: VecDeque<u64>,
    failures: usize,
    admitted: usize,
    until: u64,
}

fn resource() -> Resource {
    Resource::parse("nvidia.com/gpu").unwrap()
}

fn part(i: usize) -> Part {
    Part {
        id: PartId::parse(&format!("GPU-{i}")).unwrap(),
        parent: None,
        vendor: "nvidia".into(),
        model: String::new(),
        gpu_index: 0,
        minor: None,
        memory_mib: 1,
        pci_bus: None,
        numa_node: None,
        mig_enabled: false,
        mig: None,
        attributes: BTreeMap::new(),
    }
}

impl Storm {
    fn new(rules: Rules) -> Self {
        let mut storm = Self {
            ledger: Ledger::default(),
            rules,
            now: Now::default(),
            pending_updates: VecDeque::new(),
            allocatable: GPUS,
            pending_ends: VecDeque::new(),
            failures: 0,
            admitted: 0,
            until: TEN_MINUTES,
        };
        let parts: Vec<Part> = (0..GPUS).map(part).collect();
        let line = OfferLine { resource: resource(), count: 1, consumes: Consumes::Whole };
        let offer = |p: &Part| (PartOffer { part: p.id.clone(), lines: vec![line.clone()] }, "test".into());
        let offers = parts.iter().map(offer).collect();
        storm.submit(&Command::RecordScan(Inventory { parts, ..Inventory::default() }));
        storm.submit(&Command::Offer(offers));
        storm
    }

    /// Returns whether the command was accepted.
    fn submit(&mut self, command: &Command) -> bool {
        let verdict = decide(&self.ledger, &self.rules, command, self.now);
        if !verdict.entry.changes.is_empty() {
            self.ledger.apply(&verdict.entry);
        }
        verdict.refusal.is_none()
    }

    fn healthy_devices(&self) -> Vec<DeviceId> {
        let listed = listing(&self.ledger, &resource(), 100).into_iter();
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
            self.pending_updates.push_back((self.now.mono_ms + LAG, self.healthy_devices().len()));
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
                request: AdmitRequest { resource: resource(), devices: vec![id] },
                answer: answer.clone(),
                generation: self.ledger.generation,
                is_retry: true,
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

fn deny() -> StackAnswer {
    StackAnswer::Deny { policy: "test@0".into(), reason: "not on Sundays".into() }
}

#[test]
fn the_breaker_limits_a_storm_of_refused_pods() {
    let storm = Storm::new(Rules::default()).run(&deny());
    let most = usize::try_from(LAG / INTERVAL).unwrap() + 8;
    assert!(storm.failures <= most, "{} failures", storm.failures);
    assert!(storm.failures > 3, "the breaker half-opens now and then: {}", storm.failures);
}

#[test]
fn without_a_breaker_thousands_of_pods_fail() {
    let mut rules = Rules::default();
    rules.timing.breaker_window_ms = 0;
    let storm = Storm::new(rules).run(&deny());
    assert!(storm.failures > 3_000, "{} failures", storm.failures);
}

#[test]
fn the_breaker_is_removed_once_the_policy_allows() {
    let denied = Storm::new(Rules::default()).run(&deny());
    assert!(denied.ledger.breakers.contains_key(&resource()));
    let allow = StackAnswer::Allow { by: vec!["test".into()], terms: Terms::default() };
    // Ten more minutes, as the longest pause is five.
    let mut later = denied;
    later.until = 2 * TEN_MINUTES;
    let later = later.run(&allow);
    assert_eq!(later.admitted, GPUS, "every GPU of the node is granted");
    assert!(later.ledger.breakers.is_empty());
}
