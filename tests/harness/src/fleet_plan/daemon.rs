//! The daemon of a simulated node: what it makes of the stack that its GPUNode names, as the real one does (`src/cluster/fleet`).

use crate::sim::simulation::rng::Rng;
use berth_fleet::gpu_node::{FailedRevision, GpuNode, GpuNodeStatus, StackPhase, StackStatus};
use berth_fleet::plan::Key;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// How a revision behaves on a node, as the parameters of its first policy say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behaviour {
    Good,
    /// Traps in each call.
    Traps,
    /// Traps on the GPUs of one model.
    TrapsOnModel(u32),
    /// Fails on so many of 100 nodes.
    FailsOn(u32),
    /// Does not pass its gate.
    Refused,
    /// Cannot be pulled.
    Unavailable,
    /// Takes the node with it.
    KillsNode,
}

impl Behaviour {
    pub(super) const ALL: [Self; 11] = [
        Self::Good,
        Self::Good,
        Self::Good,
        Self::Good,
        Self::Good,
        Self::Traps,
        Self::TrapsOnModel(1),
        Self::FailsOn(10),
        Self::Refused,
        Self::Unavailable,
        Self::KillsNode,
    ];

    /// Whether it settles on no node.
    pub(super) fn fails_everywhere(self) -> bool {
        matches!(self, Self::Traps | Self::Refused | Self::Unavailable | Self::KillsNode)
    }

    pub(super) fn text(self) -> String {
        format!("{self:?}")
    }

    pub(super) fn parse(text: &str) -> Self {
        Self::ALL.into_iter().find(|one| text.contains(&one.text())).unwrap_or(Self::Good)
    }
}

/// A daemon.
#[derive(Clone, Debug)]
pub(super) struct Daemon {
    pub(super) model: u32,
    /// Decides whether a revision fails that fails on some nodes.
    luck: u32,
    pub(super) is_alive: bool,
    /// Until when a caller's stack is active for a limited time.
    pub(super) overridden_until: u64,
    wanted: Option<Key>,
    behaviour: Option<Behaviour>,
    pub(super) active: Option<Key>,
    /// The stack that has settled last.
    good: Option<Key>,
    pub(super) phase: Option<StackPhase>,
    failed: Option<FailedRevision>,
    next_at: u64,
    soak: u64,
    heartbeat_at: u64,
    generation: Option<i64>,
    is_reported: bool,
}

/// What a step of a daemon does beside its own state.
#[derive(Default)]
pub(super) struct Effect {
    /// The status to write.
    pub(super) status: Option<GpuNodeStatus>,
    /// Whether the node dies.
    pub(super) kills_node: bool,
}

impl Daemon {
    pub(super) fn new(model: u32, luck: u32) -> Self {
        Self {
            model,
            luck,
            is_alive: true,
            overridden_until: 0,
            wanted: None,
            behaviour: None,
            active: None,
            good: None,
            phase: None,
            failed: None,
            next_at: 0,
            soak: 0,
            heartbeat_at: 0,
            generation: None,
            is_reported: false,
        }
    }

    /// One step, at which it may read its GPUNode and write its status.
    pub(super) fn step(&mut self, object: &GpuNode, now: u64, random: &mut Rng) -> Effect {
        let mut effect = Effect::default();
        if !self.is_alive {
            return effect;
        }
        if random.chance(80) && self.generation != object.metadata.generation {
            self.read(object, now, random);
        }
        let before = (self.phase, self.active.clone());
        effect.kills_node = self.work(now, random);
        if before != (self.phase, self.active.clone()) {
            self.is_reported = false;
        }
        if (!self.is_reported || now >= self.heartbeat_at) && random.chance(70) {
            self.is_reported = true;
            self.heartbeat_at = now + 700 + u64::from(random.below(300));
            effect.status = Some(self.status(now));
        }
        effect
    }

