//! Resolves the tags of stacks, one SharingPolicy at a time.

use crate::plan::Resolution;
use crate::revision::{ResolvedReference, entries};
use crate::sharing_policy::{RESOLVE, SharingPolicy};
use berth_kube::{Backoff, random};
use berth_oci::{Puller, Reference};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// The first wait before tags that could not be resolved are tried again.
const RETRY_FIRST: Duration = Duration::from_secs(5);

/// What the tags of the SharingPolicies stand for.
pub(super) struct Resolver {
    puller: Puller,
    known: BTreeMap<String, Resolution>,
    /// When those that have failed are tried again.
    retries: BTreeMap<String, (Instant, Backoff)>,
    work: JoinSet<(String, Resolution)>,
}

impl Resolver {
    pub(super) fn new(puller: Puller) -> Self {
        Self { puller, known: BTreeMap::new(), retries: BTreeMap::new(), work: JoinSet::new() }
    }

    /// What is known, by the name of the SharingPolicy.
    pub(super) fn known(&self) -> &BTreeMap<String, Resolution> {
        &self.known
    }

    /// Begins with one of these, or with one that has failed and whose wait has ended.
    pub(super) fn begin(&mut self, unresolved: &[String], policies: &BTreeMap<String, SharingPolicy>) {
        self.known.retain(|name, _| policies.contains_key(name));
        self.retries.retain(|name, _| policies.contains_key(name));
        if !self.work.is_empty() {
            return;
        }
        let now = Instant::now();
        let due = self.retries.iter().find(|(_, (at, _))| *at <= now).map(|(name, _)| name.clone());
        let Some((name, policy)) = unresolved
            .first()
            .cloned()
            .or(due)
            .and_then(|name| policies.get(&name).map(|policy| (name, policy)))
        else {
            return;
        };
        let (puller, policy) = (self.puller.clone(), policy.clone());
        self.work.spawn_blocking(move || (name, resolve(&puller, &policy)));
    }

    /// Waits until one is done.
    pub(super) async fn done(&mut self) {
        let Some(Ok((name, resolution))) = self.work.join_next().await else {
            return std::future::pending().await;
        };
        match &resolution.entries {
            Ok(_) => {
                self.retries.remove(&name);
            }
            Err(why) => {
                tracing::warn!(policy = name, why, "the stack of a SharingPolicy cannot be resolved");
                let mut backoff = self
                    .retries
                    .remove(&name)
                    .map_or_else(|| Backoff::new(RETRY_FIRST), |(_, backoff)| backoff);
                self.retries.insert(name.clone(), (Instant::now() + backoff.next(random()), backoff));
            }
        }
        self.known.insert(name, resolution);
    }
}

fn resolve(puller: &Puller, policy: &SharingPolicy) -> Resolution {
    let annotations = policy.metadata.annotations.as_ref();
    let asked = annotations.and_then(|annotations| annotations.get(RESOLVE).cloned());
    let mut references = BTreeMap::new();
    let mut failure = None;
    for text in policy.spec.stack.iter().filter_map(|entry| entry.reference.clone()) {
        match source(puller, &text) {
            Ok(found) => {
                references.insert(text, found);
            }
            Err(why) => {
                failure.get_or_insert(format!("{text}: {why}"));
            }
        }
    }
    let entries = failure.map_or_else(|| entries(&policy.spec.stack, &references), Err);
    Resolution { of: (policy.metadata.generation.unwrap_or(0), asked), entries }
}

fn source(puller: &Puller, text: &str) -> Result<ResolvedReference, String> {
    let reference: Reference = text.parse()?;
    let source = puller.resolve(&reference).map_err(|error| error.to_string())?;
    Ok(ResolvedReference {
        repository: source.repository.to_string(),
        manifest: format!("sha256:{}", source.manifest),
        layer: format!("sha256:{}", source.layer),
    })
}
