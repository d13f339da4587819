//! The operator: cordons, ends, uploads, stacks.

use super::ends::Cause;
use super::event::{Event, StackLine};
use super::policies::{KINDS, digest, entry, version};
use super::rng::Rng;
use super::world::World;
use berth_kernel::drain::marks::{AtDeadline, Author, Order, Owners};
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::command::{Activation, Command, NewStack};
use berth_kernel::node::ports::Clock;
use berth_kernel::node::revision::Revision;

impl World {
    /// Policies that are there from the start, and in most runs a stack of them.
    pub(crate) fn first_stack(&mut self, rng: &mut Rng) {
        for policy in 0..KINDS {
            if rng.chance(80) {
                self.step(&Event::Upload { policy });
            }
        }
        if rng.chance(75) {
            let lines = 1 + rng.below(2);
            let line = |rng: &mut Rng| StackLine {
                policy: rng.below(KINDS),
                permissions: rng.below(4),
                deny_on_fault: rng.chance(30),
            };
            let policies = (0..lines).map(|_| line(rng)).collect();
            self.step(&Event::Activate { policies, expected: false });
        }
        self.stream();
    }

    /// What an operator does.
    pub(crate) fn operator(&mut self, event: &Event) {
        let gpu = |world: &Self, which: u32| -> GpuId { world.machine.part(which).gpu.clone() };
        let (command, cause) = match event {
            Event::Cordon { gpu: which, why } => {
                let why = if *why { format!("reason {which}") } else { String::new() };
                let author = Author::api("cordons".into(), why);
                (Command::Cordon { gpu: gpu(self, *which), author }, Cause::Nothing)
            }
            Event::Drain { gpu: which, evict, deadline } => {
                let now = self.around.hands.now();
                let author = Author::api("drains".into(), String::new());
                let order = Order {
                    evict: *evict,
                    deadline_wall_ms: deadline.then_some(now.wall_ms + 20_000),
                    at_deadline: if *deadline { AtDeadline::GiveUp } else { AtDeadline::Wait },
                    ..Order::default()
                };
                (Command::Drain { gpu: gpu(self, *which), author, order }, Cause::Nothing)
            }
            Event::StopDrain { gpu: which } => {
                (Command::StopDrain { gpu: gpu(self, *which), owners: Owners::All }, Cause::Nothing)
            }
            Event::Heal { gpu: which } => {
                let why = String::new();
                (Command::MarkHealthy { gpu: gpu(self, *which), by: "me".into(), why }, Cause::Nothing)
            }
            Event::Uncordon { gpu: which } => {
                (Command::Uncordon { gpu: gpu(self, *which), owners: Owners::All }, Cause::Nothing)
            }
            Event::Forget { gpu: which } => (Command::Forget { gpu: gpu(self, *which) }, Cause::Nothing),
            Event::End { which } => {
                let live = &self.ledger().live;
                let Some(id) = live.keys().nth(*which as usize % live.len().max(1)).copied() else { return };
                (Command::End { id, force: true }, Cause::Operator(id))
            }
            Event::Upload { policy } => (Command::RecordUpload(version(*policy)), Cause::Nothing),
            Event::Delete { policy } => (Command::DeletePolicy { digest: digest(*policy) }, Cause::Nothing),
            Event::Activate { policies, expected } => {
                let entries = policies.iter().map(|line| entry(*line)).collect();
                return self.activate(
                    NewStack {
                        origin: berth_kernel::policy::stack::StackOrigin::Api,
                        failed: None,
                        by: "me".into(),
                        why: String::new(),
                        entries,
                    },
                    *expected,
                );
            }
            _ => return,
        };
        self.turn(&command, cause);
    }

    /// As the policy thread does: a stack is evaluated on the live node before it is activated.
    pub(crate) fn activate(&mut self, stack: NewStack, expected: bool) {
        let Some(daemon) = &mut self.daemon else { return };
        let expected = expected.then_some(self.older.stack.revision);
        let tried = stack.clone().into_stack(0, 0);
        let trial = daemon.trial(&self.around, &tried);
        let triage = daemon.judge_again(&self.around, &tried);
        let (Some(Some(offers)), Some(triage)) = (self.take(trial), self.take(triage)) else { return };
        let activation = Command::Activate(Activation { stack, offers, triage });
        let answered = self.turn(&activation.expecting(expected.map(Revision::Stack)), Cause::Nothing);
        if let (Some(Ok(_)), Some(daemon)) = (answered, &mut self.daemon) {
            daemon.reset_faults();
        }
    }
}
