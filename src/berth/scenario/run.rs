//! Runs a scenario step by step and compares the outcome of each step with its expectations.

use super::calls;
use super::expect::{Difference, Outcome, contains};
use super::format::{Allocate, Place, Reading as Reported, Scenario, Step, Verb};
use super::node::Node;
use super::pods::Pods;
use super::report::Failure;
use berth_core::keeper::CommandError;
use berth_kernel::change::Change;
use berth_kernel::command::{Attempt, Command};
use berth_kernel::gpu::Reading;
use berth_kernel::names::{AllocationId, DeviceId, Resource};
use berth_kernel::policy::{AdmitRequest, PlaceRequest};
use std::collections::BTreeMap;

/// A running scenario.
struct Run<'n, 'p> {
    node: &'n mut Node<'p>,
    pods: Pods,
    /// Allocations by their name (`as`).
    named: BTreeMap<String, AllocationId>,
}

/// Runs all steps. `activation_faults` are the faults because of which the stack is not active.
///
/// # Errors
/// The step that cannot be run, with the cause.
pub(super) fn run(
    scenario: &Scenario,
    node: &mut Node<'_>,
    activation_faults: &[String],
) -> Result<Vec<Failure>, String> {
    if !activation_faults.is_empty() {
        return check_inactive(scenario, node, activation_faults);
    }
    let mut run = Run { node, pods: Pods::default(), named: BTreeMap::new() };
    let mut failures = Vec::new();
    for (index, step) in scenario.steps.iter().enumerate() {
        let with_step = |error: String| match scenario.line(index) {
            Some(line) => format!("step {} (line {line}): {error}", index + 1),
            None => format!("step {}: {error}", index + 1),
        };
        let verb = step.verb().map_err(with_step)?;
        let outcome = run.step(verb).and_then(|mut outcome| {
            run.node.settle()?;
            if matches!(verb, Verb::Offer) {
                run.add_offers(&mut outcome);
            }
            Ok(outcome)
        });
        let (faults, calls) = (run.node.take_faults(), run.node.take_calls());
        let differences = differences(step, &outcome.map_err(with_step)?, &faults);
        if !differences.is_empty() {
            let snapshot = run.node.snapshot();
            failures.push(Failure {
                step: index + 1,
                line: scenario.line(index),
                verb: verb.as_str().into(),
                differences,
                calls: calls::step_lines(&calls, &snapshot),
            });
        }
    }
    Ok(failures)
}

/// Checks a scenario whose stack is not active. It may expect the fault, in an `offer` step that is its only step.
fn check_inactive(scenario: &Scenario, node: &Node<'_>, faults: &[String]) -> Result<Vec<Failure>, String> {
    let first = scenario.steps.first();
    let calls = node.take_calls();
    let expected = first.filter(|step| matches!(step.verb(), Ok(Verb::Offer)) && step.expect.fault.is_some());
    match (expected, scenario.steps.len()) {
        (Some(_), 2..) => {
            Err(format!("the stack was not activated, so only one step is possible: {}", faults.join("; ")))
        }
        (Some(step), _) => {
            let differences = differences(step, &Outcome::default(), faults);
            if differences.is_empty() {
                return Ok(Vec::new());
            }
            let calls = calls::step_lines(&calls, &node.snapshot());
            let line = scenario.line(0);
            Ok(vec![Failure { step: 1, line, verb: "offer".into(), differences, calls }])
        }
        (None, _) => Err(format!("the stack was not activated: {}", faults.join("; "))),
    }
}

/// Compares a step's outcome with its expectations.
fn differences(step: &Step, outcome: &Outcome, faults: &[String]) -> Vec<Difference> {
    let expect = &step.expect;
    let mut differences = Vec::new();
    match (&expect.fault, faults) {
        (None, []) => {}
        (None, faults) => differences.push(Difference::new("fault", "none", faults.join("; "))),
        (Some(part), faults) if faults.iter().any(|fault| contains(fault, part)) => {}
        (Some(part), []) => differences.push(Difference::new("fault", format!("...{part}..."), "none")),
        (Some(part), faults) => {
            differences.push(Difference::new("fault", format!("...{part}..."), faults.join("; ")));
        }
    }
    match (&expect.refused, &outcome.refused) {
        (None, None) => differences.extend(expect.differences(outcome)),
        // An entry whose `onFault` is deny refuses with its fault.
        (None, Some(refusal)) if expect.fault.as_ref().is_some_and(|part| contains(refusal, part)) => {}
        (None, Some(refusal)) => differences.push(Difference::new("refused", "no", refusal)),
        (Some(part), Some(refusal)) if contains(refusal, part) => {}
        (Some(part), Some(refusal)) => {
            differences.push(Difference::new("refused", format!("...{part}..."), refusal));
        }
        (Some(part), None) => {
            let got = format!("granted or placed on GPUs {:?}", outcome.gpus);
            differences.push(Difference::new("refused", format!("...{part}..."), got));
        }
    }
    differences
}

