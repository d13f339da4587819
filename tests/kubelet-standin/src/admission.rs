//! Admission: every container of a pod, one resource at a time, one Allocate each.

use crate::anomalies::Anomaly;
use crate::calls::Rpc;
use crate::client::go_error;
use crate::devices::{Held, Ids};
use crate::life::Life;
use crate::pods::{ContainerSpec, Phase, Pod, PodSpec};
use crate::proto::v1beta1::{AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse};
use crate::select::Choice;
use crate::world::lock;
use std::{collections::BTreeMap, time::Instant};

/// Why a pod does not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// The pod is Failed now, for good.
    #[error("{reason}: {message}")]
    Rejected {
        /// As in `status.reason`.
        reason: String,
        /// As in `status.message`.
        message: String,
    },
    /// There is no kubelet running; the pod waits.
    #[error("no kubelet is running")]
    NoKubelet,
}

impl Life {
    /// Admits a pod, or makes it Failed.
    pub(crate) async fn admit(&self, spec: PodSpec) -> Result<(), AdmissionError> {
        let _one_at_a_time = self.admitting.lock().await;
        lock(&self.known).insert(spec.uid.clone());
        let pod = Pod { spec: spec.clone(), phase: Phase::Pending, force_deleted: false };
        // A pod that is there already comes again after a kubelet restart.
        lock(&self.world.pods).entry(spec.uid.clone()).or_insert(pod);
        self.world.touch();
        let answer = self.admit_containers(&spec).await;
        self.world.touch();
        answer.map_err(|why| {
            if !self.is_alive() {
                return AdmissionError::NoKubelet;
            }
            let reason = "UnexpectedAdmissionError".to_owned();
            let message = format!("Allocate failed due to {why}, which is unexpected");
            if let Some(pod) = lock(&self.world.pods).get_mut(&spec.uid) {
                pod.phase = Phase::Failed { reason: reason.clone(), message: message.clone() };
            }
            AdmissionError::Rejected { reason, message }
        })
    }

    async fn admit_containers(&self, spec: &PodSpec) -> Result<(), String> {
        for (is_init, container) in spec.in_order() {
            self.allocate_container(spec, is_init, container).await?;
        }
        Ok(())
    }

    /// What the kubelet also does when a container starts without cached devices.
    pub(crate) async fn allocate_container(
        &self,
        spec: &PodSpec,
        is_init: bool,
        container: &ContainerSpec,
    ) -> Result<(), String> {
        {
            // The re-usable devices of any other pod are forgotten here.
            let mut manager = lock(&self.manager);
            let other = !matches!(&manager.reusable, Some((uid, _)) if *uid == spec.uid);
            if other {
                manager.reusable = Some((spec.uid.clone(), BTreeMap::new()));
            }
        }
        self.allocate_resources(spec, container).await?;
        let plain_init = is_init && !container.restartable;
        self.update_reusable(spec, container, plain_init);
        Ok(())
    }

    fn update_reusable(&self, spec: &PodSpec, container: &ContainerSpec, plain_init: bool) {
        let mut manager = lock(&self.manager);
        let containers = manager.pod_devices.get(&spec.uid);
        let Some(held) = containers.and_then(|c| c.get(&container.name)).cloned() else {
            return;
        };
        let Some((_, reusable)) = manager.reusable.as_mut() else {
            return;
        };
        for (resource, held) in held {
            let ids = reusable.entry(resource).or_default();
            if plain_init {
                ids.extend(held.ids());
            } else {
                // Kept by a running container, so nobody else may have them.
                *ids = ids.difference(&held.ids()).cloned().collect();
            }
        }
    }

    async fn allocate_resources(&self, spec: &PodSpec, container: &ContainerSpec) -> Result<(), String> {
        let mut updated = false;
        let mut granted = false;
        for (resource, required) in self.world.shuffled(container.resources.clone()) {
            if !lock(&self.manager).is_device_resource(&resource) {
                continue;
            }
            if !updated {
                self.update_allocated_devices();
                updated = true;
            }
            let choice = Choice { pod: spec, container: &container.name, resource: &resource, required };
            let ids = self.choose(&choice).await?;
            if !ids.is_empty() {
                // An error leaves here with the first resources granted and no
                // checkpoint written: their grants are never seen by anybody.
                self.allocate(&choice, ids).await?;
                granted = true;
            }
        }
        if granted {
            self.write_checkpoint(&lock(&self.manager));
        }
        Ok(())
    }

    async fn allocate(&self, choice: &Choice<'_>, ids: Ids) -> Result<(), String> {
        let resource = choice.resource;
        let flight = (resource.to_owned(), ids.clone());
        lock(&self.manager).in_flight.push(flight.clone());
        self.world.touch();
        let answer = self.call_allocate(resource, &ids).await;
        let mut manager = lock(&self.manager);
        if let Some(at) = manager.in_flight.iter().position(|f| *f == flight) {
            manager.in_flight.swap_remove(at);
        }
        let response = match answer {
            Ok(Some(response)) => response,
            Ok(None) => {
                drop(manager);
                self.world.report(Anomaly::EmptyAllocateResponse { resource: resource.to_owned() });
                return Err("no containers return in allocation response".to_owned());
            }
            Err(why) => {
                manager.recompute_allocated();
                return Err(why);
            }
        };
        let by_numa = manager.by_numa(resource, &ids);
        let held = Held { by_numa, response };
        manager.insert(&choice.pod.uid, choice.container, resource, held);
        Ok(())
    }

    async fn call_allocate(
        &self,
        resource: &str,
        ids: &Ids,
    ) -> Result<Option<ContainerAllocateResponse>, String> {
        let endpoint = lock(&self.manager).endpoints.get(resource).cloned();
        let endpoint = endpoint.ok_or_else(|| format!("unknown Device Plugin {resource}"))?;
        let api = endpoint.client.as_ref().and_then(|c| c.api());
        let mut api = api
            .filter(|_| endpoint.stopped.is_none())
            .ok_or_else(|| format!("endpoint {resource} has been stopped"))?;
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                devices_ids: self.world.shuffled(ids.iter().cloned()),
            }],
        };
        let began = Instant::now();
        let answer = api.allocate(request).await;
        let failed = answer.is_err();
        self.world.record(Rpc::Allocate, resource, began, failed);
        let answer = answer.map_err(|status| go_error(&status))?;
        Ok(answer.into_inner().container_responses.into_iter().next())
    }
}
