//! Values that a shell completes by asking the daemon: GPUs, policies, allocations, namespaces, revisions and shadows.
//! Without an answer there are none; nothing is printed, since it would be printed into the line that is being typed.

use crate::client::Client;
use crate::endpoint::ClientArgs;
use crate::names::{name_with_digest, pod_name, scheduling};
use berth_api::{ActivationList, AllocationList, EventKind, GpuList, PolicyList, ShadowList};
use clap::{Args, Command, FromArgMatches};
use clap_complete::engine::CompletionCandidate;
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::time::Duration;

/// Longest wait for the daemon: a person waits for the next key.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// The flags of the connection that take a value.
const FLAGS: [&str; 5] = ["--server", "--token-file", "--ca-file", "--client-cert", "--client-key"];

/// Indices of GPUs; their UUIDs once one was begun.
pub(crate) fn gpus() -> Vec<CompletionCandidate> {
    let gpus = ask::<GpuList>("/gpus").map(|list| list.items).unwrap_or_default();
    let each = |gpu: &berth_api::GpuSummary| {
        let state = format!("{}, {}", gpu.health.state, scheduling(&gpu.drain.state));
        let uuid = CompletionCandidate::new(&gpu.uuid).help(Some(state.clone().into())).hide(true);
        [CompletionCandidate::new(gpu.index.to_string()).help(Some(state.into())), uuid]
    };
    gpus.iter().flat_map(each).collect()
}

/// Names of policies; with a digest where several versions have the name, or once `@` was typed.
pub(crate) fn policies() -> Vec<CompletionCandidate> {
    let policies = ask::<PolicyList>("/policies").map(|list| list.items).unwrap_or_default();
    let each = |policy: &berth_api::Policy| {
        let several = policies.iter().filter(|other| other.name == policy.name).count() > 1;
        let about = || Some(policy.summary.clone().into());
        let version = CompletionCandidate::new(name_with_digest(policy)).help(about()).hide(!several);
        [CompletionCandidate::new(&policy.name).help(about()).hide(several), version]
    };
    policies.iter().flat_map(each).collect()
}

/// Ids of live allocations, with their pods.
pub(crate) fn allocations() -> Vec<CompletionCandidate> {
    let allocations =
        ask::<AllocationList>("/allocations?limit=1000").map(|list| list.items).unwrap_or_default();
    let each = |allocation: &berth_api::Allocation| {
        CompletionCandidate::new(&allocation.id).help(Some(pod_name(allocation.holder.as_ref()).into()))
    };
    allocations.iter().map(each).collect()
}

/// Namespaces of the pods that hold GPUs.
pub(crate) fn namespaces() -> Vec<CompletionCandidate> {
    let allocations =
        ask::<AllocationList>("/allocations?limit=1000").map(|list| list.items).unwrap_or_default();
    let holders = allocations.into_iter().filter_map(|allocation| allocation.holder?.namespace);
    holders.collect::<BTreeSet<_>>().into_iter().map(CompletionCandidate::new).collect()
}

/// Revisions of the stack, newest first, with their policies.
pub(crate) fn revisions() -> Vec<CompletionCandidate> {
    let activations = ask::<ActivationList>("/stack/history").map(|list| list.items).unwrap_or_default();
    let each = |activation: &berth_api::Activation| {
        let names: Vec<_> = activation.entries.iter().map(|entry| entry.policy.as_str()).collect();
        let about = format!("{}: {}", activation.source, names.join(", "));
        CompletionCandidate::new(activation.revision.to_string()).help(Some(about.into()))
    };
    activations.iter().map(each).collect()
}

/// Numbers of shadows, with their policies.
pub(crate) fn shadows() -> Vec<CompletionCandidate> {
    let shadows = ask::<ShadowList>("/shadows").map(|list| list.items).unwrap_or_default();
    let each = |shadow: &berth_api::Shadow| {
        CompletionCandidate::new(shadow.id.to_string()).help(Some(shadow.policy.clone().into()))
    };
    shadows.iter().map(each).collect()
}

/// Kinds of events.
pub(crate) fn kinds() -> Vec<CompletionCandidate> {
    EventKind::NAMES.iter().map(CompletionCandidate::new).collect()
}

fn ask<T: DeserializeOwned>(path: &str) -> Option<T> {
    let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    Client::new(&connection(words)?).ok()?.get_within(path, ANSWER_MAX).ok()
}

/// The connection that the line so far describes, and the environment.
fn connection(words: impl Iterator<Item = String>) -> Option<ClientArgs> {
    let mut words = words.skip(1);
    let mut given = vec!["berth".to_owned()];
    while let Some(word) = words.next() {
        let is_complete = word.contains('=');
        if FLAGS.contains(&word.split('=').next().unwrap_or_default()) {
            given.push(word);
            if !is_complete {
                given.extend(words.next());
            }
        } else if word == "--allow-plain-http" {
            given.push(word);
        }
    }
    let matches = ClientArgs::augment_args(Command::new("berth")).try_get_matches_from(given).ok()?;
    ClientArgs::from_arg_matches(&matches).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connection_is_that_of_the_line() {
        let line = "berth -- berth gpu --server http://x cordon --reason --token-file=/t --allow-plain-http";
        let found = connection(line.split(' ').map(str::to_owned)).unwrap();
        assert_eq!((found.server.as_str(), found.token_file.unwrap().to_str().unwrap()), ("http://x", "/t"));
        assert!(found.allow_plain_http);
    }
}
