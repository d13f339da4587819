//! A policy is tried on the live node: what it would offer, and what would become of a request. All of
//! it happens on a copy of the ledger, by the same walk and the same kernel, off the policy thread.
//! Nothing is recorded, and no grant comes of it.

use super::Door;
use super::activation::{LEISURE, Trial};
use super::ear::Ear;
use super::faults::Faults;
use super::prepare::Unprepared;
use super::recorder::aside;
use super::replay::Candidate;
use super::stack::Walk;
use crate::keeper::Snapshot;
use crate::spans;
use berth_kernel::command::{Attempt, Command, NewStack, StackAnswer};
use berth_kernel::decide::{Verdict, decide};
use berth_kernel::decision::{CallNote, Grant, Outcome, Said};
use berth_kernel::ledger::Ledger;
use berth_kernel::listing::free_devices;
use berth_kernel::names::{DeviceId, Resource};
use berth_kernel::placement;
use berth_kernel::pods::{self, Pod, PodContainer, PodsSource, PodsView, Stage};
use berth_kernel::policy::{AdmitRequest, Fault, Hook, PlaceRequest, STACK_ENTRIES_MAX};
use berth_kernel::stack::{OnFault, Permissions, Stack, StackEntry};
use berth_kernel::time::Now;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Trials at a time: three walks of a second at most, and the questions of an activation.
pub(super) const TRIALS: usize = 1;
/// Most devices of a request that is tried: what the largest node has, 16 GPUs of 128.
pub const TRIED_DEVICES_MAX: usize = 2048;
/// The UID of a pod that is only imagined.
const IMAGINED: &str = "imagined-by-berth";

/// What is to be tried.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// Whom.
    pub candidate: Candidate,
    /// What it may do; if not said, what the entry may that it takes the place of, or the default.
    pub permissions: Option<Permissions>,
    /// What happens when it fails, the same way.
    pub on_fault: Option<OnFault>,
    /// Whether the rest of the active stack is left out.
    pub alone: bool,
    /// What a container would ask for.
    pub wish: Option<Wish>,
}

/// What a container would ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The resource.
    pub resource: Resource,
    /// How many devices, at least one.
    pub count: usize,
    /// Namespace and name of its pod. Policies are shown that pod alone as who may be asking; if not
    /// said, whoever may be asking now.
    pub pod: Option<(String, String)>,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Tried {
    /// The node as it stands.
    pub node: Snapshot,
    /// The node as it would be with the stack active. The same, if that was refused.
    pub then: Arc<Ledger>,
    /// Who was asked.
    pub stack: Stack,
    /// Where in it the candidate stands.
    pub place: usize,
    /// The entry that it takes the place of, by label.
    pub instead_of: Option<String>,
    /// Why this stack would not be activated, if so.
    pub refused: Option<String>,
    /// What became of the request.
    pub wish: Option<Wished>,
    /// What every policy was asked and said, in order.
    pub calls: Vec<Tell>,
}

/// What became of a request.
#[derive(Clone, Debug)]
pub struct Wished {
    /// Who may be asking, as namespace/pod.
    pub candidates: Vec<String>,
    /// The devices that were chosen; none where too few are free.
    pub devices: Vec<DeviceId>,
    /// Who chose them, and why.
    pub placed: Option<(String, String)>,
    /// Granted, denied or refused.
    pub outcome: Outcome,
}

/// One call.
#[derive(Clone, Debug)]
pub struct Tell {
    /// Which hook.
    pub hook: Hook,
    /// What the policy said, after the check of its answer.
    pub note: CallNote,
    /// What it logged.
    pub said: Vec<String>,
}

/// A policy was not tried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TryError {
    /// It cannot be made callable.
    #[error("{0}")]
    Unprepared(Unprepared),
    /// Another one is being tried.
    #[error("another policy is being tried; try again when that has ended")]
    Busy,
    /// The stack has no room for one more.
    #[error(
        "the active stack has {STACK_ENTRIES_MAX} entries already: try the policy alone, or in place of one of them"
    )]
    Full,
    /// The daemon is on its way down.
    #[error("the daemon is stopping")]
    Stopping,
}

impl Door {
    /// Tries a policy on the node as it stands. Takes up to a minute and a half where policies use
    /// all their time, milliseconds as a rule, and some more where code must be read or compiled first.
    ///
    /// # Errors
    /// If another one is being tried, or the stack is full.
    pub async fn try_policy(&self, proposal: Proposal) -> Result<Tried, TryError> {
        let alone = Arc::clone(&self.trials).try_acquire_owned().map_err(|_| TryError::Busy)?;
        let prepared = self.prepare([&proposal.candidate.digest]).await;
        let tried = match prepared {
            Ok(_prepared) => self.tried(proposal, alone).await,
            Err(error) => Err(TryError::Unprepared(error)),
        };
        self.rest();
        tried
    }

