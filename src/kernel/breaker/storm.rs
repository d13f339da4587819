//! A controller that creates the next pod as soon as one is refused, in simulated time.

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
/// How long a node's allocatable and a pod's end take to reach the scheduler, milliseconds.
const LAG: u64 = 1_000;
const TEN_MINUTES: u64 = 600_000;

/// A node of whole GPUs, the scheduler that sees it late, and the pods that were refused on it.
struct Storm {
    ledger: Ledger,
    rules: Rules,
    now: Now,
    /// What the scheduler will see: when, and how many are allocatable.
    on_the_way: VecDeque<(u64, usize)>,
    allocatable: usize,
    /// When the scheduler hears of the end of pods that it counts still.
    ends: VecDeque<u64>,
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
        pci_bus: String::new(),
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
            on_the_way: VecDeque::new(),
            allocatable: GPUS,
            ends: VecDeque::new(),
            failures: 0,
            admitted: 0,
            until: TEN_MINUTES,
        };
        let parts: Vec<Part> = (0..GPUS).map(part).collect();
        let line = OfferLine { resource: resource(), count: 1, consumes: Consumes::Whole };
        let offer = |p: &Part| (PartOffer { part: p.id.clone(), lines: vec![line.clone()] }, "test".into());
        let offers = parts.iter().map(offer).collect();
        storm.turn(&Command::Look(Inventory { parts, ..Inventory::default() }));
        storm.turn(&Command::Offer(offers));
        storm
    }

    /// Whether it was not refused.
    fn turn(&mut self, command: &Command) -> bool {
        let verdict = decide(&self.ledger, &self.rules, command, self.now);
        if !verdict.entry.changes.is_empty() {
            self.ledger.apply(&verdict.entry);
        }
        verdict.refusal.is_none()
    }

    fn healthy(&self) -> Vec<DeviceId> {
        let listed = listing(&self.ledger, &resource(), 100).into_iter();
        listed.filter(|l| l.healthy).map(|l| l.id).collect()
    }

    /// Ten minutes in which `answer` is the policy's.
    fn rage(mut self, answer: &StackAnswer) -> Self {
        while self.now.mono_ms < self.until {
            if self.now.mono_ms.is_multiple_of(1_000) {
                self.turn(&Command::Tick);
            }
            self.scheduler_hears();
            if self.allocatable > self.ends.len() + self.admitted {
                self.one_pod(answer);
            }
            self.on_the_way.push_back((self.now.mono_ms + LAG, self.healthy().len()));
            self.now.mono_ms += INTERVAL;
            self.now.wall_ms += INTERVAL;
        }
        self
    }

    fn scheduler_hears(&mut self) {
        while let Some((_, count)) = self.on_the_way.pop_front_if(|(at, _)| *at <= self.now.mono_ms) {
            self.allocatable = count;
        }
        while self.ends.pop_front_if(|at| *at <= self.now.mono_ms).is_some() {}
    }

    /// A pod that the scheduler placed here reaches the kubelet.
    fn one_pod(&mut self, answer: &StackAnswer) {
        // It compares with its own list first, and refuses without asking us.
        let held = |id: &DeviceId| self.ledger.device(&resource(), id).is_some_and(|d| d.held());
        let free = self.healthy().into_iter().find(|id| !held(id));
        let admitted = free.is_some_and(|id| {
            self.turn(&Command::Allocate {
                request: AdmitRequest { resource: resource(), devices: vec![id] },
                answer: answer.clone(),
                seen: self.ledger.generation,
                again: true,
                attempt: Attempt::Last,
            })
        });
        if admitted {
            self.admitted += 1;
        } else {
            self.failures += 1;
            self.ends.push_back(self.now.mono_ms + LAG);
        }
    }
}

fn deny() -> StackAnswer {
    StackAnswer::Deny { policy: "test@0".into(), reason: "not on Sundays".into() }
}

#[test]
fn a_storm_of_refused_pods_dies_down() {
    let storm = Storm::new(Rules::default()).rage(&deny());
    let most = usize::try_from(LAG / INTERVAL).unwrap() + 8;
    assert!(storm.failures <= most, "{} failures", storm.failures);
    assert!(storm.failures > 3, "it is tried again now and then: {}", storm.failures);
}

#[test]
fn without_the_breaker_it_would_be_thousands() {
    let mut rules = Rules::default();
    rules.timing.breaker_window_ms = 0;
    let storm = Storm::new(rules).rage(&deny());
    assert!(storm.failures > 3_000, "{} failures", storm.failures);
}

#[test]
fn once_the_policy_allows_the_breaker_lets_go() {
    let denied = Storm::new(Rules::default()).rage(&deny());
    assert!(denied.ledger.breakers.contains_key(&resource()));
    let allow = StackAnswer::Allow { by: vec!["test".into()], terms: Terms::default() };
    // Ten minutes more: the longest pause is five.
    let mut later = denied;
    later.until = 2 * TEN_MINUTES;
    let later = later.rage(&allow);
    assert_eq!(later.admitted, GPUS, "all of the node");
    assert!(later.ledger.breakers.is_empty());
}
