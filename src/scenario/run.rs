//! Runs a scenario step by step and compares the outcome of each step with its expectations.

use super::expect::{Mismatch, Outcome, contains};
use super::format::{Allocate, Place, ReportedReading, Scenario, Step, Verb};
use super::node::Node;
use super::pods::Pods;
use super::report::{FailedStep, call_lines};
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::ids::names::{AllocationId, DeviceId, Resource};
use berth_kernel::node::change::Change;
use berth_kernel::node::command::{Attempt, Command};
use berth_kernel::policy::hooks::{AdmitRequest, PlaceRequest};
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
) -> Result<Vec<FailedStep>, String> {
    if !activation_faults.is_empty() {
        return check_inactive(scenario, node, activation_faults);
    }
    let mut run = Run { node, pods: Pods::default(), named: BTreeMap::new() };
    let mut failures = Vec::new();
    for (index, step) in scenario.steps.iter().enumerate() {
        let (key, verb) = step.verb().map_err(|error| scenario.step_error(index, &error))?;
        let outcome = run.step(verb).and_then(|mut outcome| {
            run.node.settle()?;
            if matches!(verb, Verb::Offer) {
                run.add_offers(&mut outcome);
            }
            Ok(outcome)
        });
        let faults = run.node.take_faults();
        let outcome = outcome.map_err(|error| scenario.step_error(index, &error))?;
        failures.extend(failure(scenario, index, key, differences(step, &outcome, &faults), run.node));
    }
    Ok(failures)
}

/// Places and admits one device of each resource. Returns the faults; a refusal is none.
///
/// # Errors
/// If the node cannot be simulated further.
pub(super) fn one_of_each(node: &mut Node<'_>) -> Result<Vec<String>, String> {
    let mut run = Run { node, pods: Pods::default(), named: BTreeMap::new() };
    let resources: Vec<_> = run.node.snapshot().resources().into_iter().collect();
    for resource in resources {
        if let Ok((devices, _)) = run.preferred_devices(&resource, 1, None, &[]) {
            // The kernel's refusals are errors here.
            let _ = run.admit(&resource, devices);
            run.node.settle()?;
        }
    }
    Ok(run.node.take_faults())
}

/// Checks a scenario whose stack is not active. It may expect the fault, in an `offer` step that is its only step.
fn check_inactive(
    scenario: &Scenario,
    node: &Node<'_>,
    faults: &[String],
) -> Result<Vec<FailedStep>, String> {
    let is_expected =
        |step: &&Step| matches!(step.verb(), Ok((_, Verb::Offer))) && step.expect.fault.is_some();
    match (scenario.steps.first().filter(is_expected), scenario.steps.len()) {
        (Some(_), 2..) => {
            Err(format!("the stack was not activated, so only one step is possible: {}", faults.join("; ")))
        }
        (Some(step), _) => {
            let differences = differences(step, &Outcome::default(), faults);
            Ok(failure(scenario, 0, "offer", differences, node).into_iter().collect())
        }
        (None, _) => Err(format!("the stack was not activated: {}", faults.join("; "))),
    }
}

/// The failure of a step with these differences, if there are any. Takes the step's policy calls.
fn failure(
    scenario: &Scenario,
    index: usize,
    verb: &str,
    differences: Vec<Mismatch>,
    node: &Node<'_>,
) -> Option<FailedStep> {
    let calls = node.policies.take();
    (!differences.is_empty()).then(|| FailedStep {
        step: index + 1,
        line: scenario.line(index),
        verb: verb.into(),
        differences,
        calls: call_lines(&calls, &node.snapshot()),
    })
}

