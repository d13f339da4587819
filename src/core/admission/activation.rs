//! Activating a stack: every policy of it is asked first, on the node as it stands.

use super::Door;
use super::baseline::Baseline;
use super::faults::Faults;
use super::offers::Offers;
use super::recorder::aside;
use super::stack::Walk;
use super::thread::{ActivateError, Worker};
use crate::keeper::{AskError, Snapshot};
use crate::spans;
use berth_kernel::command::{Command, NewStack, Rules};
use berth_kernel::decide::decide;
use berth_kernel::decision::{CallNote, Said};
use berth_kernel::gpu::Reading;
use berth_kernel::ledger::Ledger;
use berth_kernel::listing::free_devices;
use berth_kernel::names::{DeviceId, Resource};
use berth_kernel::policy::{AdmitRequest, Fault, FaultKind, Hook, PlaceRequest};
use berth_kernel::ports::Policies;
use berth_kernel::stack::{Stack, StackEntry};
use berth_kernel::time::Now;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A reading to ask about: XID 48, an uncorrectable error of memory (NVIDIA's XID catalogue). What is
/// answered has no effect.
const SIGN: (&str, u64) = ("xid", 48);

/// Longest wait for others who try a stack, and the longest that asking about parameters takes before
/// it is given up where the kubelet waits; the call that runs then may take its half second.
const TURN_MAX: Duration = Duration::from_secs(20);
const PARAMETERS_MAX: Duration = Duration::from_secs(5);

/// How much longer than where the kubelet waits a stack may take that is tried for somebody: 5 s a call, 10 s
/// a walk, 50 s for parameters. Nobody waits but him, and threads that work for the API step back behind all
/// others: on a busy node half a second of the wall is no word on a policy. Fuel is the same.
pub const LEISURE: u32 = 10;

/// A stack that is tried on a node without effect.
pub struct Trial<'a> {
    /// The stack.
    pub stack: &'a NewStack,
    /// How its policies are asked.
    pub policies: &'a dyn Policies,
    /// The node.
    pub node: &'a Arc<Ledger>,
    /// When.
    pub now: Now,
    /// Who answers if all pass.
    pub baseline: &'a Baseline,
    /// The rules in force.
    pub rules: &'a Rules,
    /// How much longer calls may take by the wall than where the kubelet waits: 1 is as long.
    pub leisure: u32,
}

