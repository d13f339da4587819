//! The kubelet's selection of devices for a container.

use crate::calls::Rpc;
use crate::client::go_error;
use crate::devices::{Ids, Manager, NO_NUMA_NODE};
use crate::kubelet_state::KubeletState;
use crate::node_state::lock;
use crate::pods::PodSpec;
use crate::proto::v1beta1::{ContainerPreferredAllocationRequest, PreferredAllocationRequest};
use std::{collections::BTreeSet, time::Instant};

/// A container's request for one resource.
pub(crate) struct Choice<'a> {
    pub(crate) pod: &'a PodSpec,
    pub(crate) container: &'a str,
    pub(crate) resource: &'a str,
    pub(crate) required: usize,
}

/// The devices that have to be chosen.
enum Need {
    /// None: the container has its devices already.
    Nothing,
    /// Further devices from `available`; `chosen` are the reused ones.
    Devices { chosen: Ids, available: Ids },
}

impl KubeletState {
    /// Chooses the ids for one container and resource; none if it holds them already.
    pub(crate) async fn choose(&self, choice: &Choice<'_>) -> Result<Ids, String> {
        let (mut chosen, available) = match self.check_need(choice)? {
            Need::Nothing => return Ok(Ids::new()),
            Need::Devices { chosen, available } => (chosen, available),
        };
        if chosen.len() == choice.required {
            return Ok(chosen);
        }
        let missing = choice.required - chosen.len();
        if available.len() < missing {
            return Err(format!(
                "requested number of devices unavailable for {}. Requested: {missing}, Available: {}",
                choice.resource,
                available.len()
            ));
        }
        let (aligned, unaligned, anywhere) = self.split_by_affinity(choice, &available);
        // With more aligned devices than needed, the plugin chooses among those.
        if missing < aligned.len() {
            let preferred = self.call_preferred(choice, &aligned, &chosen).await?;
            let preferred = preferred.intersection(&aligned).cloned().collect();
            self.take(choice, &mut chosen, &preferred);
            self.take(choice, &mut chosen, &aligned);
            return Ok(chosen);
        }
        // Otherwise all aligned devices are taken first, and the plugin chooses the others.
        self.take(choice, &mut chosen, &aligned);
        if chosen.len() == choice.required {
            return Ok(chosen);
        }
        let preferred = self.call_preferred(choice, &available, &chosen).await?;
        let preferred = preferred.intersection(&available).cloned().collect();
        self.take(choice, &mut chosen, &preferred);
        self.take(choice, &mut chosen, &unaligned);
        self.take(choice, &mut chosen, &anywhere);
        Ok(chosen)
    }

    fn check_need(&self, choice: &Choice<'_>) -> Result<Need, String> {
        let resource = choice.resource;
        let mut manager = lock(&self.manager);
        let uid = &choice.pod.uid;
        let held = manager.held(uid, choice.container, resource);
        let held: Option<Ids> = held.map(crate::devices::Holding::ids);
        let count = held.as_ref().map_or(0, Ids::len);
        if held.is_some() && count != choice.required {
            return Err(format!(
                "pod \"{uid}\" container \"{}\" changed request for resource \"{resource}\" from {count} to {}",
                choice.container, choice.required
            ));
        }
        if !self.is_sources_ready() && self.is_running(uid) {
            return Ok(Need::Nothing);
        }
        let Some(healthy) = manager.healthy.get(resource).cloned() else {
            return Err(format!("cannot allocate unregistered device {resource}"));
        };
        if healthy.is_empty() {
            return Err(format!("no healthy devices present; cannot allocate unhealthy devices {resource}"));
        }
        if let Some(held) = held {
            if !healthy.is_superset(&held) {
                return Err(format!(
                    "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
                ));
            }
            return Ok(Need::Nothing);
        }
        if choice.required == 0 {
            return Ok(Need::Nothing);
        }
        // Devices of init containers are taken first, whatever their health.
        let reusable = manager.reusable.as_ref();
        let reusable = reusable.filter(|(owner, _)| owner == uid);
        let reusable = reusable.and_then(|(_, resources)| resources.get(resource)).cloned();
        let mut chosen = Ids::new();
        self.take_locked(&mut manager, choice, &mut chosen, &reusable.unwrap_or_default());
        let in_use = manager.allocated.get(resource).cloned().unwrap_or_default();
        let available = healthy.difference(&in_use).cloned().collect();
        Ok(Need::Devices { chosen, available })
    }

