//! Evicts the pods of a GPU whose drain has `evict`, by the eviction API, and deletes them at the deadline if the
//! drain's order requests that. The next request is the kernel's plan on the newest snapshot, so that an uncordon ends
//! the evictions at once; each outcome is recorded in the ledger.

use super::client;
use super::settings::Settings;
use berth_core::KernelHandle;
use berth_core::keeper::Snapshot;
use berth_kernel::drain::eviction::{EvictionMethod, EvictionOutcome, EvictionRequest};
use berth_kernel::drain::eviction_plan::{due_requests, is_being_evicted};
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kube::{ANSWER_MAX, error_chain};
use berth_observe::spans;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions};
use kube::api::{DeleteParams, PostParams};
use kube::core::Status;
use kube::{Api, Client};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::sync::{OnceCell, watch};
use tokio::time::{Instant, sleep, timeout};
use tracing::Instrument;

/// How often the plan is computed again during a drain: its deadlines and waits are of seconds.
const PLAN_INTERVAL: Duration = Duration::from_secs(1);
/// The cause in the status where a disruption budget forbids an eviction (policy/v1: `DisruptionBudgetCause`).
const BUDGET: &str = "DisruptionBudget";

/// Carries out the kernel's eviction plan; never returns. One request at a time: a node has tens of such pods at most,
/// and the API server answers within milliseconds.
pub(super) async fn keep(settings: &Settings, client: Client, kernel: &KernelHandle) {
    let mut snapshots = kernel.watch();
    // GPUs whose held devices are Unhealthy in the list that the kubelet has received.
    let mut listed = BTreeSet::new();
    loop {
        let drains = gpus_with_eviction(&snapshots.borrow_and_update());
        if drains.is_empty() {
            listed.clear();
            if snapshots.changed().await.is_err() {
                return std::future::pending().await;
            }
            continue;
        }
        if !drains.is_subset(&listed) {
            sleep(settings.eviction_delay).await;
        }
        listed = drains;
        // The wait comes before the plan, which may change meanwhile.
        sleep(settings.connection.retry_after.delay(Duration::ZERO, Instant::now())).await;
        let next =
            due_requests(&kernel.snapshot(), kernel.now()).into_iter().find(|ask| listed.contains(&ask.gpu));
        match next {
            Some(ask) => carry_out(&client, kernel, &ask, &mut snapshots).await,
            None => drop(timeout(PLAN_INTERVAL, snapshots.changed()).await),
        }
    }
}

/// GPUs whose drain evicts their pods.
fn gpus_with_eviction(ledger: &Ledger) -> BTreeSet<GpuId> {
    ledger.gpus.iter().filter(|(_, state)| state.marks.evicts()).map(|(gpu, _)| gpu.clone()).collect()
}

/// Sends one eviction or deletion, logs its outcome and records it in the ledger.
async fn carry_out(
    client: &Client,
    kernel: &KernelHandle,
    ask: &EvictionRequest,
    snapshots: &mut watch::Receiver<Snapshot>,
) {
    let (pod, delete) = (&ask.pod, ask.method == EvictionMethod::Delete);
    let span = spans::evict(delete, &pod.namespace, &pod.name, &pod.uid, &ask.gpu);
    let outcome = tokio::select! {
        answered = timeout(ANSWER_MAX, Box::pin(send(client, ask)).instrument(span.clone())) => match answered {
            Ok(answered) => outcome(ask.method, answered),
            Err(_) => EvictionOutcome::Failed(format!("the API server did not answer within {} s", ANSWER_MAX.as_secs())),
        },
        () = until_unwanted(ask, snapshots) => return,
    };
    spans::ended(
        &span,
        match outcome {
            EvictionOutcome::Accepted => "taken",
            EvictionOutcome::Gone => "gone",
            EvictionOutcome::Budget(_) => "budget",
            EvictionOutcome::Failed(_) => "failed",
        },
    );
    log_outcome(&kernel.snapshot(), ask, &outcome);
    let command = Command::RecordEviction { ask: ask.clone(), outcome };
    if let Err(error) = kernel.execute(command).await {
        tracing::warn!(%error, "the result of an eviction could not be recorded; it is tried again");
        // Without the outcome the next plan is the same.
        sleep(PLAN_INTERVAL).await;
    }
}

