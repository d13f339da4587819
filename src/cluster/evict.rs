//! Asks the holders of a GPU that is emptied with `evict` to leave. What to ask next is the kernel's
//! plan on the newest snapshot, so that an uncordon ends it at once; what came of it goes back
//! into the ledger.

use super::Settings;
use super::client::{ANSWER_MAX, words};
use berth_core::admission::Door;
use berth_core::keeper::Snapshot;
use berth_core::spans;
use berth_kernel::evict::{Ask, Outcome, Way, asks, is_wanted};
use berth_kernel::ledger::Ledger;
use berth_kernel::names::PartId;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions};
use kube::api::{DeleteParams, PostParams};
use kube::core::Status;
use kube::{Api, Client};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::Instrument;

/// How often deadlines and waits are looked at while a GPU is emptied; both are of seconds.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The cause that the API server gives where a disruption budget forbids an eviction
/// (policy/v1: `DisruptionBudgetCause`).
const BUDGET: &str = "DisruptionBudget";

/// Asks for ever, one pod at a time: what is asked is tens of pods at most, and the API server
/// answers within milliseconds.
pub(super) async fn keep(settings: &Settings, client: Client, door: &Door) {
    let mut snapshots = door.watch();
    // GPUs whose held devices the kubelet has heard to be Unhealthy.
    let mut heard = BTreeSet::new();
    loop {
        let drains = evicting(&snapshots.borrow_and_update());
        if drains.is_empty() {
            heard.clear();
            if snapshots.changed().await.is_err() {
                return std::future::pending().await;
            }
            continue;
        }
        if !drains.is_subset(&heard) {
            sleep(settings.listed).await;
        }
        heard = drains;
        // Before it is known whom to ask: that may change meanwhile.
        sleep(settings.retry_after.delay(Duration::ZERO, Instant::now())).await;
        let next = asks(&door.snapshot(), door.now()).into_iter().find(|ask| heard.contains(&ask.gpu));
        match next {
            Some(ask) => put(&client, door, &ask, &mut snapshots).await,
            None => drop(timeout(LOOK_EVERY, snapshots.changed()).await),
        }
    }
}

/// GPUs whose holders are asked to leave.
fn evicting(ledger: &Ledger) -> BTreeSet<PartId> {
    ledger.gpus.iter().filter(|(_, state)| state.drain.evicts()).map(|(gpu, _)| gpu.clone()).collect()
}

/// Asks once, and hands in what came of it.
async fn put(client: &Client, door: &Door, ask: &Ask, snapshots: &mut watch::Receiver<Snapshot>) {
    let (pod, delete) = (&ask.pod, ask.way == Way::Delete);
    let span = spans::evict(delete, &pod.namespace, &pod.name, &pod.uid, &ask.gpu);
    let outcome = tokio::select! {
        answered = timeout(ANSWER_MAX, Box::pin(send(client, ask)).instrument(span.clone())) => match answered {
            Ok(answered) => outcome(ask.way, answered),
            Err(_) => Outcome::Failed(format!("the API server did not answer within {} s", ANSWER_MAX.as_secs())),
        },
        () = called_off(ask, snapshots) => return,
    };
    spans::ended(
        &span,
        match outcome {
            Outcome::Taken => "taken",
            Outcome::Gone => "gone",
            Outcome::Budget(_) => "budget",
            Outcome::Failed(_) => "failed",
        },
    );
    say(&door.snapshot(), ask, &outcome);
    if let Err(error) = door.asked(ask.clone(), outcome).await {
        tracing::warn!(%error, "the result of an eviction could not be recorded; it is tried again");
        // Without it the next plan is the same.
        sleep(LOOK_EVERY).await;
    }
}

