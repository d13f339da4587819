//! The stacks that alternate. All offer the same shares, so that no pod is refused for lack of
//! a device; what differs is who places and who must allow.

use crate::soak::Wrong;
use anyhow::Context;
use fakes::api::Api;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The stacks, and what their activations took.
pub(crate) struct Stacks {
    api: Api,
    wrong: Arc<Wrong>,
    stacks: Vec<Value>,
    label_sets: Vec<BTreeSet<String>>,
    done: u64,
    slowest: Duration,
}

impl Stacks {
    /// Finds out what the policies that allow are called.
    pub(crate) async fn new(api: Api, wrong: Arc<Wrong>, replicas: u16) -> anyhow::Result<Self> {
        let timeslice = json!({"policy": "timeslice", "parameters": {"replicas": replicas}});
        let generous = json!({"policy": "quota", "parameters": {"default": {"devices": 100_000}}});
        let apart = json!({"policy": "spread", "parameters": {"distinct": "required"}});
        let stacks = vec![
            json!([timeslice]),
            json!([{"policy": "binpack"}, timeslice]),
            json!([generous, timeslice]),
            json!([apart, timeslice]),
            json!([generous, apart, {"policy": "topology"}, timeslice]),
        ];
        let known = api.get("/policies").await?;
        let label = |name: &str| -> anyhow::Result<String> {
            let all = known["items"].as_array().context("no policies")?;
            let found =
                all.iter().find(|p| p["name"] == name).with_context(|| format!("no policy {name}"))?;
            let digest = found["digest"].as_str().and_then(|d| d.get(..12)).context("no digest")?;
            Ok(format!("{name}@{digest}"))
        };
        let quota = label("quota")?;
        // `spread` passes where it does not object, and no other entry has `admit`.
        let label_sets = [vec!["baseline".to_owned()], vec![quota]];
        let label_sets = label_sets.into_iter().map(|set| set.into_iter().collect()).collect();
        Ok(Self { api, wrong, stacks, label_sets, done: 0, slowest: Duration::ZERO })
    }

    /// Who may be behind a grant: one of these sets as a whole.
    pub(crate) fn label_sets(&self) -> Vec<BTreeSet<String>> {
        self.label_sets.clone()
    }

    /// Activates each once, so that what is measured compiles nothing: a node does that once in its life.
    pub(crate) async fn warm_up(&self) -> anyhow::Result<()> {
        for entries in &self.stacks {
            self.api.activate(entries.clone()).await?;
        }
        Ok(())
    }

    /// Activates the next stack, or goes back to the one before.
    pub(crate) async fn swap(&mut self, n: u64) {
        let began = Instant::now();
        let swapped = if n.is_multiple_of(3) { self.roll_back().await } else { self.activate(n).await };
        self.slowest = self.slowest.max(began.elapsed());
        match swapped {
            Ok(()) => self.done += 1,
            Err(error) => self.wrong.failed(&format!("activation {n}: {error:#}")),
        }
    }

    async fn activate(&self, n: u64) -> anyhow::Result<()> {
        let turn = usize::try_from(n).unwrap_or_default() % self.stacks.len();
        let entries = self.stacks[turn].clone();
        self.api.activate(entries.clone()).await?;
        self.expect(&entries).await
    }

    async fn roll_back(&self) -> anyhow::Result<()> {
        self.api.post("/stack/rollback", json!({})).await.map(drop)
    }

    /// There are no other activations, so it must be the requested one.
    async fn expect(&self, entries: &Value) -> anyhow::Result<()> {
        let names = |entries: &Value| -> Vec<Value> {
            entries.as_array().into_iter().flatten().map(|entry| entry["policy"].clone()).collect()
        };
        let active = self.api.get("/stack").await?;
        let (active, wanted) = (names(&active["entries"]), names(entries));
        if active != wanted {
            self.wrong.violated(&format!("{wanted:?} was activated, and {active:?} is active"));
        }
        Ok(())
    }

    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn slowest_ms(&self) -> u128 {
        self.slowest.as_millis()
    }
}
