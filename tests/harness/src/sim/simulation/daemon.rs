//! The daemon's core without its threads: a keeper, and the stack as the policy thread evaluates it.

use super::answers;
use super::clock::Hands;
use super::disk::{Died, Disk};
use super::policies::ScriptedPolicies;
use super::violation::Violation;
use berth_core::keeper::{CommandResult, Keeper, Snapshot};
use berth_core::stack::{Baseline, Evaluation, Faults};
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::judgement::TriagedReading;
use berth_kernel::ids::names::DeviceId;
use berth_kernel::node::command::{Command, StackAnswer};
use berth_kernel::node::ports::Clock;
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::hooks::{AdmitRequest, PlaceRequest};
use berth_kernel::policy::judge_again::to_judge_again;
use berth_kernel::policy::stack::Stack;
use berth_kernel::sharing::offer::PartOffer;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

/// What a daemon outlives.
pub(crate) struct Surroundings {
    pub(crate) hands: Arc<Hands>,
    pub(crate) disk: Disk,
    pub(crate) policies: ScriptedPolicies,
    pub(crate) rules: Rules,
    pub(crate) baseline: Baseline,
}

/// One process of the daemon.
pub(crate) struct Daemon {
    keeper: Keeper,
    faults: Faults,
}

/// What a call into the daemon came to; `None` if the process died in it.
pub(crate) type Survived<T> = Option<T>;

/// Offers, with who made each.
pub(crate) type Offered = Vec<(PartOffer, Decider)>;

impl Daemon {
    /// Reads the store. `None` if it cannot be read, or the process died.
    pub(crate) fn open(around: &Surroundings) -> Survived<Self> {
        around.hands.begin();
        let store = around.disk.open().ok()?;
        let open = || Keeper::open(store, around.rules.clone(), around.hands.clone());
        let keeper = survive(open)?.ok()?;
        Some(Self { keeper, faults: Faults::default() })
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        self.keeper.snapshot()
    }

    /// Whether memory and disk may differ at present.
    pub(crate) fn may_differ(&self) -> bool {
        self.keeper.store_error().is_some()
    }

    pub(crate) fn turn(&mut self, command: &Command) -> Survived<CommandResult> {
        survive(|| self.keeper.turn(command))
    }

    /// Another stack is active.
    pub(crate) fn reset_faults(&mut self) {
        self.faults.reset();
    }

    pub(crate) fn offers(&mut self, around: &Surroundings) -> Result<Offered, Violation> {
        let node = self.snapshot();
        let offers = self.walk(around, &node, &node.stack, |walk| walk.offers())?;
        answers::offers(&node, &node.stack, around.rules.overcommit_percent, &offers)?;
        Ok(offers.parts)
    }

    /// What a stack that is not active yet would offer; `None` if one of its policies fails.
    pub(crate) fn trial(
        &mut self,
        around: &Surroundings,
        stack: &Stack,
    ) -> Result<Option<Offered>, Violation> {
        let node = self.snapshot();
        let faults = std::mem::take(&mut self.faults);
        let offers = self.walk(around, &node, stack, |walk| walk.offers());
        self.faults = faults;
        let offers = offers?;
        answers::offers(&node, stack, around.rules.overcommit_percent, &offers)?;
        Ok(offers.faults.is_empty().then_some(offers.parts))
    }

    pub(crate) fn admit(
        &mut self,
        around: &Surroundings,
        node: &Snapshot,
        request: &AdmitRequest,
    ) -> Result<StackAnswer, Violation> {
        let answer = self.walk(around, node, &node.stack, |walk| walk.admit(request))?;
        answers::admit(&node.stack, &answer)?;
        Ok(answer)
    }

    pub(crate) fn place(
        &mut self,
        around: &Surroundings,
        request: &PlaceRequest,
    ) -> Result<Vec<DeviceId>, Violation> {
        let node = self.snapshot();
        let (placement, _by) = self.walk(around, &node, &node.stack, |walk| walk.place(request))?;
        answers::place(request, &placement.devices)?;
        Ok(placement.devices)
    }

    pub(crate) fn triage(
        &mut self,
        around: &Surroundings,
        reading: &Reading,
    ) -> Result<TriagedReading, Violation> {
        let node = self.snapshot();
        self.walk(around, &node, &node.stack, |walk| walk.triage(reading))
    }

    /// What a stack that is not active yet makes of the readings that were judged by policies that it does not have, or
    /// has with other parameters.
    pub(crate) fn judge_again(
        &mut self,
        around: &Surroundings,
        stack: &Stack,
    ) -> Result<Vec<TriagedReading>, Violation> {
        let node = self.snapshot();
        let faults = std::mem::take(&mut self.faults);
        let readings = to_judge_again(&node, &stack.entries).into_iter();
        let triage = readings.map(|reading| self.walk(around, &node, stack, |walk| walk.triage(&reading)));
        let triage = triage.collect();
        self.faults = faults;
        triage
    }

    fn walk<T>(
        &mut self,
        around: &Surroundings,
        node: &Snapshot,
        stack: &Stack,
        ask: impl FnOnce(Evaluation<'_>) -> T,
    ) -> Result<T, Violation> {
        let before = self.faults.clone();
        let answer = ask(Evaluation {
            stack,
            policies: &around.policies,
            node,
            now: around.hands.now(),
            faults: &mut self.faults,
            baseline: &around.baseline,
            calls: &mut Vec::new(),
            time_factor: 1,
        });
        answers::asked(stack, &before, &around.policies.take_asked())?;
        Ok(answer)
    }
}

/// Runs the daemon's code; `None` if the process dies in it. A panic does not end the process.
fn survive<T>(call: impl FnOnce() -> T) -> Survived<T> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(answer) => Some(answer),
        Err(thrown) if thrown.is::<Died>() => None,
        Err(thrown) => resume_unwind(thrown),
    }
}
