//! The claims of a history, and what the kubelet has had prepared of them.

use super::world::World;
use crate::grants::claim::{CLAIM_PODS_MAX, Claim, ClaimPod};
use crate::grants::prepare::{ClaimToPrepare, RequestToPrepare, allocations_of};
use crate::ids::names::{DeviceId, Resource};
use crate::node::change::{Change, Entry};
use crate::node::command::{Command, StackAnswer};
use crate::node::ledger::Ledger;
use crate::policy::hooks::AdmitRequest;
use crate::sharing::listing::listing;
use std::collections::BTreeMap;

/// Claims that exist at once.
const CLAIMS: usize = 4;

/// The devices of each prepared claim, by the names of its requests.
pub(super) type Prepared = BTreeMap<String, BTreeMap<String, (Resource, Vec<DeviceId>)>>;

impl World {
    /// The kubelet prepares a claim: again with its devices, or with devices that the scheduler chose, which need not be
    /// free. Each device is a request.
    pub(super) fn prepare(&mut self, which: usize, resource: &Resource, device: usize, count: usize) {
        let uid = format!("claim-{}", which % CLAIMS);
        let listed = listing(&self.ledger, resource);
        let known = self.claims.get(&uid).filter(|_| device.is_multiple_of(3)).cloned();
        let wanted = known.unwrap_or_else(|| {
            let chosen = listed.iter().cycle().skip(device % listed.len().max(1)).take(count);
            let devices = chosen.map(|listed| (resource.clone(), vec![listed.id.clone()]));
            devices.enumerate().map(|(n, devices)| (format!("request-{n}"), devices)).collect()
        });
        let requests = wanted.iter().map(|(name, (resource, devices))| RequestToPrepare {
            name: name.clone(),
            devices: AdmitRequest { resource: resource.clone(), devices: devices.clone(), claim: None },
            answer: StackAnswer::Allow { by: vec!["baseline".into()], terms: Default::default() },
        });
        let claim = ClaimToPrepare {
            pod_claim_name: None,
            claim: Claim { uid: uid.clone(), namespace: "ns".into(), name: uid.clone() },
            pods: vec![ClaimPod { uid: format!("pod-of-{uid}-{}", device % 2), name: "main".into() }],
            requests: requests.collect(),
        };
        let before = self.ledger.clone();
        match self.apply(&Command::Prepare { claim, evaluated: None }) {
            Ok(_) => drop(self.claims.insert(uid, wanted)),
            Err(_) => assert_eq!(before, self.ledger, "a refused claim changes nothing"),
        }
    }

    pub(super) fn reserve(&mut self, which: usize, pods: usize) {
        let claim = format!("claim-{}", which % CLAIMS);
        let pod = |n| ClaimPod { uid: format!("pod-of-{claim}-{n}"), name: "main".into() };
        let pods: Vec<_> = (0..pods).map(pod).collect();
        self.apply(&Command::RecordClaimPods { claim: claim.clone(), pods: pods.clone() }).unwrap();
        for allocation in allocations_of(&self.ledger, &claim) {
            let recorded = &allocation.origin.claim().unwrap().pods;
            assert_eq!(recorded[..], pods[..pods.len().min(CLAIM_PODS_MAX)], "{claim}");
        }
    }

    pub(super) fn unprepare(&mut self, which: usize) {
        let uid = format!("claim-{}", which % CLAIMS);
        self.apply(&Command::Unprepare { claim: uid.clone() }).unwrap();
        self.claims.remove(&uid);
    }

    /// Claims whose allocations an operator ended.
    pub(super) fn forget_ended_claims(&mut self, before: &Ledger, command: &Command, entry: &Entry) {
        let (Command::End { .. }, [Change::Ended { id, .. }, ..]) = (command, entry.changes.as_slice())
        else {
            return;
        };
        let Some(request) = before.live[id].origin.claim() else { return };
        if let Some(prepared) = self.claims.get_mut(&request.claim.uid) {
            prepared.remove(&request.request);
        }
    }

    /// A claim holds what was prepared until it is unprepared (I6), and nothing else holds it (I1).
    pub(super) fn claims_hold_what_was_prepared(&self) {
        for (uid, prepared) in &self.claims {
            let held = allocations_of(&self.ledger, uid).into_iter();
            let held: BTreeMap<String, (Resource, Vec<DeviceId>)> = held
                .map(|a| (a.origin.claim().unwrap().request.clone(), (a.resource.clone(), a.devices.clone())))
                .collect();
            assert_eq!(held, *prepared, "I6: {uid}");
            for (resource, id) in
                prepared.values().flat_map(|(resource, ids)| ids.iter().map(move |id| (resource, id)))
            {
                assert_eq!(self.ledger.holders_of(resource, id).len(), 1, "I1: {id} of {uid}");
            }
        }
        let live = self.ledger.live.values().filter(|a| a.origin.claim().is_some()).count();
        assert_eq!(live, self.claims.values().map(BTreeMap::len).sum::<usize>(), "I6");
    }
}