    fn is_running(&self, uid: &str) -> bool {
        let pods = lock(&self.node.pods);
        pods.get(uid).is_some_and(|pod| pod.phase == crate::Phase::Running)
    }

    fn take(&self, choice: &Choice<'_>, chosen: &mut Ids, from: &Ids) {
        self.take_locked(&mut lock(&self.manager), choice, chosen, from);
    }

    /// Takes ids in map order, which is random, until there are enough, and marks them
    /// as in use at once.
    fn take_locked(&self, manager: &mut Manager, choice: &Choice<'_>, chosen: &mut Ids, from: &Ids) {
        let remaining: Vec<String> = from.difference(chosen).cloned().collect();
        let missing = choice.required.saturating_sub(chosen.len());
        let in_use = manager.allocated.entry(choice.resource.to_owned()).or_default();
        for id in self.node.shuffled(remaining).into_iter().take(missing) {
            in_use.insert(id.clone());
            chosen.insert(id);
        }
    }

    /// Splits the available devices into those aligned with the pod's NUMA hint, those on
    /// other nodes, and those on no node. Without a hint, or without any topology in the
    /// list, all are in the third set.
    fn split_by_affinity(&self, choice: &Choice<'_>, available: &Ids) -> (Ids, Ids, Ids) {
        let manager = lock(&self.manager);
        let resource = choice.resource;
        let all = manager.all.get(resource);
        let has_topology = all.is_some_and(|all| all.values().any(|d| d.topology.is_some()));
        let Some(hint) = choice.pod.numa_affinity.as_ref().filter(|_| has_topology) else {
            return (Ids::new(), Ids::new(), available.clone());
        };
        let (mut aligned, mut unaligned, mut anywhere) = (Ids::new(), Ids::new(), Ids::new());
        for id in available {
            let nodes: BTreeSet<i64> = manager.numa_nodes(resource, id).into_iter().collect();
            let set = if nodes.contains(&NO_NUMA_NODE) {
                &mut anywhere
            } else if nodes.is_disjoint(hint) {
                &mut unaligned
            } else {
                &mut aligned
            };
            set.insert(id.clone());
        }
        (aligned, unaligned, anywhere)
    }

    /// Calls GetPreferredAllocation if the plugin offers it. An error fails the pod.
    async fn call_preferred(
        &self,
        choice: &Choice<'_>,
        available: &Ids,
        chosen: &Ids,
    ) -> Result<Ids, String> {
        let resource = choice.resource;
        let endpoint = lock(&self.manager).endpoints.get(resource).cloned();
        let endpoint = endpoint
            .ok_or_else(|| format!("endpoint not found in cache for a registered resource: {resource}"))?;
        if !endpoint.options.is_some_and(|o| o.get_preferred_allocation_available) {
            return Ok(Ids::new());
        }
        let stopped = || format!("endpoint {resource} has been stopped");
        let api = endpoint.client.as_ref().and_then(|c| c.api());
        let mut api = api.filter(|_| endpoint.stopped.is_none()).ok_or_else(stopped)?;
        let request = ContainerPreferredAllocationRequest {
            available_device_i_ds: self.node.shuffled(available.union(chosen).cloned()),
            must_include_device_i_ds: self.node.shuffled(chosen.iter().cloned()),
            allocation_size: i32::try_from(choice.required).unwrap_or(i32::MAX),
        };
        let request = PreferredAllocationRequest { container_requests: vec![request] };
        let began = Instant::now();
        let result = api.get_preferred_allocation(request).await;
        self.node.record(Rpc::GetPreferredAllocation, resource, began, result.is_err());
        let response = result.map_err(|status| {
            let error = go_error(&status);
            format!("device plugin GetPreferredAllocation rpc failed with err: {error}")
        })?;
        let first = response.into_inner().container_responses.into_iter().next();
        Ok(first.map_or_else(Ids::new, |r| r.device_i_ds.into_iter().collect()))
    }
}
