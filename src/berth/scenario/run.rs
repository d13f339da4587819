//! Runs one scenario: step by step, each answer beside what was expected of it.

use super::expect::{Difference, Got, contains};
use super::format::{Allocate, Place, Reading as Reported, Scenario, Step, Verb};
use super::node::Node;
use super::pods::Pods;
use super::report::Failure;
use super::told;
use berth_core::keeper::AskError;
use berth_kernel::change::Change;
use berth_kernel::command::{Attempt, Command};
use berth_kernel::gpu::Reading;
use berth_kernel::names::{AllocationId, DeviceId, Resource};
use berth_kernel::policy::{AdmitRequest, PlaceRequest};
use std::collections::BTreeMap;

/// The story as it goes on.
struct Run<'n, 'p> {
    node: &'n mut Node<'p>,
    pods: Pods,
    named: BTreeMap<String, AllocationId>,
}

/// Runs all steps on a node whose stack is active, or was not activated for these faults.
///
/// # Errors
/// In words, what kept the scenario from going on.
pub(super) fn run(
    scenario: &Scenario,
    node: &mut Node<'_>,
    not_active: &[String],
) -> Result<Vec<Failure>, String> {
    if !not_active.is_empty() {
        return judge_inactive(scenario, node, not_active);
    }
    let mut run = Run { node, pods: Pods::default(), named: BTreeMap::new() };
    let mut failures = Vec::new();
    for (place, step) in scenario.steps.iter().enumerate() {
        let place_of = |why: String| match scenario.line(place) {
            Some(line) => format!("step {} (line {line}): {why}", place + 1),
            None => format!("step {}: {why}", place + 1),
        };
        let verb = step.verb().map_err(place_of)?;
        let got = run.step(verb).and_then(|mut got| {
            run.node.settle()?;
            if matches!(verb, Verb::Offer) {
                run.advertised(&mut got);
            }
            Ok(got)
        });
        let (faults, told) = (run.node.faulted(), run.node.told());
        let differences = judge(step, &got.map_err(place_of)?, &faults);
        if !differences.is_empty() {
            let shown = run.node.snapshot();
            failures.push(Failure {
                step: place + 1,
                line: scenario.line(place),
                verb: verb.word().into(),
                differences,
                told: told::once(&told, &shown),
            });
        }
    }
    Ok(failures)
}

/// A stack that fails on this node is not activated: a scenario may say so in one `offer` step, and
/// nothing comes after it.
fn judge_inactive(scenario: &Scenario, node: &Node<'_>, faults: &[String]) -> Result<Vec<Failure>, String> {
    let first = scenario.steps.first();
    let told = node.told();
    let expected = first.filter(|step| matches!(step.verb(), Ok(Verb::Offer)) && step.expect.fault.is_some());
    match (expected, scenario.steps.len()) {
        (Some(_), 2..) => Err(format!(
            "the stack was not activated, so no step comes after the first: {}",
            faults.join("; ")
        )),
        (Some(step), _) => {
            let differences = judge(step, &Got::default(), faults);
            if differences.is_empty() {
                return Ok(Vec::new());
            }
            let told = told::once(&told, &node.snapshot());
            let line = scenario.line(0);
            Ok(vec![Failure { step: 1, line, verb: "offer".into(), differences, told }])
        }
        (None, _) => Err(format!("the stack was not activated: {}", faults.join("; "))),
    }
}