/// Compares a step's outcome with its expectations.
fn differences(step: &Step, outcome: &Outcome, faults: &[String]) -> Vec<Mismatch> {
    let expect = &step.expect;
    let mut differences = Vec::new();
    let part_or = |part: &Option<String>, none: &str| {
        part.as_ref().map_or_else(|| none.to_owned(), |part| format!("...{part}..."))
    };
    let is_met = match &expect.fault {
        None => faults.is_empty(),
        Some(part) => faults.iter().any(|fault| contains(fault, part)),
    };
    if !is_met {
        let got = if faults.is_empty() { "none".into() } else { faults.join("; ") };
        differences.push(Mismatch::new("fault", part_or(&expect.fault, "none"), got));
    }
    let is_met = match (&expect.refused, &outcome.refused) {
        (None, None) => {
            differences.extend(expect.differences(outcome));
            true
        }
        // An entry whose `onFault` is deny refuses with its fault.
        (None, Some(refusal)) => expect.fault.as_ref().is_some_and(|part| contains(refusal, part)),
        (Some(part), refusal) => refusal.as_ref().is_some_and(|refusal| contains(refusal, part)),
    };
    if !is_met {
        let granted = || format!("granted or placed on GPUs {:?}", outcome.gpus);
        let got = outcome.refused.clone().unwrap_or_else(granted);
        differences.push(Mismatch::new("refused", part_or(&expect.refused, "no"), got));
    }
    differences
}