    fn read(&mut self, object: &GpuNode, now: u64, random: &mut Rng) {
        self.generation = object.metadata.generation;
        self.is_reported = false;
        let spec = object.spec.stack.as_ref();
        let wanted = spec.map(Key::of);
        // The name of the stack is only shown.
        let same = |one: &Key, other: &Key| (&one.revision, one.attempt) == (&other.revision, other.attempt);
        let is_same = match (&self.wanted, &wanted) {
            (Some(one), Some(other)) => same(one, other),
            (None, None) => true,
            _ => false,
        };
        self.wanted = wanted;
        if is_same {
            return;
        }
        let Some(spec) = spec else {
            (self.phase, self.behaviour) = (None, None);
            return;
        };
        let parameters = spec.entries.first().and_then(|entry| entry.parameters.clone());
        self.behaviour = Some(Behaviour::parse(&parameters.unwrap_or_default()));
        self.soak = spec.soak().as_secs();
        let is_active =
            self.active.as_ref().zip(self.wanted.as_ref()).is_some_and(|(one, other)| same(one, other));
        if is_active && self.good == self.active {
            (self.phase, self.failed) = (Some(StackPhase::Settled), None);
        } else {
            self.phase = Some(StackPhase::Pulling);
            self.next_at = now + u64::from(random.below(20));
        }
    }

    /// Returns whether the node dies.
    fn work(&mut self, now: u64, random: &mut Rng) -> bool {
        let (Some(wanted), Some(behaviour)) = (self.wanted.clone(), self.behaviour) else { return false };
        if now < self.overridden_until {
            self.phase = Some(StackPhase::LocalOverride);
            return false;
        }
        if self.phase == Some(StackPhase::LocalOverride) {
            (self.phase, self.next_at) = (Some(StackPhase::Pulling), now + 5);
        }
        let fails = match behaviour {
            Behaviour::Good | Behaviour::Refused | Behaviour::Unavailable => false,
            Behaviour::Traps | Behaviour::KillsNode => true,
            Behaviour::TrapsOnModel(model) => self.model == model,
            Behaviour::FailsOn(percent) => self.luck < percent,
        };
        if now < self.next_at {
            return false;
        }
        match self.phase {
            Some(StackPhase::Pulling) if behaviour == Behaviour::Unavailable => {}
            Some(StackPhase::Pulling) => {
                self.phase = Some(StackPhase::Gating);
                self.next_at = now + 5;
            }
            Some(StackPhase::Gating) if behaviour == Behaviour::Refused => {
                self.phase = Some(StackPhase::Refused);
                self.fail(&wanted, "the gate");
            }
            Some(StackPhase::Gating) => {
                self.phase = Some(StackPhase::Soaking);
                self.active = Some(wanted);
                self.next_at = now + if fails { u64::from(random.below(10)) } else { self.soak };
            }
            Some(StackPhase::Soaking) if fails && behaviour == Behaviour::KillsNode => return true,
            Some(StackPhase::Soaking) if fails => {
                self.phase = Some(StackPhase::RolledBack);
                self.active.clone_from(&self.good);
                self.fail(&wanted, "a policy was suspended");
            }
            Some(StackPhase::Soaking) => {
                self.phase = Some(StackPhase::Settled);
                (self.good, self.failed) = (self.active.clone(), None);
            }
            _ => {}
        }
        false
    }

    fn fail(&mut self, key: &Key, reason: &str) {
        self.failed = Some(FailedRevision {
            revision: key.revision.clone(),
            attempt: key.attempt,
            reason: reason.to_owned(),
        });
    }

    fn status(&self, now: u64) -> GpuNodeStatus {
        let second = i64::try_from(now).unwrap_or(0);
        GpuNodeStatus {
            observed_generation: self.generation,
            heartbeat_time: Some(Time(Timestamp::from_second(second).unwrap_or(Timestamp::MAX))),
            models: Some(vec![format!("model {}", self.model)]),
            stack: Some(StackStatus {
                origin: "fleet".to_owned(),
                active: self.active.as_ref().map(|key| key.revision.clone()),
                good: self.good.as_ref().map(|key| key.revision.clone()),
                phase: self.phase,
                failed: self.failed.clone(),
            }),
            ..GpuNodeStatus::default()
        }
    }
}
