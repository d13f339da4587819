//! Made-up pods, and what became of each.

use crate::Node;
use kubelet_standin::{AdmissionError, PodSpec};
use std::collections::BTreeMap;

/// The namespace of pods, unless the story names another.
pub(crate) const NAMESPACE: &str = "demo";

/// Pods that run, by name, and the count of what happened.
pub(crate) struct Workload {
    /// The namespace of the next pods.
    pub(crate) namespace: &'static str,
    running: BTreeMap<String, String>,
    pub(crate) pods: usize,
    pub(crate) refused_unexpectedly: usize,
}

impl Default for Workload {
    fn default() -> Self {
        Self { namespace: NAMESPACE, running: BTreeMap::new(), pods: 0, refused_unexpectedly: 0 }
    }
}

impl Workload {
    /// Starts a pod that the story expects to run.
    pub(crate) async fn start(&mut self, node: &Node, name: &str, resource: &str, count: usize) {
        match self.admit(node, name, resource, count).await {
            Ok(()) => node.screen.say(&format!("  + pod {name:<10} {count} x {resource}")),
            Err(error) => {
                self.refused_unexpectedly += 1;
                node.screen.say(&format!("  ! pod {name:<10} refused unexpectedly: {error}"));
            }
        }
    }

    /// Starts a pod that the story expects to be refused.
    pub(crate) async fn start_in_vain(&mut self, node: &Node, name: &str, resource: &str, count: usize) {
        match self.admit(node, name, resource, count).await {
            Ok(()) => {
                self.refused_unexpectedly += 1;
                node.screen.say(&format!(
                    "  ! pod {name:<10} was admitted, but {count} x {resource} should not be there"
                ));
            }
            Err(error) => node.screen.say(&format!("  - pod {name:<10} refused as it should be: {error}")),
        }
    }

    async fn admit(
        &mut self,
        node: &Node,
        name: &str,
        resource: &str,
        count: usize,
    ) -> Result<(), AdmissionError> {
        // The name without what tells it from its siblings.
        let app = name.split('-').next().unwrap_or(name);
        let pod =
            PodSpec::new(self.namespace, name).label("app", app).container("main", &[(resource, count)]);
        let uid = pod.uid.clone();
        self.pods += 1;
        node.kubelet.admit(pod).await?;
        node.kubelet.run(&uid).await?;
        self.running.insert(name.to_owned(), uid);
        Ok(())
    }

    /// A pod ends by itself.
    pub(crate) fn finish(&mut self, node: &Node, name: &str) {
        if let Some(uid) = self.running.remove(name) {
            node.kubelet.finish(&uid);
            node.kubelet.delete(&uid);
            node.screen.say(&format!("  x pod {name:<10} finished"));
        }
    }

    /// Names of the pods that run.
    pub(crate) fn names(&self) -> Vec<String> {
        self.running.keys().cloned().collect()
    }
}