impl Run<'_, '_> {
    fn step(&mut self, verb: Verb<'_>) -> Result<Outcome, String> {
        match verb {
            Verb::Allocate(allocate) => return self.allocate(allocate),
            Verb::Place(place) => return self.place(place),
            Verb::Reading(reading) => return self.triage(reading),
            Verb::Offer => {}
            Verb::Release(name) => self.release(name)?,
            Verb::Health(health) => self.node.set_health(health)?,
            Verb::Cordon(gpu) => self.node.cordon(gpu, true)?,
            Verb::Uncordon(gpu) => self.node.cordon(gpu, false)?,
            Verb::Usage(usage) => self.node.set_usage(usage)?,
            Verb::Seconds(seconds) => self.node.advance(seconds)?,
        }
        Ok(Outcome::default())
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
            Some(on) => self.named_devices(&resource, on).map(|devices| (devices, String::new())),
            None => self.preferred_devices(&resource, count, None, &[]),
        };
        let granted = chosen.and_then(|(devices, reason)| Ok((self.admit(&resource, devices)?, reason)));
        let allocation = granted.as_ref().ok().map(|(allocation, _)| allocation);
        self.pods.record_grant(self.node, &allocate.candidates, allocation)?;
        let (allocation, placement_reason) = match granted {
            Ok(granted) => granted,
            Err(refused) => return Ok(Outcome::refused(refused)),
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

    /// The best of the free devices, as the kubelet requests them: of the GPUs `among`, if they are given, and one of
    /// each of the `required` ones.
    fn preferred_devices(
        &mut self,
        resource: &Resource,
        size: usize,
        among: Option<&[u32]>,
        required: &[u32],
    ) -> Result<(Vec<DeviceId>, String), String> {
        let mut available = self.node.free(resource);
        available.retain(|id| among.is_none_or(|gpus| gpus.contains(&self.node.index_of(id))));
        let required = self
            .one_device_per_gpu(required, &available)
            .map_err(|gpu| format!("too few devices: the required GPU {gpu} has no free {resource}"))?;
        if available.len() < size || required.len() > size {
            let free = available.len();
            return Err(format!("too few devices: {free} of {resource} available, {size} requested"));
        }
        let request = PlaceRequest { resource: resource.clone(), available, required, size };
        let (placement, _) = self.node.evaluate(|evaluation| evaluation.place(&request));
        Ok((placement.devices, placement.reason))
    }

    /// One device of each GPU without asking policies, as a kubelet chooses: a free one, or else one that is not held,
    /// which a kubelet with an outdated list takes for free.
    fn named_devices(&self, resource: &Resource, on: &[u32]) -> Result<Vec<DeviceId>, String> {
        let mut devices = self.node.free(resource);
        devices.extend(self.node.unheld(resource));
        let chosen = self.one_device_per_gpu(on, &devices);
        chosen.map_err(|gpu| format!("too few devices: GPU {gpu} has no free {resource}"))
    }

    /// The first device of each GPU that is not chosen for another. An error is the GPU without one.
    fn one_device_per_gpu(&self, gpus: &[u32], devices: &[DeviceId]) -> Result<Vec<DeviceId>, u32> {
        let mut chosen: Vec<DeviceId> = Vec::new();
        for gpu in gpus {
            let mut candidates = devices.iter().filter(|id| self.node.index_of(id) == *gpu);
            let device = candidates.find(|id| !chosen.contains(id)).ok_or(*gpu)?;
            chosen.push(device.clone());
        }
        Ok(chosen)
    }

    fn admit(&mut self, resource: &Resource, mut devices: Vec<DeviceId>) -> Result<Allocation, String> {
        devices.sort();
        let request = AdmitRequest { resource: resource.clone(), devices, claim: None };
        let evaluated = Some(self.node.snapshot().generation);
        let answer = self.node.evaluate(|evaluation| evaluation.admit(&request));
        // The reconcile passes of a scenario only name holders, so none counts as newer than the request.
        let attempt = Attempt::Last { asked_mono_ms: u64::MAX };
        let command = Command::Allocate { request, answer, evaluated, attempt };
        let applied = self.node.turn(&command)?;
        let granted = applied.entry.changes.iter().find_map(|change| match change {
            Change::Granted(allocation) => Some(allocation.clone()),
            _ => None,
        });
        granted.ok_or_else(|| "nothing was granted".into())
    }

    fn place(&mut self, place: &Place) -> Result<Outcome, String> {
        let resource = resource(&place.resource)?;
        let chosen = self.preferred_devices(&resource, place.count, place.among.as_deref(), &place.required);
        Ok(match chosen {
            Ok((devices, reason)) => Outcome { gpus: self.gpus(&devices), reason, ..Outcome::default() },
            Err(refused) => Outcome::refused(refused),
        })
    }

    fn release(&mut self, name: &str) -> Result<(), String> {
        let id = self.named.remove(name).ok_or_else(|| format!("nothing is allocated as {name}"))?;
        self.node.turn(&Command::End { id, force: true })?;
        self.pods.record_release(self.node, id)
    }

    fn triage(&mut self, reported: &ReportedReading) -> Result<Outcome, String> {
        let reading = Reading {
            part: self.node.gpu(reported.gpu)?.as_part().clone(),
            source: reported.source.clone(),
            code: reported.code,
            detail: reported.detail.clone(),
        };
        let triaged = self.node.evaluate(|evaluation| evaluation.triage(&reading));
        let answer = &triaged.answer;
        let outcome = Outcome {
            severity: answer.severity.as_str().into(),
            again_after_seconds: answer.again_after_s,
            reason: answer.reason.clone(),
            ..Outcome::default()
        };
        self.node.turn(&Command::ApplyTriage(triaged))?;
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

#[cfg(test)]
mod tests {
    use super::super::PolicyTester;
    use super::super::format::Scenario;
    use super::*;
    use berth_core::stack::CallRecorder;

    #[test]
    fn the_usage_of_a_gpu_is_that_of_the_newest_step() {
        let bench = PolicyTester::new().unwrap();
        let policies = CallRecorder::new(&bench.policies);
        let head = "about: x\nnode: [{model: l4, count: 1}, {model: h100, count: 1}]\nsteps:\n";
        let steps = "- usage: {gpu: 1, memoryUsedMiB: 4096}\n- usage: {gpu: 1, processes: 3}\n";
        let scenario = Scenario::parse(&format!("{head}{steps}")).unwrap();
        let mut node = Node::new(&scenario.node, &[], &policies).unwrap();
        assert_eq!(run(&scenario, &mut node, &[]), Ok(Vec::new()));
        let snapshot = node.snapshot();
        let usage = |index| {
            let id = node.gpu(index).unwrap();
            (snapshot.usage[id.as_part()].memory_used_mib, snapshot.processes_on(id.as_part()))
        };
        assert_eq!((usage(0), usage(1)), ((Some(0), Some(0)), (Some(4096), Some(3))));
    }
}