    async fn tried(&self, proposal: Proposal, alone: OwnedSemaphorePermit) -> Result<Tried, TryError> {
        let door = self.clone();
        // The place goes with the work, which goes on when whoever asked has gone.
        let work = tokio::task::spawn_blocking(spans::carried(aside(move || {
            let _alone = alone;
            Trying::new(&door, &proposal).map(|trying| trying.run(proposal.wish.as_ref()))
        })));
        work.await.map_err(|_| TryError::Stopping)?
    }
}

/// A trial under way.
struct Trying<'d> {
    door: &'d Door,
    now: Now,
    stack: Stack,
    faults: Faults,
    tried: Tried,
}

impl<'d> Trying<'d> {
    fn new(door: &'d Door, proposal: &Proposal) -> Result<Self, TryError> {
        let node = door.snapshot();
        let Candidate { policy, digest, parameters } = &proposal.candidate;
        let name = policy.split('@').next().unwrap_or_default();
        let old = node.stack.entries.iter().position(|entry| entry.name == name);
        let like = old.map(|place| &node.stack.entries[place]);
        let entry = StackEntry {
            name: name.to_owned(),
            digest: digest.clone(),
            parameters: parameters.clone(),
            permissions: proposal
                .permissions
                .clone()
                .unwrap_or_else(|| like.map_or_else(Permissions::default, |e| e.permissions.clone())),
            on_fault: proposal.on_fault.unwrap_or_else(|| like.map(|e| e.on_fault).unwrap_or_default()),
        };
        // Whom of the active stack is asked, by their place in it.
        let mut asked: Vec<(Option<usize>, StackEntry)> = Vec::new();
        if !proposal.alone {
            asked.extend(node.stack.entries.iter().cloned().enumerate().map(|(n, e)| (Some(n), e)));
        }
        let place = match old.filter(|_| !proposal.alone) {
            Some(place) => {
                asked[place] = (None, entry);
                place
            }
            None if asked.len() >= STACK_ENTRIES_MAX => return Err(TryError::Full),
            None => {
                asked.insert(0, (None, entry));
                0
            }
        };
        let live = door.account.faults();
        let mut faults = Faults::default();
        for (new, (old, entry)) in asked.iter().enumerate() {
            if old.is_some_and(|old| live.suspended(old, entry)) {
                faults.suspend(new, entry);
            }
        }
        let entries = asked.into_iter().map(|(_, entry)| entry).collect();
        let stack = Stack { entries, ..Stack::default() };
        let instead_of = old.filter(|_| !proposal.alone).map(|place| node.stack.entries[place].label());
        let (then, calls) = (Arc::clone(&node), Vec::new());
        let tried =
            Tried { node, then, stack: stack.clone(), place, instead_of, refused: None, wish: None, calls };
        Ok(Self { door, now: door.now(), stack, faults, tried })
    }

    fn run(mut self, wish: Option<&Wish>) -> Tried {
        self.offer();
        if let Some(wish) = wish {
            self.tried.wish = Some(self.grant(wish));
        }
        self.tried
    }

    /// Asks for offers, and does to the copy what an activation would do.
    fn offer(&mut self) {
        let node = Arc::clone(&self.tried.node);
        let offers = self.walk(Hook::Offer, &node, |walk| walk.offers());
        let failed = offers.faults.into_iter().next();
        let stack = NewStack {
            from_api: true,
            by: String::new(),
            why: String::new(),
            entries: self.stack.entries.clone(),
        };
        let command = Command::Activate { stack: stack.clone(), expected: None, offers: offers.parts };
        let Verdict { entry, refusal } = decide(&node, self.door.rules(), &command, self.now);
        let mut then = Ledger::clone(&node);
        then.apply(&entry);
        let then = Arc::new(then);
        let failed = failed.or_else(|| self.unfit(&stack, &then));
        let failed = failed.map(|(policy, fault)| format!("policy {policy} fails on this node: {fault}"));
        self.tried.refused = failed.or_else(|| refusal.map(|refusal| refusal.to_string()));
        if self.tried.refused.is_none() {
            self.tried.then = then;
        }
    }

    /// The first policy whose parameters an activation would find wrong, and how.
    fn unfit(&self, stack: &NewStack, then: &Arc<Ledger>) -> Option<(String, Fault)> {
        let trial = Trial {
            stack,
            policies: &*self.door.policies,
            node: then,
            now: self.now,
            baseline: &self.door.baseline,
            rules: self.door.rules(),
            leisure: LEISURE,
        };
        trial.try_parameters(then).err()
    }

