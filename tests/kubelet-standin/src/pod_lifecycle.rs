//! The lifecycle of pods, as the API server and the container runtime would drive it.

use crate::admission::AdmissionError;
use crate::container::ContainerView;
use crate::devices::{Holding, Ids};
use crate::kubelet::Kubelet;
use crate::node_state::lock;
use crate::pods::{Phase, Pod, PodSpec};
use crate::proto::v1beta1::ContainerAllocateResponse;
use crate::{HEALTHY, UNHEALTHY};
use std::collections::BTreeMap;

impl Kubelet {
    /// Admits a new pod. On an error the pod is permanently Failed, as in a cluster.
    pub async fn admit(&self, pod: PodSpec) -> Result<(), AdmissionError> {
        let state = self.state().ok_or(AdmissionError::NoKubelet)?;
        state.admit(pod).await
    }

    /// Admits a pod and runs it. Allocate is not called: the caller has called it, for these devices, for the first
    /// container of the pod. For measurements of that call by a client of their own.
    pub fn run_allocated(
        &self,
        pod: PodSpec,
        resource: &str,
        ids: &[String],
        response: ContainerAllocateResponse,
    ) -> Result<(), AdmissionError> {
        let state = self.state().ok_or(AdmissionError::NoKubelet)?;
        state.hold(pod, resource, ids, response);
        Ok(())
    }

    /// Admits pods whose containers do not run again, as a restarted kubelet does, with
    /// the devices in the checkpoint. Returns the results by UID.
    pub async fn readmit(&self) -> BTreeMap<String, Result<(), AdmissionError>> {
        let pods = self.pods();
        let waiting = pods.into_iter().filter(|(_, pod)| pod.is_active() && pod.phase == Phase::Pending);
        let mut results = BTreeMap::new();
        for (uid, pod) in waiting {
            results.insert(uid, self.admit(pod.spec).await);
        }
        results
    }

    /// Starts or restarts one container of an admitted pod.
    pub async fn start_container(&self, uid: &str, container: &str) -> Result<ContainerView, AdmissionError> {
        let state = self.state().ok_or(AdmissionError::NoKubelet)?;
        let rejected =
            |reason: &str, message: String| AdmissionError::Rejected { reason: reason.to_owned(), message };
        let spec = self.pod(uid).map(|pod| pod.spec);
        let found = spec.as_ref().and_then(|spec| {
            let mut containers = spec.in_order();
            let (is_init, container) = containers.find(|(_, c)| c.name == container)?;
            Some((spec, is_init, container))
        });
        let Some((spec, is_init, container)) = found else {
            let message = format!("no container {container} in a pod with UID {uid}");
            return Err(rejected("NotFound", message));
        };
        let view = state.start_container(spec, is_init, container).await;
        view.map_err(|error| rejected("CreateContainerConfigError", error))
    }

    /// Starts every container in order and sets the phase to Running.
    pub async fn run(&self, uid: &str) -> Result<(), AdmissionError> {
        let containers: Vec<String> = self.pod(uid).map_or_else(Vec::new, |pod| {
            let containers = pod.spec.in_order();
            containers.map(|(_, c)| c.name.clone()).collect()
        });
        for container in &containers {
            self.start_container(uid, container).await?;
        }
        self.set_phase(uid, Phase::Running);
        Ok(())
    }

    /// Ends the pod's containers without an error. Its API object remains; the pod is no
    /// longer active, and the kubelet forgets its devices with the next purge.
    pub fn finish(&self, uid: &str) {
        self.set_phase(uid, Phase::Succeeded);
    }

    /// Deletes the pod, whose containers have stopped.
    pub fn delete(&self, uid: &str) {
        lock(&self.node().pods).remove(uid);
        self.node().notify_changed();
    }

    /// Deletes the API object while the containers still run: `List` no longer contains
    /// the pod. `delete` stops the containers.
    pub fn force_delete(&self, uid: &str) {
        if let Some(pod) = lock(&self.node().pods).get_mut(uid) {
            pod.force_deleted = true;
        }
        self.node().notify_changed();
    }

    fn set_phase(&self, uid: &str, phase: Phase) {
        if let Some(pod) = lock(&self.node().pods).get_mut(uid) {
            pod.phase = phase;
        }
        self.node().notify_changed();
    }

    /// The pod with this UID.
    pub fn pod(&self, uid: &str) -> Option<Pod> {
        lock(&self.node().pods).get(uid).cloned()
    }

    /// All pods, by UID.
    pub fn pods(&self) -> BTreeMap<String, Pod> {
        lock(&self.node().pods).clone()
    }

    /// The view with which a container starts; `None` if nothing is cached.
    pub fn view(&self, uid: &str, container: &str) -> Option<ContainerView> {
        self.state()?.view(uid, container)
    }

    /// The ids of a resource that a container holds.
    pub fn held(&self, uid: &str, container: &str, resource: &str) -> Ids {
        let state = self.state();
        state
            .and_then(|state| {
                let manager = lock(&state.manager);
                manager.held(uid, container, resource).map(Holding::ids)
            })
            .unwrap_or_default()
    }

    /// `status.containerStatuses[].allocatedResourcesStatus`: a held device that is not
    /// in the list is reported healthy.
    pub fn reported_health(&self, uid: &str, container: &str) -> BTreeMap<String, &'static str> {
        let mut health = BTreeMap::new();
        let Some(state) = self.state() else {
            return health;
        };
        let manager = lock(&state.manager);
        let resources = manager.pod_devices.get(uid).and_then(|c| c.get(container));
        for (resource, held) in resources.into_iter().flatten() {
            for id in held.ids() {
                let device = manager.all.get(resource).and_then(|all| all.get(&id));
                let is_unhealthy = device.is_some_and(|d| d.health != HEALTHY);
                health.insert(id, if is_unhealthy { UNHEALTHY } else { HEALTHY });
            }
        }
        health
    }
}
