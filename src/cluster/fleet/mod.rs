//! The daemon's half of the fleet: it activates the stack that the GPUNode of this node names, reports the node in the GPUNode, and
//! carries out the GPUMaintenances of this node.

mod gpu_node;
mod maintenance;
pub(super) mod node_stack;
mod policy_pull;

use super::settings::{FleetTask, Settings};
use berth_core::KernelHandle;
use kube::Client;

/// What a 404 means.
const NO_KIND: &str = "the CustomResourceDefinitions of fleet.berth.dev are not installed: run `kubectl apply -f deploy/helm/berth/files/crds`";

/// Reports the node and carries out its maintenances; never returns.
pub(super) async fn keep(settings: &Settings, client: Client, kernel: &KernelHandle, task: &FleetTask) {
    tokio::join!(
        gpu_node::keep(settings, client.clone(), kernel, task),
        maintenance::keep(settings, client, kernel, task),
    );
}

/// What an error is about.
#[derive(Clone, Copy, Debug)]
enum ErrorSource {
    Stack,
    GpuNode,
    Watch,
    Status,
    Removal,
}

impl FleetTask {
    /// Sets or clears an error, and logs a new one.
    fn set_error(&self, source: ErrorSource, error: Option<String>) {
        self.state.send_if_modified(|state| {
            let (current, what) = match source {
                ErrorSource::Stack => {
                    (&mut state.stack_error, "changes of the stack that the GPUNode names are not seen")
                }
                ErrorSource::GpuNode => {
                    (&mut state.gpu_node_error, "the GPUNode of this node is not up to date")
                }
                ErrorSource::Watch => {
                    (&mut state.maintenances_error, "changes of GPUMaintenances are not seen")
                }
                ErrorSource::Removal => {
                    (&mut state.removal_error, "the marks of deleted GPUMaintenances are kept")
                }
                ErrorSource::Status => {
                    (&mut state.status_error, "the status of a GPUMaintenance is not up to date")
                }
            };
            let changed = *current != error;
            if changed {
                if let Some(why) = &error {
                    tracing::warn!(why, "{what}");
                }
                *current = error;
            }
            changed
        });
    }
}
