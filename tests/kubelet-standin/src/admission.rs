//! Admission of a pod: one Allocate call for each resource of each container.

use crate::anomalies::Anomaly;
use crate::calls::Rpc;
use crate::client::go_error;
use crate::devices::{Holding, Ids};
use crate::kubelet_state::KubeletState;
use crate::node_state::lock;
use crate::pods::{ContainerSpec, Phase, Pod, PodSpec};
use crate::proto::v1beta1::{AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse};
use crate::select::Choice;
use std::{collections::BTreeMap, time::Instant};

/// Why a pod was not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// The pod is permanently Failed.
    #[error("{reason}: {message}")]
    Rejected {
        /// `status.reason`.
        reason: String,
        /// `status.message`.
        message: String,
    },
    /// No kubelet is running; the pod waits.
    #[error("no kubelet is running")]
    NoKubelet,
}

impl KubeletState {
    /// Admits a pod. On an error its phase is Failed.
    pub(crate) async fn admit(&self, spec: PodSpec) -> Result<(), AdmissionError> {
        let _admission = self.admitting.lock().await;
        lock(&self.known).insert(spec.uid.clone());
        let pod = Pod { spec: spec.clone(), phase: Phase::Pending, admitted: false, force_deleted: false };
        // After a kubelet restart, the pod may exist already.
        lock(&self.node.pods).entry(spec.uid.clone()).or_insert(pod);
        self.node.notify_changed();
        if !self.node.options.admission_wait.is_zero() {
            tokio::time::sleep(self.node.options.admission_wait).await;
        }
        let result = self.admit_containers(&spec).await;
        if result.is_ok()
            && let Some(pod) = lock(&self.node.pods).get_mut(&spec.uid)
        {
            pod.admitted = true;
        }
        self.node.notify_changed();
        result.map_err(|error| {
            if !self.is_alive() {
                return AdmissionError::NoKubelet;
            }
            let reason = "UnexpectedAdmissionError".to_owned();
            let message = format!("Allocate failed due to {error}, which is unexpected");
            if let Some(pod) = lock(&self.node.pods).get_mut(&spec.uid) {
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

    /// Allocates the devices of one container: at admission, and at a start without cached devices.
    pub(crate) async fn allocate_container(
        &self,
        spec: &PodSpec,
        is_init: bool,
        container: &ContainerSpec,
    ) -> Result<(), String> {
        {
            // Forgets the reusable devices of any other pod.
            let mut manager = lock(&self.manager);
            let is_other = !matches!(&manager.reusable, Some((uid, _)) if *uid == spec.uid);
            if is_other {
                manager.reusable = Some((spec.uid.clone(), BTreeMap::new()));
            }
        }
        self.allocate_resources(spec, container).await?;
        let is_plain_init = is_init && !container.restartable;
        self.update_reusable(spec, container, is_plain_init);
        Ok(())
    }

    fn update_reusable(&self, spec: &PodSpec, container: &ContainerSpec, is_plain_init: bool) {
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
            if is_plain_init {
                ids.extend(held.ids());
            } else {
                // A running container keeps them, so they are not reusable.
                *ids = ids.difference(&held.ids()).cloned().collect();
            }
        }
    }

    async fn allocate_resources(&self, spec: &PodSpec, container: &ContainerSpec) -> Result<(), String> {
        let mut updated = false;
        let mut granted = false;
        for (resource, required) in self.node.shuffled(container.resources.clone()) {
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
                // On an error, the first resources stay granted but no checkpoint is
                // written: no reader ever finds these grants.
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
        let call = (resource.to_owned(), ids.clone());
        lock(&self.manager).in_flight.push(call.clone());
        self.node.notify_changed();
        let result = self.call_allocate(resource, &ids).await;
        let mut manager = lock(&self.manager);
        if let Some(index) = manager.in_flight.iter().position(|c| *c == call) {
            manager.in_flight.swap_remove(index);
        }
        let response = match result {
            Ok(Some(response)) => response,
            Ok(None) => {
                drop(manager);
                self.node.report(Anomaly::EmptyAllocateResponse { resource: resource.to_owned() });
                return Err("no containers return in allocation response".to_owned());
            }
            Err(error) => {
                manager.recompute_allocated();
                return Err(error);
            }
        };
        let by_numa = manager.by_numa(resource, &ids);
        let held = Holding { by_numa, response };
        manager.insert(&choice.pod.uid, choice.container, resource, held);
        Ok(())
    }

    /// Records a running pod whose first container holds these devices.
    pub(crate) fn hold(
        &self,
        spec: PodSpec,
        resource: &str,
        ids: &[String],
        response: ContainerAllocateResponse,
    ) {
        self.update_allocated_devices();
        let uid = spec.uid.clone();
        let container = spec.containers.first().map(|container| container.name.clone()).unwrap_or_default();
        lock(&self.known).insert(uid.clone());
        let pod = Pod { spec, phase: Phase::Running, admitted: true, force_deleted: false };
        lock(&self.node.pods).insert(uid.clone(), pod);
        let mut manager = lock(&self.manager);
        let ids: Ids = ids.iter().cloned().collect();
        let by_numa = manager.by_numa(resource, &ids);
        manager.insert(&uid, &container, resource, Holding { by_numa, response });
        manager.allocated.entry(resource.to_owned()).or_default().extend(ids);
        self.write_checkpoint(&manager);
        drop(manager);
        self.node.notify_changed();
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
                devices_ids: self.node.shuffled(ids.iter().cloned()),
            }],
        };
        let began = Instant::now();
        let result = api.allocate(request).await;
        self.node.record(Rpc::Allocate, resource, began, result.is_err());
        let response = result.map_err(|status| go_error(&status))?;
        Ok(response.into_inner().container_responses.into_iter().next())
    }
}