    /// Asks as the kubelet does: which devices, and then for these.
    fn grant(&mut self, wish: &Wish) -> Wished {
        let mut node = Ledger::clone(&self.tried.then);
        if let Some((namespace, name)) = &wish.pod {
            node.pods = Some(Arc::new(asking(&node, namespace, name, wish, self.now)));
        }
        let node = Arc::new(node);
        let named = pods::candidates(&node, &wish.resource, wish.count);
        let candidates = named.iter().map(|c| format!("{}/{}", c.pod.namespace, c.pod.name)).collect();
        let available = free_devices(&node, &wish.resource, self.door.rules().overcommit_percent);
        if available.len() < wish.count {
            let reason = format!("{} of {} are free, not {}", available.len(), wish.resource, wish.count);
            let (devices, outcome) = (Vec::new(), Outcome::Refused { reason });
            return Wished { candidates, devices, placed: None, outcome };
        }
        let request = PlaceRequest {
            resource: wish.resource.clone(),
            available,
            required: Vec::new(),
            size: wish.count,
        };
        let request = placement::narrowed(&node, &request, self.door.rules().overcommit_percent);
        let (placement, by) = self.walk(Hook::Place, &node, |walk| walk.place(&request));
        let mut devices = placement.devices;
        let index = |id: &DeviceId| node.part(&id.part).map(|part| part.part.gpu_index);
        devices.sort_by_cached_key(|id| (index(id), id.clone()));
        let mut sorted = devices.clone();
        sorted.sort();
        let request = AdmitRequest { resource: wish.resource.clone(), devices: sorted };
        let answer = match self.door.baseline.mps_denial(&wish.resource) {
            Some(denial) => denial,
            None => self.walk(Hook::Admit, &node, |walk| walk.admit(&request)),
        };
        let outcome = verdict(self.door, &node, request, answer, self.now);
        Wished { candidates, devices, placed: Some((by, placement.reason)), outcome }
    }

    fn walk<T>(&mut self, hook: Hook, node: &Arc<Ledger>, ask: impl FnOnce(Walk<'_>) -> T) -> T {
        let ear = Ear::new(&*self.door.policies);
        let mut calls = Vec::new();
        let answer = ask(Walk {
            stack: &self.stack,
            policies: &ear,
            node,
            now: self.now,
            faults: &mut self.faults,
            baseline: &self.door.baseline,
            overcommit_percent: self.door.rules().overcommit_percent,
            calls: &mut calls,
            leisure: LEISURE,
        });
        let mut heard = ear.take();
        for note in calls {
            // An entry that was not asked has said nothing.
            let own = heard.front().is_some_and(|heard| heard.digest == note.digest);
            let said = if own && note.said != Said::Suspended { heard.pop_front() } else { None };
            self.tried.calls.push(Tell {
                hook,
                note,
                said: said.map(|heard| heard.said).unwrap_or_default(),
            });
        }
        answer
    }
}

/// The kernel's word on it.
fn verdict(door: &Door, node: &Ledger, request: AdmitRequest, answer: StackAnswer, now: Now) -> Outcome {
    let (by, terms) = match &answer {
        StackAnswer::Allow { by, terms } => (by.clone(), terms.clone()),
        StackAnswer::Deny { policy, reason } => {
            return Outcome::Denied { by: policy.clone(), reason: reason.clone() };
        }
        StackAnswer::Faulted { policy, kind, detail } => {
            let reason = format!("it failed ({}): {detail}", kind.as_str());
            return Outcome::Denied { by: policy.clone(), reason };
        }
    };
    let seen = node.generation;
    let command = Command::Allocate { request, answer, seen, again: true, attempt: Attempt::Last };
    match decide(node, door.rules(), &command, now).refusal {
        Some(refusal) => Outcome::Refused { reason: refusal.to_string() },
        None => Outcome::Granted(Grant {
            allocation: None,
            by,
            reason: terms.reason,
            limits: terms.limits,
            environment: terms.environment,
        }),
    }
}

/// The pods of the node with this one as the only one that may be asking. What is known of a pod of
/// that name is kept.
fn asking(node: &Ledger, namespace: &str, name: &str, wish: &Wish, now: Now) -> PodsView {
    let mut view = node.pods.as_deref().cloned().unwrap_or_else(|| PodsView {
        source: PodsSource::ApiServer,
        current: true,
        listed_mono_ms: now.mono_ms,
        pods: BTreeMap::new(),
        deleted: VecDeque::new(),
        finished: VecDeque::new(),
    });
    view.current = true;
    let known = view.pods.values().find(|pod| pod.namespace == namespace && pod.name == name);
    let labels = known.map(|pod| pod.labels.clone()).unwrap_or_default();
    view.pods.retain(|_, pod| pod.stage != Stage::Waiting);
    let asks = vec![(wish.resource.clone(), u32::try_from(wish.count).unwrap_or(u32::MAX))];
    let pod = Pod {
        uid: IMAGINED.into(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        labels,
        is_static: false,
        of_daemon_set: false,
        stage: Stage::Waiting,
        leaving_since_wall_ms: None,
        created_wall_ms: now.wall_ms,
        containers: vec![PodContainer { name: "main".into(), asks }],
        bypass: None,
    };
    view.pods.insert(IMAGINED.into(), Arc::new(pod));
    view
}
