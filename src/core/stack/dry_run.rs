//! A dry run of a stack: before an activation each of its policies is called on the live node, without effect.

use super::baseline::Baseline;
use super::evaluate::Evaluation;
use super::faults::Faults;
use super::offers::Offers;
use crate::jobs::ActivateError;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::judgement::TriagedReading;
use berth_kernel::ids::names::{DeviceId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::{Command, NewStack};
use berth_kernel::node::decide::decide;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::PolicyRuntime;
use berth_kernel::policy::decision::{CallOutcome, CallRecord};
use berth_kernel::policy::hooks::{AdmitRequest, Fault, FaultKind, Hook, PlaceRequest};
use berth_kernel::policy::judge_again::to_judge_again;
use berth_kernel::policy::stack::{Stack, StackEntry};
use berth_kernel::sharing::listing::free_devices;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The reading of a dry run: XID 48, an uncorrectable memory error (NVIDIA's XID catalogue). The answer has no effect.
const DRY_RUN_READING: (&str, u64) = ("xid", 48);

/// Time limit of trying the parameters of all policies, before the time factor; the call that is running then may still
/// take its half second.
const PARAMETERS_MAX: Duration = Duration::from_secs(5);

/// Factor of the wall time limits of a dry run, relative to calls that the kubelet waits for: 5 s a call, 10 s an
/// evaluation, 50 s for parameters. Only the client waits, and threads that work for the API have low priority: on a
/// busy node, half a second of wall time would not show that a policy is slow. Fuel is the same.
pub const TIME_FACTOR: u32 = 10;

/// A dry run of a stack on a node.
pub struct DryRun<'a> {
    /// The stack.
    pub stack: &'a NewStack,
    /// Calls the policies.
    pub policies: &'a dyn PolicyRuntime,
    /// The node.
    pub node: &'a Arc<Ledger>,
    /// The time that the policies see.
    pub now: Now,
    /// Answers if all policies pass.
    pub baseline: &'a Baseline,
    /// Factor of the wall time limits: 1 while the kubelet waits.
    pub time_factor: u32,
}

impl DryRun<'_> {
    /// Evaluates the stack's offers, and tries the parameters of its policies.
    ///
    /// # Errors
    /// The label and fault of the first policy that fails.
    pub fn run(&self) -> Result<Offers, (String, Fault)> {
        let offers = self.offers()?;
        // The node with these offers, so that it has devices for the other hooks.
        let offer = Command::Offer(offers.parts.clone());
        let mut node = Ledger::clone(self.node);
        node.apply(&decide(self.node, &offer, self.now).entry);
        self.try_parameters(&Arc::new(node))?;
        Ok(offers)
    }

    /// As [`DryRun::run`], without trying parameters.
    pub(crate) fn offers(&self) -> Result<Offers, (String, Fault)> {
        let stack = self.stack.clone().into_stack(0, 0);
        let mut offers = self.evaluation(&stack, self.node, &mut Faults::default(), &mut Vec::new()).offers();
        if offers.faults.is_empty() { Ok(offers) } else { Err(offers.faults.swap_remove(0)) }
    }

    /// The stack's triage of the readings that were judged by policies that it does not have with the same parameters.
    /// A policy that fails is skipped, as for a new reading.
    #[must_use]
    pub fn judge_again(&self) -> Vec<TriagedReading> {
        let stack = self.stack.clone().into_stack(0, 0);
        let readings = to_judge_again(self.node, &stack.entries);
        self.evaluation(&stack, self.node, &mut Faults::default(), &mut Vec::new()).triage_all(&readings)
    }

    /// Tries the parameters of every policy of the stack that has no `offer` hook, on this node.
    ///
    /// # Errors
    /// The label and fault of the first policy that fails.
    pub fn try_parameters(&self, node: &Arc<Ledger>) -> Result<(), (String, Fault)> {
        let limit = PARAMETERS_MAX * self.time_factor;
        let end = Instant::now() + limit;
        for entry in &self.stack.entries {
            if Instant::now() > end {
                let detail = format!("trying the policies before this one took over {} s", limit.as_secs());
                return Err((entry.label(), Fault { kind: FaultKind::Time, detail }));
            }
            self.try_parameters_of(node, entry)?;
        }
        Ok(())
    }

    /// A policy without an `offer` hook reads its parameters at the first pod only. Calling each of its hooks once
    /// shows invalid parameters now. `place` and `admit` are skipped if no device is free, `triage` if there is
    /// no GPU.
    fn try_parameters_of(&self, node: &Arc<Ledger>, entry: &StackEntry) -> Result<(), (String, Fault)> {
        let Some(version) = node.policies.get(&entry.digest).filter(|v| !v.hooks.contains(&Hook::Offer))
        else {
            return Ok(());
        };
        let alone = Stack { entries: vec![entry.clone()], ..Stack::default() };
        let (mut faults, mut calls) = (Faults::default(), Vec::new());
        for hook in &version.hooks {
            let evaluation = self.evaluation(&alone, node, &mut faults, &mut calls);
            match (hook, self.free_device(node)) {
                (Hook::Place, Some((resource, device))) => {
                    let (available, required) = (vec![device], Vec::new());
                    drop(evaluation.place(&PlaceRequest { resource, available, required, size: 1 }));
                }
                (Hook::Admit, Some((resource, device))) => {
                    drop(evaluation.admit(&AdmitRequest { resource, devices: vec![device], claim: None }));
                }
                (Hook::Triage, _) => {
                    if let Some(part) = node.parts.values().find(|p| p.present && p.part.is_whole_gpu()) {
                        let (source, code) = (DRY_RUN_READING.0.into(), DRY_RUN_READING.1);
                        let part = part.part.id.clone();
                        drop(evaluation.triage(&Reading { part, source, code, detail: String::new() }));
                    }
                }
                _ => {}
            }
        }
        let fault = calls.into_iter().find_map(|call: CallRecord| match call.outcome {
            CallOutcome::Fault(fault) => Some(fault),
            _ => None,
        });
        fault.map_or(Ok(()), |fault| Err((entry.label(), fault)))
    }

    /// A device that could be granted now.
    fn free_device(&self, node: &Ledger) -> Option<(Resource, DeviceId)> {
        node.resources().into_iter().find_map(|resource| {
            let free = free_devices(node, &resource).into_iter().next()?;
            Some((resource, free))
        })
    }

    fn evaluation<'w>(
        &'w self,
        stack: &'w Stack,
        node: &'w Arc<Ledger>,
        faults: &'w mut Faults,
        calls: &'w mut Vec<CallRecord>,
    ) -> Evaluation<'w> {
        Evaluation {
            stack,
            policies: self.policies,
            node,
            now: self.now,
            faults,
            baseline: self.baseline,
            calls,
            time_factor: self.time_factor,
        }
    }
}

impl From<(String, Fault)> for ActivateError {
    fn from((policy, fault): (String, Fault)) -> Self {
        Self::Fails { policy, passing: fault.kind == FaultKind::Time, fault: fault.to_string() }
    }
}