/// Returns once the ledger no longer wants the pod evicted.
async fn until_unwanted(ask: &EvictionRequest, snapshots: &mut watch::Receiver<Snapshot>) {
    while is_being_evicted(&snapshots.borrow_and_update(), &ask.pod.uid) {
        if snapshots.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

async fn send(client: &Client, ask: &EvictionRequest) -> Result<(), kube::Error> {
    match ask.method {
        EvictionMethod::Evict => evict(client, &ask.pod, None).await,
        EvictionMethod::Delete => {
            let pods: Api<Pod> = Api::namespaced(client.clone(), &ask.pod.namespace);
            // Without a grace period here, the pod's own applies.
            let uid = Some(ask.pod.uid.clone());
            let preconditions = Some(kube::api::Preconditions { uid, resource_version: None });
            pods.delete(&ask.pod.name, &DeleteParams { preconditions, ..DeleteParams::default() })
                .await
                .map(drop)
        }
    }
}

/// Requests the eviction of a pod; with `dry_run` (`All`) the API server only checks it.
async fn evict(
    client: &Client,
    pod: &berth_kernel::evidence::pods::Pod,
    dry_run: Option<Vec<String>>,
) -> Result<(), kube::Error> {
    let preconditions = Some(Preconditions { uid: Some(pod.uid.clone()), resource_version: None });
    let eviction = Eviction {
        metadata: ObjectMeta {
            name: Some(pod.name.clone()),
            namespace: Some(pod.namespace.clone()),
            ..ObjectMeta::default()
        },
        delete_options: Some(DeleteOptions { preconditions, dry_run, ..DeleteOptions::default() }),
    };
    let (name, pods): (_, Api<Pod>) = (&pod.name, Api::namespaced(client.clone(), &pod.namespace));
    // Not `Api::evict`: it writes the field as `delete_options`, which the API server does not know, and so
    // ignores, together with the precondition (kube 5.0).
    let sent = pods.create_subresource("eviction", name, &PostParams::default(), &eviction).await;
    sent.map(|_: serde_json::Value| ())
}

/// Asks the API server whether it would evict pods. It connects with the first question.
pub struct EvictionCheck {
    settings: Settings,
    client: OnceCell<Client>,
}

impl EvictionCheck {
    /// Nothing is sent yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self { settings, client: OnceCell::new() }
    }

    /// The outcome of the eviction of this pod if it were requested now. Nothing is evicted.
    pub async fn outcome(&self, pod: &berth_kernel::evidence::pods::Pod) -> EvictionOutcome {
        let client = match self.client.get_or_try_init(|| client::connect(&self.settings)).await {
            Ok(client) => client,
            Err(error) => return EvictionOutcome::Failed(error_chain(&error)),
        };
        let dry_run = Some(vec!["All".to_owned()]);
        match timeout(ANSWER_MAX, evict(client, pod, dry_run)).await {
            Ok(answered) => outcome(EvictionMethod::Evict, answered),
            Err(_) => EvictionOutcome::Failed(format!(
                "the API server did not answer within {} s",
                ANSWER_MAX.as_secs()
            )),
        }
    }
}

/// The outcome of an eviction or deletion, by its response.
fn outcome(method: EvictionMethod, response: Result<(), kube::Error>) -> EvictionOutcome {
    let status = match response {
        Ok(()) => return EvictionOutcome::Accepted,
        Err(kube::Error::Api(status)) => status,
        Err(error) => return EvictionOutcome::Failed(error_chain(&error)),
    };
    match status.code {
        // 409: another pod now has this name, or another client changes the disruption budget at this moment.
        404 | 409 => EvictionOutcome::Gone,
        429 => outcome_of_429(&status),
        403 => {
            let right = match method {
                EvictionMethod::Evict => "create pods/eviction; ClusterRole berth-evict",
                EvictionMethod::Delete => "delete pods; ClusterRole berth-delete",
            };
            EvictionOutcome::Failed(format!(
                "{} (the daemon needs: {right}, see deploy/cluster-role.yaml)",
                status.message
            ))
        }
        _ => EvictionOutcome::Failed(status.message.clone()),
    }
}

/// 429 is the status of a disruption budget, and of an overloaded API server.
fn outcome_of_429(status: &Status) -> EvictionOutcome {
    let causes = status.details.iter().flat_map(|d| &d.causes).filter(|cause| cause.reason == BUDGET);
    let causes: Vec<&str> = causes.map(|cause| cause.message.as_str()).collect();
    match causes.as_slice() {
        [] if status.message.contains("disruption budget") => EvictionOutcome::Budget(status.message.clone()),
        [] => EvictionOutcome::Failed(status.message.clone()),
        causes => EvictionOutcome::Budget(causes.join("; ")),
    }
}

/// Logs the outcome unless the ledger has the same one already.
fn log_outcome(ledger: &Ledger, ask: &EvictionRequest, outcome: &EvictionOutcome) {
    let known = ledger.evictions.get(&ask.pod.uid);
    if known.is_some_and(|known| known.request.method == ask.method && known.outcome == *outcome) {
        return;
    }
    let (pod, gpu) = (format!("{}/{}", ask.pod.namespace, ask.pod.name), &ask.gpu);
    match (outcome, ask.method) {
        (EvictionOutcome::Accepted, EvictionMethod::Evict) => {
            tracing::info!(pod, %gpu, "a pod was evicted from a GPU that is being drained");
        }
        (EvictionOutcome::Accepted, EvictionMethod::Delete) => {
            tracing::info!(pod, %gpu, "a pod was deleted at the deadline of a GPU's drain");
        }
        (EvictionOutcome::Gone, _) => tracing::info!(pod, %gpu, "a pod has left a GPU that is being drained"),
        (EvictionOutcome::Budget(why), _) => {
            tracing::info!(pod, %gpu, why, "a disruption budget keeps a pod on a GPU that is being drained");
        }
        (EvictionOutcome::Failed(why), _) => {
            tracing::warn!(pod, %gpu, why, "a pod could not be evicted from a GPU that is being drained");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::response::{StatusCause, StatusDetails};

    fn answer(code: u16, message: &str, cause: Option<(&str, &str)>) -> Result<(), kube::Error> {
        let causes = cause.map(|(reason, message)| StatusCause {
            reason: reason.into(),
            message: message.into(),
            field: String::new(),
        });
        let details = StatusDetails {
            causes: causes.into_iter().collect(),
            name: String::new(),
            group: String::new(),
            kind: String::new(),
            uid: String::new(),
            retry_after_seconds: 0,
        };
        let status = Status::failure(message, "Test").with_code(code).with_details(details);
        Err(kube::Error::Api(status.boxed()))
    }

    #[test]
    fn an_outcome_distinguishes_a_budget_a_busy_server_a_gone_pod_and_a_missing_right() {
        let needs = "The disruption budget web needs 3 healthy pods and has 3 currently";
        let violates = "Cannot evict pod as it would violate the pod's disruption budget.";
        let table = [
            (Ok(()), EvictionOutcome::Accepted),
            (answer(404, "", None), EvictionOutcome::Gone),
            (answer(409, "", None), EvictionOutcome::Gone),
            (answer(429, violates, Some((BUDGET, needs))), EvictionOutcome::Budget(needs.into())),
            (answer(429, violates, None), EvictionOutcome::Budget(violates.into())),
            (answer(429, "too many requests", None), EvictionOutcome::Failed("too many requests".into())),
            (
                answer(500, "more than one budget", None),
                EvictionOutcome::Failed("more than one budget".into()),
            ),
        ];
        for (answered, expected) in table {
            assert_eq!(outcome(EvictionMethod::Evict, answered), expected);
        }
        for (way, right) in
            [(EvictionMethod::Evict, "create pods/eviction"), (EvictionMethod::Delete, "delete pods")]
        {
            let EvictionOutcome::Failed(why) = outcome(way, answer(403, "no", None)) else { panic!() };
            assert!(why.contains(right), "{why}");
        }
    }
}
