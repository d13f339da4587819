//! Activation of a stack: each of its policies is called on the live node first.

use super::baseline::Baseline;
use super::evaluate::Evaluation;
use super::faults::Faults;
use super::jobs::{ActivateError, OtherJob};
use super::kernel_handle::{KernelHandle, send, within};
use super::offers::Offers;
use super::recorder::at_low_priority;
use crate::keeper::{CommandError, Snapshot};
use crate::spans;
use berth_kernel::command::{Command, NewStack, Rules};
use berth_kernel::decide::decide;
use berth_kernel::decision::{CallOutcome, CallRecord};
use berth_kernel::gpu::Reading;
use berth_kernel::ledger::Ledger;
use berth_kernel::listing::free_devices;
use berth_kernel::names::{DeviceId, Resource};
use berth_kernel::policy::{AdmitRequest, Fault, FaultKind, Hook, PlaceRequest};
use berth_kernel::ports::Policies;
use berth_kernel::refusal::Refusal;
use berth_kernel::stack::{Stack, StackEntry};
use berth_kernel::time::Now;
use berth_kernel::trust::check_trust;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The reading of a trial: XID 48, an uncorrectable memory error (NVIDIA's XID catalogue). The answer has no effect.
const TRIAL_READING: (&str, u64) = ("xid", 48);

/// Longest wait for another trial of a stack.
const TURN_MAX: Duration = Duration::from_secs(20);
/// Time limit of trying the parameters of all policies, before the time factor; the call that is running then may still
/// take its half second.
const PARAMETERS_MAX: Duration = Duration::from_secs(5);

/// Factor of the wall time limits of a trial, relative to calls that the kubelet waits for: 5 s a call, 10 s an evaluation,
/// 50 s for parameters. Only the client waits, and threads that work for the API have low priority: on a busy
/// node, half a second of wall time would not show that a policy is slow. Fuel is the same.
pub const TIME_FACTOR: u32 = 10;

/// A trial of a stack on a node, without effect.
pub struct Trial<'a> {
    /// The stack.
    pub stack: &'a NewStack,
    /// Calls the policies.
    pub policies: &'a dyn Policies,
    /// The node.
    pub node: &'a Arc<Ledger>,
    /// The time that the policies see.
    pub now: Now,
    /// Answers if all policies pass.
    pub baseline: &'a Baseline,
    /// The rules in force.
    pub rules: &'a Rules,
    /// Factor of the wall time limits: 1 while the kubelet waits.
    pub leisure: u32,
}

impl Trial<'_> {
    /// Evaluates the stack's offers, and tries the parameters of its policies.
    ///
    /// # Errors
    /// The label and fault of the first policy that fails.
    pub fn run(&self) -> Result<Offers, (String, Fault)> {
        let offers = self.offers()?;
        // The node with these offers, so that it has devices for the other hooks.
        let offer = Command::Offer(offers.parts.clone());
        let mut node = Ledger::clone(self.node);
        node.apply(&decide(self.node, self.rules, &offer, self.now).entry);
        self.try_parameters(&Arc::new(node))?;
        Ok(offers)
    }

    /// As [`Trial::run`], without trying parameters.
    pub(super) fn offers(&self) -> Result<Offers, (String, Fault)> {
        let stack = self.stack.clone().into_stack(0, 0);
        let mut offers = self.evaluation(&stack, self.node, &mut Faults::default(), &mut Vec::new()).offers();
        if offers.faults.is_empty() { Ok(offers) } else { Err(offers.faults.swap_remove(0)) }
    }

    /// Tries the parameters of every policy of the stack that has no `offer` hook, on this node.
    pub(super) fn try_parameters(&self, node: &Arc<Ledger>) -> Result<(), (String, Fault)> {
        let limit = PARAMETERS_MAX * self.leisure;
        let end = Instant::now() + limit;
        for entry in &self.stack.entries {
            if Instant::now() > end {
                let detail = format!("trying the policies before it took over {} s", limit.as_secs());
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
                    drop(evaluation.admit(&AdmitRequest { resource, devices: vec![device] }));
                }
                (Hook::Triage, _) => {
                    if let Some(part) = node.parts.values().find(|p| p.present && p.part.parent.is_none()) {
                        let (source, code) = (TRIAL_READING.0.into(), TRIAL_READING.1);
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
            let free = free_devices(node, &resource, self.rules.overcommit_percent).into_iter().next()?;
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
            overcommit_percent: self.rules.overcommit_percent,
            calls,
            time_factor: self.leisure,
        }
    }
}

impl KernelHandle {
    /// Activates a stack: its policies are prepared, called on the live node and checked, then the stack replaces the
    /// active one as a whole.
    ///
    /// # Errors
    /// If one of its policies fails on this node, or `expected` is not the active revision. Nothing
    /// has changed then.
    pub async fn activate(&self, stack: NewStack, expected: Option<u64>) -> Result<Snapshot, ActivateError> {
        let (node, refused) =
            (self.snapshot(), |refusal| ActivateError::Command(CommandError::Refused(refusal)));
        // An early check, before anything is compiled. The keeper checks again when it activates the stack.
        let revision = node.stack.revision;
        if expected.is_some_and(|expected| expected != revision) {
            return Err(refused(Refusal::StackMoved { revision }));
        }
        // Untrusted policies are never called.
        check_trust(&node, &stack.entries, &self.rules.trusted_keys).map_err(refused)?;
        let prepared = self.prepare(stack.entries.iter().map(|entry| &entry.digest)).await;
        let activated = match prepared {
            Ok(_prepared) => self.swap(stack, expected).await,
            Err(error) => Err(ActivateError::Unprepared(error)),
        };
        self.unload_unused();
        activated
    }

    async fn swap(&self, stack: NewStack, expected: Option<u64>) -> Result<Snapshot, ActivateError> {
        self.try_stack(&stack).await?;
        let (reply, answer) = oneshot::channel();
        send(&self.other_jobs, OtherJob::Activate { stack, expected, reply })
            .map_err(ActivateError::Command)?;
        within(answer).await.map_err(ActivateError::Command)?
    }

    /// Tries a stack on the live node, off the policy thread: a trial calls more hooks than an activation
    /// needs.
    pub(super) async fn try_stack(&self, stack: &NewStack) -> Result<(), ActivateError> {
        // One at a time, so that an Allocate always finds a free instance for its calls.
        let turn = tokio::time::timeout(TURN_MAX, Arc::clone(&self.trying).lock_owned()).await;
        let turn = turn.map_err(|_| ActivateError::Command(CommandError::Busy))?;
        let (kernel, stack) = (self.clone(), stack.clone());
        let work = move || {
            let _turn = turn;
            let node = kernel.snapshot();
            let trial = Trial {
                stack: &stack,
                policies: &*kernel.policies,
                node: &node,
                now: kernel.now(),
                baseline: &kernel.baseline,
                rules: &kernel.rules,
                leisure: TIME_FACTOR,
            };
            trial.run().map(drop).map_err(ActivateError::from)
        };
        let result = tokio::task::spawn_blocking(spans::in_current_span(at_low_priority(work))).await;
        result.unwrap_or(Err(ActivateError::Command(CommandError::Stopping)))
    }
}

impl From<(String, Fault)> for ActivateError {
    fn from((policy, fault): (String, Fault)) -> Self {
        Self::Fails { policy, passing: fault.kind == FaultKind::Time, fault: fault.to_string() }
    }
}
