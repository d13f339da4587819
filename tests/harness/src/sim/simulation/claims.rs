//! ResourceClaims, whose devices a scheduler chooses from what is published, and GPUs that move between the kubelet's APIs.

use super::ends::Cause;
use super::violation::Violation;
use super::world::World;
use berth_core::keeper::CommandError;
use berth_kernel::drain::marks::Author;
use berth_kernel::grants::claim::{Claim, ClaimPod};
use berth_kernel::grants::prepare::{ClaimToPrepare, RequestToPrepare};
use berth_kernel::hardware::device_access::DeviceAccess;
use berth_kernel::ids::names::{DeviceId, GpuId, Resource};
use berth_kernel::node::command::{Command, StackAnswer};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::policy::hooks::{AdmitRequest, Hook};
use berth_kernel::sharing::publish::{Capacity, PublishedDevice, Versions, publication};
use berth_kernel::sharing::via::KubeletApi;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Whether the run of this seed has claims. Those that docs/measurements.md names for rules broken on purpose go on
/// without them.
pub(crate) fn has_claims(seed: u64) -> bool {
    [2, 7, 8].contains(&(seed % 11))
}

/// The API through which a GPU of this seed's run is granted until an operator moves it.
pub(crate) fn first_api(seed: u64) -> KubeletApi {
    if has_claims(seed) && seed.is_multiple_of(2) { KubeletApi::Dra } else { KubeletApi::DevicePlugin }
}

/// The claims to which the scheduler has allocated devices, by number.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    allocated: BTreeMap<u32, ClaimToPrepare>,
    next: u32,
}

impl Claims {
    fn some(&self, which: u32) -> Option<u32> {
        self.allocated.keys().nth(which as usize % self.allocated.len().max(1)).copied()
    }
}

/// The whole part, or each of its shares.
fn ids(ledger: &Ledger, device: &PublishedDevice) -> Vec<DeviceId> {
    let is_shared = matches!(device.capacity, Capacity::Shared(_));
    let devices = ledger.part(&device.part).into_iter().flat_map(|part| part.devices.keys());
    let own =
        devices.filter(|(resource, share)| *resource == device.resource && share.is_some() == is_shared);
    own.map(|(_, share)| DeviceId { part: device.part.clone(), share: *share }).collect()
}

impl World {
    /// A scheduler allocates published devices to a new claim, one a request, and the kubelet has it prepared. `contested`:
    /// the devices may have a taint, or be those of another claim, as with two schedulers or one that reads old slices.
    pub(crate) fn start_claim(&mut self, count: u32, pick: u32, contested: bool, stale: bool) {
        let allocated = self.claims.allocated.values().flat_map(|claim| &claim.requests);
        let taken: BTreeSet<&DeviceId> = allocated.flat_map(|request| &request.devices.devices).collect();
        let published = publication(self.ledger(), &Versions::default());
        let usable = published.into_iter().filter(|one| contested || one.taints.is_empty());
        let mut devices: Vec<(Resource, DeviceId)> = usable
            .flat_map(|one| ids(self.ledger(), &one).into_iter().map(move |id| (one.resource.clone(), id)))
            .collect();
        devices.retain(|(_, id)| contested || !taken.contains(id));
        if devices.len() < count as usize {
            return;
        }
        let at = pick as usize % devices.len();
        devices.rotate_left(at);
        let chosen = devices.into_iter().take(count as usize).enumerate();
        let requests = chosen.map(|(n, (resource, id))| RequestToPrepare {
            name: format!("request-{n}"),
            devices: AdmitRequest { resource, devices: vec![id], claim: None },
            answer: StackAnswer::NotCalled,
        });
        let number = self.claims.next;
        self.claims.next += 1;
        let uid = format!("claim-{number}");
        let claim = ClaimToPrepare {
            pod_claim_name: None,
            claim: Claim { uid: uid.clone(), namespace: "ns".into(), name: uid },
            pods: vec![ClaimPod { uid: format!("of-claim-{number}"), name: format!("of-claim-{number}") }],
            requests: requests.collect(),
        };
        self.claims.allocated.insert(number, claim);
        self.prepare(number, stale);
    }