fn judge(step: &Step, got: &Got, faults: &[String]) -> Vec<Difference> {
    let expect = &step.expect;
    let mut found = Vec::new();
    match (&expect.fault, faults) {
        (None, []) => {}
        (None, faults) => found.push(Difference::of("fault", "none", faults.join("; "))),
        (Some(part), faults) if faults.iter().any(|fault| contains(fault, part)) => {}
        (Some(part), []) => found.push(Difference::of("fault", format!("...{part}..."), "none")),
        (Some(part), faults) => {
            found.push(Difference::of("fault", format!("...{part}..."), faults.join("; ")));
        }
    }
    match (&expect.refused, &got.refused) {
        (None, None) => found.extend(expect.differences(got)),
        // An entry whose `onFault` is deny refuses with its fault.
        (None, Some(why)) if expect.fault.as_ref().is_some_and(|part| contains(why, part)) => {}
        (None, Some(why)) => found.push(Difference::of("refused", "no", why)),
        (Some(part), Some(why)) if contains(why, part) => {}
        (Some(part), Some(why)) => found.push(Difference::of("refused", format!("...{part}..."), why)),
        (Some(part), None) => {
            let got = format!("granted or placed on GPUs {:?}", got.gpus);
            found.push(Difference::of("refused", format!("...{part}..."), got));
        }
    }
    found
}

impl Run<'_, '_> {
    fn step(&mut self, verb: Verb<'_>) -> Result<Got, String> {
        match verb {
            Verb::Offer => Ok(Got::default()),
            Verb::Allocate(allocate) => self.allocate(allocate),
            Verb::Place(place) => self.place(place),
            Verb::Release(name) => self.release(name),
            Verb::Health(health) => self.node.turn_health(health).map(|()| Got::default()),
            Verb::Cordon(gpu) => self.node.cordon(gpu, true).map(|()| Got::default()),
            Verb::Uncordon(gpu) => self.node.cordon(gpu, false).map(|()| Got::default()),
            Verb::Reading(reading) => self.triage(reading),
            Verb::Seconds(seconds) => self.node.pass(seconds).map(|()| Got::default()),
        }
    }

    /// What is offered, GPU by GPU, and what of it is to be had.
    fn advertised(&self, got: &mut Got) {
        let node = self.node.snapshot();
        for state in node.parts.values().filter(|state| state.present) {
            let of_gpu = got.offered.entry(state.part.gpu_index).or_default();
            for line in &state.lines {
                *of_gpu.entry(line.resource.to_string()).or_default() += line.count;
            }
        }
        for resource in node.resources() {
            let free = self.node.free(&resource).len();
            got.free.insert(resource.to_string(), u32::try_from(free).unwrap_or(u32::MAX));
        }
    }

    fn allocate(&mut self, allocate: &Allocate) -> Result<Got, String> {
        let resource = resource(&allocate.resource)?;
        let count = allocate.on.as_ref().map_or(allocate.count.unwrap_or_default(), Vec::len);
        if count == 0 {
            return Err("allocate: a container asks for one device at least".into());
        }
        self.pods.ask(self.node, &allocate.candidates, &resource, count)?;
        let chosen = match &allocate.on {
            Some(on) => self.one_of_each(&resource, on),
            None => self.preferred(&resource, count),
        };
        let granted = match chosen {
            Ok((devices, reason)) => self.admit(&resource, devices).map(|granted| (granted, reason)),
            Err(refused) => Err(refused),
        };
        let allocation = granted.as_ref().ok().map(|(allocation, _)| allocation);
        self.pods.granted(self.node, &allocate.candidates, allocation)?;
        let (allocation, placed) = match granted {
            Ok(granted) => granted,
            Err(refused) => return Ok(Got { refused: Some(refused), ..Got::default() }),
        };
        if let Some(name) = &allocate.name {
            self.named.insert(name.clone(), allocation.id);
        }
        let decision = allocation.decision;
        let reasons = [placed, decision.reason].into_iter().filter(|reason| !reason.is_empty());
        Ok(Got {
            gpus: self.gpus(&allocation.devices),
            environment: decision.environment.into_iter().collect(),
            memory_mib: decision.limits.memory_mib,
            compute_percent: decision.limits.compute_percent,
            reason: reasons.collect::<Vec<_>>().join("; "),
            ..Got::default()
        })
    }