impl Run<'_, '_> {
    fn step(&mut self, verb: Verb<'_>) -> Result<Outcome, String> {
        match verb {
            Verb::Offer => Ok(Outcome::default()),
            Verb::Allocate(allocate) => self.allocate(allocate),
            Verb::Place(place) => self.place(place),
            Verb::Release(name) => self.release(name),
            Verb::Health(health) => self.node.set_health(health).map(|()| Outcome::default()),
            Verb::Cordon(gpu) => self.node.cordon(gpu, true).map(|()| Outcome::default()),
            Verb::Uncordon(gpu) => self.node.cordon(gpu, false).map(|()| Outcome::default()),
            Verb::Reading(reading) => self.triage(reading),
            Verb::Seconds(seconds) => self.node.advance(seconds).map(|()| Outcome::default()),
        }
    }

    /// Adds the offers by GPU and the number of free devices.
    fn add_offers(&self, outcome: &mut Outcome) {
        let node = self.node.snapshot();
        for state in node.parts.values().filter(|state| state.present) {
            let of_gpu = outcome.offered.entry(state.part.gpu_index).or_default();
            for line in &state.lines {
                *of_gpu.entry(line.resource.to_string()).or_default() += line.count;
            }
        }
        for resource in node.resources() {
            let free = self.node.free(&resource).len();
            outcome.free.insert(resource.to_string(), u32::try_from(free).unwrap_or(u32::MAX));
        }
    }

    fn allocate(&mut self, allocate: &Allocate) -> Result<Outcome, String> {
        let resource = resource(&allocate.resource)?;
        let count = allocate.on.as_ref().map_or(allocate.count.unwrap_or_default(), Vec::len);
        if count == 0 {
            return Err("allocate: count must be at least 1".into());
        }
        self.pods.publish_candidates(self.node, &allocate.candidates, &resource, count)?;
        let chosen = match &allocate.on {
            Some(on) => self.one_device_per_gpu(&resource, on),
            None => self.preferred_devices(&resource, count),
        };
        let granted = match chosen {
            Ok((devices, reason)) => self.admit(&resource, devices).map(|granted| (granted, reason)),
            Err(refused) => Err(refused),
        };
        let allocation = granted.as_ref().ok().map(|(allocation, _)| allocation);
        self.pods.record_grant(self.node, &allocate.candidates, allocation)?;
        let (allocation, placement_reason) = match granted {
            Ok(granted) => granted,
            Err(refused) => return Ok(Outcome { refused: Some(refused), ..Outcome::default() }),
        };
        if let Some(name) = &allocate.name {
            self.named.insert(name.clone(), allocation.id);
        }
        let decision = allocation.decision;
        let reasons = [placement_reason, decision.reason].into_iter().filter(|reason| !reason.is_empty());
        Ok(Outcome {
            gpus: self.gpus(&allocation.devices),
            environment: decision.environment.into_iter().collect(),
            memory_mib: decision.limits.memory_mib,
            compute_percent: decision.limits.compute_percent,
            reason: reasons.collect::<Vec<_>>().join("; "),
            ..Outcome::default()
        })
    }

    /// The best of all free devices, as the kubelet requests them.
    fn preferred_devices(
        &mut self,
        resource: &Resource,
        size: usize,
    ) -> Result<(Vec<DeviceId>, String), String> {
        let available = self.node.free(resource);
        if available.len() < size {
            return Err(too_few(resource, available.len(), size));
        }
        let request = PlaceRequest { resource: resource.clone(), available, required: Vec::new(), size };
        let (placement, _) = self.node.evaluate(|evaluation| evaluation.place(&request));
        Ok((placement.devices, placement.reason))
    }