impl Trial<'_> {
    /// What the node would be offered as.
    ///
    /// # Errors
    /// The first policy that fails, by label, and how.
    pub fn run(&self) -> Result<Offers, (String, Fault)> {
        let offers = self.offers()?;
        // As it would be, so that there are devices to ask about.
        let offer = Command::Offer(offers.parts.clone());
        let mut node = Ledger::clone(self.node);
        node.apply(&decide(self.node, self.rules, &offer, self.now).entry);
        self.try_parameters(&Arc::new(node))?;
        Ok(offers)
    }

    /// As [`Trial::run`], and nothing else is asked.
    fn offers(&self) -> Result<Offers, (String, Fault)> {
        let stack = self.stack.clone().at(0, 0);
        let mut offers = self.walk(&stack, self.node, &mut Faults::default(), &mut Vec::new()).offers();
        if offers.faults.is_empty() { Ok(offers) } else { Err(offers.faults.swap_remove(0)) }
    }

    /// Asks every policy of the stack that has no word on offers, on this node.
    pub(super) fn try_parameters(&self, node: &Arc<Ledger>) -> Result<(), (String, Fault)> {
        let most = PARAMETERS_MAX * self.leisure;
        let end = Instant::now() + most;
        for entry in &self.stack.entries {
            if Instant::now() > end {
                let detail = format!("asking those before it took over {} s", most.as_secs());
                return Err((entry.label(), Fault { kind: FaultKind::Time, detail }));
            }
            self.try_parameters_of(node, entry)?;
        }
        Ok(())
    }

    /// A policy that has no word on offers reads its parameters when a pod comes first: asked one
    /// question of those that it answers, it says now what is wrong with them. A node without GPUs or
    /// with none that is free has no question to ask.
    fn try_parameters_of(&self, node: &Arc<Ledger>, entry: &StackEntry) -> Result<(), (String, Fault)> {
        let Some(version) = node.policies.get(&entry.digest).filter(|v| !v.hooks.contains(&Hook::Offer))
        else {
            return Ok(());
        };
        let alone = Stack { entries: vec![entry.clone()], ..Stack::default() };
        let (mut faults, mut calls) = (Faults::default(), Vec::new());
        for hook in &version.hooks {
            let walk = self.walk(&alone, node, &mut faults, &mut calls);
            match (hook, self.free(node)) {
                (Hook::Place, Some((resource, device))) => {
                    let (available, required) = (vec![device], Vec::new());
                    drop(walk.place(&PlaceRequest { resource, available, required, size: 1 }));
                }
                (Hook::Admit, Some((resource, device))) => {
                    drop(walk.admit(&AdmitRequest { resource, devices: vec![device] }));
                }
                (Hook::Triage, _) => {
                    if let Some(part) = node.parts.values().find(|p| p.present && p.part.parent.is_none()) {
                        let (source, code) = (SIGN.0.into(), SIGN.1);
                        let part = part.part.id.clone();
                        drop(walk.triage(&Reading { part, source, code, detail: String::new() }));
                    }
                }
                _ => {}
            }
        }
        let fault = calls.into_iter().find_map(|call: CallNote| match call.said {
            Said::Fault(fault) => Some(fault),
            _ => None,
        });
        fault.map_or(Ok(()), |fault| Err((entry.label(), fault)))
    }

    /// A device that could be granted now.
    fn free(&self, node: &Ledger) -> Option<(Resource, DeviceId)> {
        node.resources().into_iter().find_map(|resource| {
            let free = free_devices(node, &resource, self.rules.overcommit_percent).into_iter().next()?;
            Some((resource, free))
        })
    }

    fn walk<'w>(
        &'w self,
        stack: &'w Stack,
        node: &'w Arc<Ledger>,
        faults: &'w mut Faults,
        calls: &'w mut Vec<CallNote>,
    ) -> Walk<'w> {
        Walk {
            stack,
            policies: self.policies,
            node,
            now: self.now,
            faults,
            baseline: self.baseline,
            overcommit_percent: self.rules.overcommit_percent,
            calls,
            leisure: self.leisure,
        }
    }
}

impl Door {
    /// Tries a stack on the node as it stands, off the policy thread: some policies are asked more here
    /// than what they offer.
    pub(super) async fn try_stack(&self, stack: &NewStack) -> Result<(), ActivateError> {
        // One at a time, so that Allocate always finds a place to be judged in.
        let turn = tokio::time::timeout(TURN_MAX, Arc::clone(&self.trying).lock_owned()).await;
        let turn = turn.map_err(|_| ActivateError::Ask(AskError::Busy))?;
        let (door, stack) = (self.clone(), stack.clone());
        let work = move || {
            let _turn = turn;
            let node = door.snapshot();
            let trial = Trial {
                stack: &stack,
                policies: &*door.policies,
                node: &node,
                now: door.now(),
                baseline: &door.baseline,
                rules: &door.rules,
                leisure: LEISURE,
            };
            trial.run().map(drop).map_err(failed)
        };
        let tried = tokio::task::spawn_blocking(spans::carried(aside(work))).await;
        tried.unwrap_or(Err(ActivateError::Ask(AskError::Stopping)))
    }
}

impl Worker {
    /// Asks a new stack on the live node what it offers; swaps it in only if every policy of it answers
    /// well.
    pub(super) fn activate(&self, stack: NewStack, expected: Option<u64>) -> Result<Snapshot, ActivateError> {
        let node = self.keeper.snapshot();
        let trial = Trial {
            stack: &stack,
            policies: &*self.policies,
            node: &node,
            now: self.clock.now(),
            baseline: &self.baseline,
            rules: &self.rules,
            leisure: 1,
        };
        let offers = trial.offers().map_err(failed)?;
        let command = Command::Activate { stack, expected, offers: offers.parts };
        let applied = self.keeper.ask(command).map_err(ActivateError::Ask)?;
        self.keep_notes(offers.notes);
        self.account.faults.lock().reset();
        self.account.publish(&applied.snapshot.stack);
        Ok(applied.snapshot)
    }
}

fn failed((policy, fault): (String, Fault)) -> ActivateError {
    ActivateError::Fails { policy, passing: fault.kind == FaultKind::Time, fault: fault.to_string() }
}