/// Returns once nobody wants the pod away any more.
async fn called_off(ask: &Ask, snapshots: &mut watch::Receiver<Snapshot>) {
    while is_wanted(&snapshots.borrow_and_update(), &ask.pod.uid) {
        if snapshots.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

async fn send(client: &Client, ask: &Ask) -> Result<(), kube::Error> {
    let (name, uid) = (&ask.pod.name, Some(ask.pod.uid.clone()));
    let pods: Api<Pod> = Api::namespaced(client.clone(), &ask.pod.namespace);
    match ask.way {
        Way::Evict => {
            let preconditions = Some(Preconditions { uid, resource_version: None });
            let eviction = Eviction {
                metadata: ObjectMeta {
                    name: Some(name.clone()),
                    namespace: Some(ask.pod.namespace.clone()),
                    ..ObjectMeta::default()
                },
                delete_options: Some(DeleteOptions { preconditions, ..DeleteOptions::default() }),
            };
            // Not `Api::evict`: it writes `delete_options`, which the API server does not know and
            // ignores, and the precondition with it (kube 5.0).
            let sent = pods.create_subresource("eviction", name, &PostParams::default(), &eviction).await;
            sent.map(|_: serde_json::Value| ())
        }
        Way::Delete => {
            // The pod's own grace period: none is given here.
            let preconditions = Some(kube::api::Preconditions { uid, resource_version: None });
            pods.delete(name, &DeleteParams { preconditions, ..DeleteParams::default() }).await.map(drop)
        }
    }
}

/// What an answer means.
fn outcome(way: Way, answered: Result<(), kube::Error>) -> Outcome {
    let status = match answered {
        Ok(()) => return Outcome::Taken,
        Err(kube::Error::Api(status)) => status,
        Err(error) => return Outcome::Failed(words(&error)),
    };
    match status.code {
        // 409: another pod has its name, or somebody else changes its budget this very moment.
        404 | 409 => Outcome::Gone,
        429 => budget(&status),
        403 => {
            let right = match way {
                Way::Evict => "create pods/eviction; ClusterRole berth-evict",
                Way::Delete => "delete pods; ClusterRole berth-delete",
            };
            Outcome::Failed(format!(
                "{} (the daemon needs: {right}, see deploy/cluster-role.yaml)",
                status.message
            ))
        }
        _ => Outcome::Failed(status.message.clone()),
    }
}

/// An API server that has too much to do answers with the same code as a disruption budget.
fn budget(status: &Status) -> Outcome {
    let causes = status.details.iter().flat_map(|d| &d.causes).filter(|cause| cause.reason == BUDGET);
    let causes: Vec<&str> = causes.map(|cause| cause.message.as_str()).collect();
    match causes.as_slice() {
        [] if status.message.contains("disruption budget") => Outcome::Budget(status.message.clone()),
        [] => Outcome::Failed(status.message.clone()),
        causes => Outcome::Budget(causes.join("; ")),
    }
}

/// Logs what is news.
fn say(ledger: &Ledger, ask: &Ask, outcome: &Outcome) {
    let known = ledger.evictions.get(&ask.pod.uid);
    if known.is_some_and(|known| known.ask.way == ask.way && known.outcome == *outcome) {
        return;
    }
    let (pod, gpu) = (format!("{}/{}", ask.pod.namespace, ask.pod.name), &ask.gpu);
    match (outcome, ask.way) {
        (Outcome::Taken, Way::Evict) => {
            tracing::info!(pod, %gpu, "a pod was evicted from a GPU that is drained");
        }
        (Outcome::Taken, Way::Delete) => {
            tracing::info!(pod, %gpu, "a pod was deleted at the deadline of a GPU's drain");
        }
        (Outcome::Gone, _) => tracing::info!(pod, %gpu, "a pod has left a GPU that is being drained"),
        (Outcome::Budget(why), _) => {
            tracing::info!(pod, %gpu, why, "a disruption budget keeps a pod on a GPU that is drained");
        }
        (Outcome::Failed(why), _) => {
            tracing::warn!(pod, %gpu, why, "a pod could not be asked to leave a GPU that is drained");
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
    fn a_budget_is_told_from_a_busy_server_and_a_gone_pod_from_a_lacking_right() {
        let needs = "The disruption budget web needs 3 healthy pods and has 3 currently";
        let violates = "Cannot evict pod as it would violate the pod's disruption budget.";
        let table = [
            (Ok(()), Outcome::Taken),
            (answer(404, "", None), Outcome::Gone),
            (answer(409, "", None), Outcome::Gone),
            (answer(429, violates, Some((BUDGET, needs))), Outcome::Budget(needs.into())),
            (answer(429, violates, None), Outcome::Budget(violates.into())),
            (answer(429, "too many requests", None), Outcome::Failed("too many requests".into())),
            (answer(500, "more than one budget", None), Outcome::Failed("more than one budget".into())),
        ];
        for (answered, means) in table {
            assert_eq!(outcome(Way::Evict, answered), means);
        }
        for (way, right) in [(Way::Evict, "create pods/eviction"), (Way::Delete, "delete pods")] {
            let Outcome::Failed(why) = outcome(way, answer(403, "no", None)) else { panic!() };
            assert!(why.contains(right), "{why}");
        }
    }
}