    /// As the kubelet asks: the best of all that are free.
    fn preferred(&mut self, resource: &Resource, size: usize) -> Result<(Vec<DeviceId>, String), String> {
        let available = self.node.free(resource);
        if available.len() < size {
            return Err(too_few(resource, available.len(), size));
        }
        let request = PlaceRequest { resource: resource.clone(), available, required: Vec::new(), size };
        let (placement, _) = self.node.walk(|walk| walk.place(&request));
        Ok((placement.devices, placement.reason))
    }

    /// As a kubelet that does not ask: one free device of each GPU, or one that it still takes for
    /// free because it did not hear yet.
    fn one_of_each(&self, resource: &Resource, on: &[u32]) -> Result<(Vec<DeviceId>, String), String> {
        let (free, unheld) = (self.node.free(resource), self.node.unheld(resource));
        let mut chosen: Vec<DeviceId> = Vec::new();
        for gpu in on {
            let here = |id: &&DeviceId| self.node.index_of(id) == *gpu && !chosen.contains(id);
            let found = free.iter().find(here).or_else(|| unheld.iter().find(here)).cloned();
            chosen.push(found.ok_or_else(|| format!("too few devices: GPU {gpu} has no free {resource}"))?);
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
        let answer = self.node.walk(|walk| walk.admit(&request));
        let command = Command::Allocate { request, answer, seen, again: false, attempt: Attempt::Last };
        let applied = self.node.turn(&command).map_err(|error| match error {
            AskError::Refused(refusal) => refusal.to_string(),
            other => other.to_string(),
        })?;
        let granted = applied.entry.changes.iter().find_map(|change| match change {
            Change::Granted(allocation) => Some(allocation.clone()),
            _ => None,
        });
        granted.ok_or_else(|| "nothing was granted".into())
    }

    fn place(&mut self, place: &Place) -> Result<Got, String> {
        let resource = resource(&place.resource)?;
        let among = |gpu: u32| place.among.as_ref().is_none_or(|gpus| gpus.contains(&gpu));
        let mut available = self.node.free(&resource);
        available.retain(|id| among(self.node.index_of(id)));
        let mut required: Vec<DeviceId> = Vec::new();
        for gpu in &place.required {
            let here = |id: &&DeviceId| self.node.index_of(id) == *gpu && !required.contains(id);
            let Some(found) = available.iter().find(here).cloned() else {
                let refused = format!("too few devices: the required GPU {gpu} has no free {resource}");
                return Ok(Got { refused: Some(refused), ..Got::default() });
            };
            required.push(found);
        }
        if available.len() < place.count || required.len() > place.count {
            let refused = too_few(&resource, available.len(), place.count);
            return Ok(Got { refused: Some(refused), ..Got::default() });
        }
        let request = PlaceRequest { resource, available, required, size: place.count };
        let (placement, _) = self.node.walk(|walk| walk.place(&request));
        Ok(Got { gpus: self.gpus(&placement.devices), reason: placement.reason, ..Got::default() })
    }

    fn release(&mut self, name: &str) -> Result<Got, String> {
        let id = self.named.remove(name).ok_or_else(|| format!("nothing is allocated as {name}"))?;
        self.node.turn(&Command::End { id, force: true }).map_err(|error| error.to_string())?;
        self.pods.released(self.node, id)?;
        Ok(Got::default())
    }

    fn triage(&mut self, reported: &Reported) -> Result<Got, String> {
        let reading = Reading {
            part: self.node.gpu(reported.gpu)?,
            source: reported.source.clone(),
            code: reported.code,
            detail: reported.detail.clone(),
        };
        let (answer, _by) = self.node.walk(|walk| walk.triage(&reading));
        let got = Got {
            severity: answer.severity.as_str().into(),
            again_after_seconds: answer.again_after_s,
            reason: answer.reason.clone(),
            ..Got::default()
        };
        self.node.turn(&Command::Triaged { reading, answer }).map_err(|error| error.to_string())?;
        Ok(got)
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

fn too_few(resource: &Resource, free: usize, wanted: usize) -> String {
    format!("too few devices: {free} of {resource} to choose from, {wanted} wanted")
}
