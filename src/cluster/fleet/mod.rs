//! The daemon's half of the fleet: it activates the stack that the GPUNode of this node names, reports the node in the GPUNode, and
//! carries out the GPUMaintenances of this node.

mod gpu_node;
mod maintenance;
pub(super) mod node_stack;
mod policy_pull;

use super::settings::{FleetTask, Settings};
use berth_core::KernelHandle;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
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

/// A condition without its times.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ConditionContent {
    type_: &'static str,
    status: bool,
    reason: &'static str,
    message: String,
}

/// The conditions of an object. A condition whose status is that of `before` keeps its time.
fn conditions(
    contents: Vec<ConditionContent>,
    before: &[Condition],
    generation: Option<i64>,
    now: &Time,
) -> Vec<Condition> {
    let with_time = |ConditionContent { type_, status, reason, message }: ConditionContent| {
        let status = if status { "True" } else { "False" };
        // The condition of an object that no daemon has seen yet is as old as the epoch.
        let is_same = |known: &&Condition| {
            known.type_ == type_ && known.status == status && known.last_transition_time != time(0)
        };
        let known = before.iter().find(is_same);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            observed_generation: generation,
            last_transition_time: known
                .map_or_else(|| now.clone(), |known| known.last_transition_time.clone()),
        }
    };
    contents.into_iter().map(with_time).collect()
}

/// A time of the kernel, in whole seconds as Kubernetes has them.
fn time(wall_ms: u64) -> Time {
    let seconds = i64::try_from(wall_ms / 1000).unwrap_or(i64::MAX);
    Time(Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_keeps_its_time_but_not_that_of_an_object_that_no_daemon_has_seen() {
        let reconciling = |message: &str| ConditionContent {
            type_: "Reconciling",
            status: true,
            reason: "Draining",
            message: message.to_owned(),
        };
        let unseen = conditions(vec![reconciling("")], &[], Some(1), &time(0));
        let first = conditions(vec![reconciling("a")], &unseen, Some(1), &time(7_000));
        assert_eq!(first[0].last_transition_time, time(7_000));
        let later = conditions(vec![reconciling("b")], &first, Some(1), &time(9_000));
        assert_eq!((later[0].last_transition_time.clone(), later[0].message.as_str()), (time(7_000), "b"));
        let other = ConditionContent { status: false, ..reconciling("c") };
        assert_eq!(
            conditions(vec![other], &later, Some(1), &time(9_000))[0].last_transition_time,
            time(9_000)
        );
    }
}