    /// One device of each GPU without asking policies, as a kubelet chooses: a free one, or else one that is not held,
    /// which a kubelet with an outdated list takes for free.
    fn one_device_per_gpu(&self, resource: &Resource, on: &[u32]) -> Result<(Vec<DeviceId>, String), String> {
        let (free, unheld) = (self.node.free(resource), self.node.unheld(resource));
        let mut chosen: Vec<DeviceId> = Vec::new();
        for gpu in on {
            let is_candidate = |id: &&DeviceId| self.node.index_of(id) == *gpu && !chosen.contains(id);
            let device = free.iter().find(is_candidate).or_else(|| unheld.iter().find(is_candidate)).cloned();
            chosen.push(device.ok_or_else(|| format!("too few devices: GPU {gpu} has no free {resource}"))?);
        }
        Ok((chosen, String::new()))
    }

    fn admit(
        &mut self,
        resource: &Resource,
        mut devices: Vec<DeviceId>,
    ) -> Result<berth_kernel::allocation::Allocation, String> {
        devices.sort();
        let request = AdmitRequest { resource: resource.clone(), devices };
        let seen = self.node.snapshot().generation;
        let answer = self.node.evaluate(|evaluation| evaluation.admit(&request));
        let command =
            Command::Allocate { request, answer, generation: seen, is_retry: false, attempt: Attempt::Last };
        let applied = self.node.turn(&command).map_err(|error| match error {
            CommandError::Refused(refusal) => refusal.to_string(),
            other => other.to_string(),
        })?;
        let granted = applied.entry.changes.iter().find_map(|change| match change {
            Change::Granted(allocation) => Some(allocation.clone()),
            _ => None,
        });
        granted.ok_or_else(|| "nothing was granted".into())
    }

    fn place(&mut self, place: &Place) -> Result<Outcome, String> {
        let resource = resource(&place.resource)?;
        let among = |gpu: u32| place.among.as_ref().is_none_or(|gpus| gpus.contains(&gpu));
        let mut available = self.node.free(&resource);
        available.retain(|id| among(self.node.index_of(id)));
        let mut required: Vec<DeviceId> = Vec::new();
        for gpu in &place.required {
            let is_candidate = |id: &&DeviceId| self.node.index_of(id) == *gpu && !required.contains(id);
            let Some(device) = available.iter().find(is_candidate).cloned() else {
                let refused = format!("too few devices: the required GPU {gpu} has no free {resource}");
                return Ok(Outcome { refused: Some(refused), ..Outcome::default() });
            };
            required.push(device);
        }
        if available.len() < place.count || required.len() > place.count {
            let refused = too_few(&resource, available.len(), place.count);
            return Ok(Outcome { refused: Some(refused), ..Outcome::default() });
        }
        let request = PlaceRequest { resource, available, required, size: place.count };
        let (placement, _) = self.node.evaluate(|evaluation| evaluation.place(&request));
        Ok(Outcome { gpus: self.gpus(&placement.devices), reason: placement.reason, ..Outcome::default() })
    }

    fn release(&mut self, name: &str) -> Result<Outcome, String> {
        let id = self.named.remove(name).ok_or_else(|| format!("nothing is allocated as {name}"))?;
        self.node.turn(&Command::End { id, force: true }).map_err(|error| error.to_string())?;
        self.pods.record_release(self.node, id)?;
        Ok(Outcome::default())
    }

    fn triage(&mut self, reported: &Reported) -> Result<Outcome, String> {
        let reading = Reading {
            part: self.node.gpu(reported.gpu)?,
            source: reported.source.clone(),
            code: reported.code,
            detail: reported.detail.clone(),
        };
        let (answer, _by) = self.node.evaluate(|evaluation| evaluation.triage(&reading));
        let outcome = Outcome {
            severity: answer.severity.as_str().into(),
            again_after_seconds: answer.again_after_s,
            reason: answer.reason.clone(),
            ..Outcome::default()
        };
        self.node.turn(&Command::ApplyTriage { reading, answer }).map_err(|error| error.to_string())?;
        Ok(outcome)
    }

    fn gpus(&self, devices: &[DeviceId]) -> Vec<u32> {
        let mut gpus: Vec<u32> = devices.iter().map(|id| self.node.index_of(id)).collect();
        gpus.sort_unstable();
        gpus
    }
}

fn resource(name: &str) -> Result<Resource, String> {
    Resource::parse(name).map_err(|error| error.to_string())
}

fn too_few(resource: &Resource, free: usize, requested: usize) -> String {
    format!("too few devices: {free} of {resource} available, {requested} requested")
}
