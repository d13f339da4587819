//! Pods come and go: what the API server and the container runtime would do.

use crate::admission::AdmissionError;
use crate::container::ContainerView;
use crate::devices::{Held, Ids};
use crate::kubelet::Kubelet;
use crate::pods::{Phase, Pod, PodSpec};
use crate::world::lock;
use crate::{HEALTHY, UNHEALTHY};
use std::collections::BTreeMap;

impl Kubelet {
    /// A pod arrives. On an error it is Failed for good, as in a cluster.
    pub async fn admit(&self, pod: PodSpec) -> Result<(), AdmissionError> {
        let life = self.life().ok_or(AdmissionError::NoKubelet)?;
        life.admit(pod).await
    }

    /// What a restarted kubelet does with pods whose containers do not run: it admits
    /// them again, with the devices that the checkpoint remembers.
    pub async fn readmit(&self) -> BTreeMap<String, Result<(), AdmissionError>> {
        let pods = self.pods();
        let waiting = pods.into_iter().filter(|(_, pod)| pod.is_active() && pod.phase == Phase::Pending);
        let mut answers = BTreeMap::new();
        for (uid, pod) in waiting {
            answers.insert(uid, self.admit(pod.spec).await);
        }
        answers
    }

    /// Starts, or starts again, one container of an admitted pod.
    pub async fn start_container(&self, uid: &str, container: &str) -> Result<ContainerView, AdmissionError> {
        let life = self.life().ok_or(AdmissionError::NoKubelet)?;
        let failed =
            |reason: &str, message: String| AdmissionError::Rejected { reason: reason.to_owned(), message };
        let spec = self.pod(uid).map(|pod| pod.spec);
        let found = spec.as_ref().and_then(|spec| {
            let mut containers = spec.in_order();
            let (is_init, container) = containers.find(|(_, c)| c.name == container)?;
            Some((spec, is_init, container))
        });
        let Some((spec, is_init, container)) = found else {
            let what = format!("no container {container} in a pod with UID {uid}");
            return Err(failed("NotFound", what));
        };
        let view = life.start_container(spec, is_init, container).await;
        view.map_err(|why| failed("CreateContainerConfigError", why))
    }

    /// Starts every container in order; the pod runs.
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

    /// The pod ends by itself. Its API object stays; the kubelet no longer calls it
    /// active, and forgets its devices at the next occasion.
    pub fn finish(&self, uid: &str) {
        self.set_phase(uid, Phase::Succeeded);
    }

    /// The pod is deleted and its containers have stopped.
    pub fn delete(&self, uid: &str) {
        lock(&self.world().pods).remove(uid);
        self.world().touch();
    }

    /// The API object is gone at once while the containers still run: `List` shows
    /// the pod no more. `delete` stops them.
    pub fn force_delete(&self, uid: &str) {
        if let Some(pod) = lock(&self.world().pods).get_mut(uid) {
            pod.force_deleted = true;
        }
        self.world().touch();
    }

    fn set_phase(&self, uid: &str, phase: Phase) {
        if let Some(pod) = lock(&self.world().pods).get_mut(uid) {
            pod.phase = phase;
        }
        self.world().touch();
    }

    /// One pod.
    pub fn pod(&self, uid: &str) -> Option<Pod> {
        lock(&self.world().pods).get(uid).cloned()
    }

    /// All pods, by UID.
    pub fn pods(&self) -> BTreeMap<String, Pod> {
        lock(&self.world().pods).clone()
    }

    /// What a container was or would be started with; `None` where nothing is cached.
    pub fn view(&self, uid: &str, container: &str) -> Option<ContainerView> {
        self.life()?.view(uid, container)
    }

    /// The ids that a container holds of a resource.
    pub fn held(&self, uid: &str, container: &str, resource: &str) -> Ids {
        let life = self.life();
        life.and_then(|life| {
            let manager = lock(&life.manager);
            manager.held(uid, container, resource).map(Held::ids)
        })
        .unwrap_or_default()
    }

    /// `status.containerStatuses[].allocatedResourcesStatus`: a held device that is
    /// missing from the list is reported healthy.
    pub fn reported_health(&self, uid: &str, container: &str) -> BTreeMap<String, &'static str> {
        let mut health = BTreeMap::new();
        let Some(life) = self.life() else {
            return health;
        };
        let manager = lock(&life.manager);
        let resources = manager.pod_devices.get(uid).and_then(|c| c.get(container));
        for (resource, held) in resources.into_iter().flatten() {
            for id in held.ids() {
                let device = manager.all.get(resource).and_then(|all| all.get(&id));
                let bad = device.is_some_and(|d| d.health != HEALTHY);
                health.insert(id, if bad { UNHEALTHY } else { HEALTHY });
            }
        }
        health
    }
}