    /// The kubelet repeats a call whose response it lost, or has a claim prepared for a second pod.
    pub(crate) fn prepare_again(&mut self, which: u32, more: bool, stale: bool) {
        let Some(number) = self.claims.some(which) else { return };
        if let Some(claim) = self.claims.allocated.get_mut(&number).filter(|_| more) {
            let name = format!("of-claim-{number}-{}", claim.pods.len());
            claim.pods.push(ClaimPod { uid: name.clone(), name });
        }
        self.prepare(number, stale);
    }

    /// NodePrepareResources as front end and policy thread do it.
    fn prepare(&mut self, number: u32, stale: bool) {
        let Some(wanted) = self.claims.allocated.get(&number).cloned() else { return };
        if !self.kubelet.running {
            return;
        }
        let mut again = false;
        loop {
            let Some(before) = self.daemon.as_ref().map(|daemon| daemon.snapshot()) else { return };
            let node = if stale && !again { Arc::clone(&self.older) } else { Arc::clone(&before) };
            let mut claim = wanted.clone();
            for at in 0..claim.requests.len() {
                let question = claim.question(&claim.requests[at]);
                let Some(daemon) = self.daemon.as_mut().filter(|_| again || node.calls_policies(Hook::Admit))
                else {
                    continue;
                };
                let answer = daemon.admit(&self.around, &node, &question);
                let Some(answer) = self.take(answer) else { return };
                claim.requests[at].answer = answer;
            }
            let command = Command::Prepare { claim, evaluated: (!again).then_some(node.generation) };
            match self.turn(&command, Cause::Prepare(wanted.claim.uid.clone())) {
                Some(Err(CommandError::Refused(Refusal::Moved))) if !again => again = true,
                Some(Ok(applied)) => {
                    let new = applied.snapshot.live.keys().filter(|id| !before.live.contains_key(id));
                    self.granted += new.count() as u64;
                    return;
                }
                _ => return,
            }
        }
    }

    /// The pods of a claim have ended: the kubelet has it unprepared, and then it is deallocated.
    pub(crate) fn unprepare(&mut self, which: u32) {
        let Some(number) = self.claims.some(which).filter(|_| self.kubelet.running) else { return };
        let uid = format!("claim-{number}");
        let command = Command::Unprepare { claim: uid.clone() };
        if let Some(Ok(_)) = self.turn(&command, Cause::Unprepare(uid)) {
            self.claims.allocated.remove(&number);
        }
    }

    /// An operator orders that a GPU is granted through the API.
    pub(crate) fn set_via(&mut self, gpu: GpuId, api: KubeletApi) {
        let author = Author::api("moves".into(), String::new());
        self.turn(&Command::SetVia { gpu, api, author }, Cause::Nothing);
    }

    /// The API server shows that nothing is allocated through a GPU's former API any more.
    pub(crate) fn finish_move(&mut self, gpu: GpuId) -> Option<Result<(), CommandError>> {
        Some(self.turn(&Command::FinishMove { gpu }, Cause::Nothing)?.map(drop))
    }

    /// Containers get their devices by CDI, which a daemon finds out at each start.
    pub(crate) fn report_cdi(&mut self) -> bool {
        let access = DeviceAccess { by_cdi: true, ..DeviceAccess::default() };
        !self.has_claims
            || matches!(self.turn(&Command::SetDeviceAccess(access), Cause::Nothing), Some(Ok(_)))
    }

    /// All claims are unprepared, and every GPU is ordered back to the device plugin API.
    pub(crate) fn end_claims(&mut self) {
        while !self.claims.allocated.is_empty() && self.checks.violations.is_empty() {
            let left = self.claims.allocated.len();
            self.unprepare(0);
            if self.claims.allocated.len() == left {
                self.checks.note(Err(Violation::new("end", "a claim cannot be unprepared")));
            }
        }
        let gpus: Vec<GpuId> = self.ledger().gpus.keys().cloned().collect();
        for gpu in gpus {
            self.set_via(gpu, KubeletApi::DevicePlugin);
        }
    }

    /// Nothing holds a GPU, and the scheduler has had its time.
    pub(crate) fn finish_moves(&mut self) {
        let gpus: Vec<GpuId> = self.ledger().gpus.keys().cloned().collect();
        for gpu in gpus {
            if let Some(Err(error)) = self.finish_move(gpu) {
                self.checks.note(Err(Violation::new("end", error.to_string())));
            }
        }
    }
}
