//! Applies DeviceTaintRules to GPUs that are granted through the device plugin API, which has no taints: while a rule selects
//! such a GPU, the GPU has a mark of the rule, a cordon.
//!
//! GPUs that are granted through DRA get no mark: the scheduler applies the rule to claims, which can tolerate its taint
//! (`resource.k8s.io/v1`, DeviceTaintRule).

use super::settings::{DraTask, Settings, TaintRulesState};
use berth_core::KernelHandle;
use berth_core::keeper::CommandError;
use berth_kernel::drain::marks::{Author, Mark, Owner, Owners};
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::publish::{device_name, shared_device_name};
use berth_kernel::sharing::via::KubeletApi;
use berth_kube::{Backoff, Cause, Event, REFRESH_MEAN, events, jittered, random};
use futures_util::StreamExt;
use k8s_openapi::api::resource::v1::{DeviceTaint, DeviceTaintRule, DeviceTaintSelector};
use kube::{Api, Client};
use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// What is watched, for errors.
const RULES: &str = "the DeviceTaintRules";
/// The right that the watch needs, for the message of a 403.
const RIGHT: &str = "list and watch devicetaintrules (ClusterRole berth-dra)";
/// The time between two attempts to make the same changes of marks.
const RETRY: Duration = Duration::from_secs(10);

/// Sets and removes the marks of rules; never returns.
pub(super) async fn keep(settings: &Settings, client: Client, kernel: &KernelHandle, task: &DraTask) {
    let rules: Api<DeviceTaintRule> = Api::all(client);
    let mut stream = Box::pin(events(&settings.connection, RULES, rules, None, |rule| Some(rule.clone())));
    let mut snapshots = kernel.watch();
    let mut known = KnownRules::new(task.driver.clone(), settings.node.clone());
    let mut updater = MarkUpdater { failed: Vec::new(), retry_from: Instant::now(), error: None };
    let mut backoff = Backoff::new(settings.connection.retry_interval);
    let mut watch_from = Instant::now();
    // Set after each failure of the watch, until it succeeds.
    let mut watch_failure = task.taint_rules.borrow().error.clone();
    loop {
        let ledger = snapshots.borrow_and_update().clone();
        updater.update(known.changes(&ledger), kernel).await;
        let watch_error = if known.is_absent { kept_marks(&ledger) } else { watch_failure.clone() };
        task.set_rules(known.owners(&ledger), updater.error.clone().or(watch_error));
        let next_event = async {
            sleep_until(watch_from).await;
            stream.next().await
        };
        let retry = async {
            if updater.failed.is_empty() {
                pending::<()>().await;
            }
            sleep_until(updater.retry_from).await;
        };
        let event = tokio::select! {
            event = next_event => event,
            changed = snapshots.changed() => {
                if changed.is_err() {
                    return pending().await;
                }
                sleep(settings.batch_window).await;
                continue;
            }
            () = retry => continue,
        };
        match event {
            Some(Ok(event)) => {
                known.apply(event);
                if known.is_current {
                    backoff.reset();
                    watch_failure = None;
                }
            }
            Some(Err(error)) => {
                let was_open = std::mem::replace(&mut known.is_current, false);
                watch_from =
                    error.retry_at(&settings.connection, &mut backoff, was_open, settings.reconnect_wait_max);
                if error.cause.code() == 404 {
                    if known.is_absent {
                        // An API server before Kubernetes 1.37 gives this answer until it is upgraded.
                        watch_from = Instant::now() + jittered(REFRESH_MEAN, random());
                    }
                    known.forget();
                } else if !matches!(error.cause, Cause::Expired) {
                    known.is_absent = false;
                    watch_failure = Some(error.text(RIGHT, "the API server does not serve them"));
                }
            }
            None => return pending().await,
        }
    }
}

/// The error of a node whose API server has no DeviceTaintRules; `None` if no GPU has a mark of one.
fn kept_marks(ledger: &Ledger) -> Option<String> {
    let removal =
        |(gpu, owner, _): (&GpuId, &Owner, &Mark)| format!("`berth gpu uncordon {gpu} --owner {owner}`");
    let removals: Vec<String> = marks_of_rules(ledger).map(removal).collect();
    (!removals.is_empty()).then(|| {
        format!(
            "the API server has no DeviceTaintRules, which Kubernetes has from 1.37, so the marks of earlier ones are kept: to remove \
             them, run {}",
            removals.join(" and ")
        )
    })
}

/// The marks of DeviceTaintRules that GPUs have.
pub fn marks_of_rules(ledger: &Ledger) -> impl Iterator<Item = (&GpuId, &Owner, &Mark)> {
    let marks = ledger
        .gpus
        .iter()
        .flat_map(|(gpu, state)| state.marks.by_owner.iter().map(move |(owner, mark)| (gpu, owner, mark)));
    marks.filter(|(_, owner, _)| owner.is_taint_rule())
}

impl DraTask {
    /// Reports the rules, and logs a new error.
    fn set_rules(&self, owners: BTreeSet<String>, error: Option<String>) {
        self.taint_rules.send_if_modified(|state| {
            if *state.owners == owners && state.error == error {
                return false;
            }
            if let Some(why) = error.as_ref().filter(|_| state.error != error) {
                tracing::warn!(why, "the marks of DeviceTaintRules may not be up to date");
            }
            *state = TaintRulesState { owners: Arc::new(owners), error };
            true
        });
    }
}

/// Makes changes of marks.
struct MarkUpdater {
    /// The changes that the last attempt could not make.
    failed: Vec<Command>,
    /// When the same changes are tried again; other changes are tried at once.
    retry_from: Instant,
    /// The first error of the last attempt.
    error: Option<String>,
}

impl MarkUpdater {
    async fn update(&mut self, changes: Vec<Command>, kernel: &KernelHandle) {
        if changes == self.failed && Instant::now() < self.retry_from {
            return;
        }
        (self.failed, self.error) = (Vec::new(), None);
        let mut changes = changes.into_iter();
        for command in changes.by_ref() {
            let what = match &command {
                Command::Cordon { gpu, author } => format!("{} cordons {gpu}", author.by),
                Command::Uncordon { gpu, .. } => format!("the mark of a DeviceTaintRule on {gpu} is removed"),
                _ => String::new(),
            };
            let Err(error) = kernel.execute(command.clone()).await else {
                tracing::info!("{what}");
                continue;
            };
            self.error.get_or_insert_with(|| format!("{what}: this failed: {error}"));
            self.failed.push(command);
            if !matches!(error, CommandError::Refused(_)) {
                // The keeper has failed, and each further command could take seconds.
                break;
            }
        }
        self.failed.extend(changes);
        self.retry_from = Instant::now() + RETRY;
    }
}

/// The rules that can select devices of this node, as the API server has shown them.
struct KnownRules {
    driver: String,
    pool: String,
    rules: BTreeMap<Owner, Rule>,
    /// Whether there was a complete list.
    is_complete: bool,
    /// Whether changes are seen.
    is_current: bool,
    /// Whether the API server has no such kind.
    is_absent: bool,
}

/// A rule that keeps pods from devices.
struct Rule {
    name: String,
    /// The one device that it selects; `None` if it selects all.
    device: Option<String>,
    taint: String,
}

impl KnownRules {
    fn new(driver: String, pool: String) -> Self {
        Self { driver, pool, rules: BTreeMap::new(), is_complete: false, is_current: false, is_absent: false }
    }

    /// Forgets all rules, since the API server has no such kind. Their marks stay.
    fn forget(&mut self) {
        self.rules.clear();
        (self.is_complete, self.is_current, self.is_absent) = (false, false, true);
    }

    fn apply(&mut self, event: Event<DeviceTaintRule>) {
        match event {
            Event::Listing => {}
            Event::Opened => self.is_current = self.is_complete,
            Event::Listed(rules) => {
                self.rules.clear();
                rules.into_iter().for_each(|rule| self.insert(rule));
                (self.is_complete, self.is_current, self.is_absent) = (true, true, false);
            }
            Event::Applied(rule) => self.insert(rule),
            Event::Deleted(rule) => {
                if let Some(owner) = owner(&rule) {
                    self.rules.remove(&owner);
                }
            }
        }
    }

    /// Replaces what is known of the rule.
    fn insert(&mut self, rule: DeviceTaintRule) {
        let Some(owner) = owner(&rule) else { return };
        self.rules.remove(&owner);
        let Some(selector) = rule.spec.device_selector else { return };
        let DeviceTaintSelector { device, driver, pool } = selector;
        let is_ours =
            driver.is_none_or(|driver| driver == self.driver) && pool.is_none_or(|pool| pool == self.pool);
        // Unknown effects are to be treated as `None` (`resource.k8s.io/v1`, DeviceTaint).
        if !is_ours || !matches!(rule.spec.taint.effect.as_str(), "NoSchedule" | "NoExecute") {
            return;
        }
        let name = rule.metadata.name.unwrap_or_default();
        self.rules.insert(owner, Rule { name, device, taint: taint_text(&rule.spec.taint) });
    }

    /// The GPUs that the device plugin grants, or will grant after a move, and that the rule selects.
    fn selected<'l>(rule: &'l Rule, ledger: &'l Ledger) -> impl Iterator<Item = &'l GpuId> {
        let gpus = ledger.gpus.iter().filter(|(gpu, state)| {
            let is_of_device_plugin = state.via.api == KubeletApi::DevicePlugin || state.via.moving;
            is_of_device_plugin && !ledger.excluded.contains(*gpu)
        });
        let is_selected = |gpu: &GpuId| rule.device.as_ref().is_none_or(|name| has_device(ledger, gpu, name));
        gpus.map(|(gpu, _)| gpu).filter(move |gpu| is_selected(gpu))
    }

    /// The owners of the marks of the rules that select GPUs.
    fn owners(&self, ledger: &Ledger) -> BTreeSet<String> {
        let selecting = self.rules.iter().filter(|(_, rule)| Self::selected(rule, ledger).next().is_some());
        selecting.map(|(owner, _)| owner.as_str().to_owned()).collect()
    }

    /// The commands that set the marks that are missing, and then those that remove marks whose rule was deleted or no longer
    /// selects the GPU.
    fn changes(&self, ledger: &Ledger) -> Vec<Command> {
        if !self.is_complete {
            return Vec::new();
        }
        let (mut changes, mut wanted) = (Vec::new(), BTreeSet::new());
        for (owner, rule) in &self.rules {
            for gpu in Self::selected(rule, ledger) {
                wanted.insert((gpu, owner));
                let mark = ledger.gpus.get(gpu).and_then(|state| state.marks.by_owner.get(owner));
                if mark.is_none_or(|mark| mark.why != rule.taint) {
                    let by = format!("DeviceTaintRule/{}", rule.name);
                    let author = Author { owner: owner.clone(), by, why: rule.taint.clone() };
                    changes.push(Command::Cordon { gpu: gpu.clone(), author });
                }
            }
        }
        let obsolete = marks_of_rules(ledger).filter(|(gpu, owner, _)| !wanted.contains(&(*gpu, *owner)));
        changes.extend(obsolete.map(|(gpu, owner, _)| Command::Uncordon {
            gpu: gpu.clone(),
            owners: Owners::One(owner.clone()),
        }));
        changes
    }
}

fn owner(rule: &DeviceTaintRule) -> Option<Owner> {
    Owner::taint_rule(rule.metadata.uid.as_deref()?).ok()
}

/// The taint as kubectl shows it.
fn taint_text(taint: &DeviceTaint) -> String {
    let value = taint.value.as_deref().filter(|value| !value.is_empty());
    let value = value.map(|value| format!("={value}")).unwrap_or_default();
    format!("taint {}{value}:{}", taint.key, taint.effect)
}

/// Whether a device of the GPU, or of one of its MIG instances, has or would have this name in a ResourceSlice.
fn has_device(ledger: &Ledger, gpu: &GpuId, name: &str) -> bool {
    let mut names =
        ledger.parts_of(gpu).flat_map(|part| [device_name(&part.part), shared_device_name(&part.part)]);
    names.any(|of_part| of_part.as_deref() == Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_node::{NOW, gpu, node};
    use serde_json::{Value, json};

    fn rule(uid: &str, selector: &Value, effect: &str) -> DeviceTaintRule {
        serde_json::from_value(json!({
            "metadata": {"name": format!("name-{uid}"), "uid": uid},
            "spec": {"deviceSelector": selector, "taint": {"key": "example.com/bad", "value": "fan", "effect": effect}},
        }))
        .unwrap()
    }

    fn listed(rules: Vec<DeviceTaintRule>) -> KnownRules {
        let mut known = KnownRules::new("gpu.nvidia.com".into(), "n1".into());
        known.apply(Event::Listing);
        known.apply(Event::Listed(rules));
        known
    }

    fn put_mark(ledger: &mut Ledger, index: u32, owner: Owner, why: &str) {
        let state = Arc::make_mut(ledger.gpus.get_mut(&gpu(index)).unwrap());
        state.marks.by_owner.insert(owner, Mark::cordon("x", why, NOW.wall_ms));
    }

    fn text(changes: &[Command]) -> Vec<String> {
        let text = |command: &Command| match command {
            Command::Cordon { gpu, author } => {
                format!("{gpu} {} {}: {}", author.owner, author.by, author.why)
            }
            Command::Uncordon { gpu, owners: Owners::One(owner) } => format!("{gpu} without {owner}"),
            other => panic!("{other:?}"),
        };
        changes.iter().map(text).collect()
    }

    #[test]
    fn a_rule_selects_gpus_by_driver_pool_and_device_as_the_scheduler_does() {
        let mark = |index| {
            format!("GPU-{index} taintRule:a DeviceTaintRule/name-a: taint example.com/bad=fan:NoSchedule")
        };
        for (selector, gpus) in [
            (json!({}), vec![0, 1]),
            (json!(null), vec![]),
            (json!({"driver": "gpu.nvidia.com"}), vec![0, 1]),
            (json!({"driver": "other"}), vec![]),
            (json!({"pool": "n1"}), vec![0, 1]),
            (json!({"pool": "n2"}), vec![]),
            (json!({"driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-1"}), vec![1]),
            (json!({"device": "gpu-0-shared"}), vec![0]),
            (json!({"device": "gpu-7"}), vec![]),
        ] {
            let known = listed(vec![rule("a", &selector, "NoSchedule")]);
            let expected: Vec<String> = gpus.into_iter().map(mark).collect();
            assert_eq!(text(&known.changes(&node(2))), expected, "{selector}");
        }
        for (effect, marks) in [("NoExecute", 2), ("None", 0), ("Later", 0)] {
            let known = listed(vec![rule("a", &json!({}), effect)]);
            assert_eq!(known.changes(&node(2)).len(), marks, "{effect}");
        }
    }

    #[test]
    fn a_mark_is_set_once_follows_its_rule_and_ends_with_it() {
        let mut ledger = node(2);
        let mut known = listed(vec![rule("a", &json!({}), "NoSchedule")]);
        let owner = Owner::taint_rule("a").unwrap();
        for index in 0..2 {
            put_mark(&mut ledger, index, owner.clone(), "taint example.com/bad=fan:NoSchedule");
        }
        put_mark(&mut ledger, 0, Owner::api("ann"), "");
        assert_eq!(text(&known.changes(&ledger)), [""; 0]);
        known.apply(Event::Applied(rule("a", &json!({"device": "gpu-1"}), "NoExecute")));
        assert_eq!(
            text(&known.changes(&ledger)),
            [
                "GPU-1 taintRule:a DeviceTaintRule/name-a: taint example.com/bad=fan:NoExecute",
                "GPU-0 without taintRule:a"
            ]
        );
        known.apply(Event::Applied(rule("a", &json!({}), "None")));
        assert_eq!(text(&known.changes(&ledger)), ["GPU-0 without taintRule:a", "GPU-1 without taintRule:a"]);
        known.apply(Event::Applied(rule("a", &json!({}), "NoSchedule")));
        known.apply(Event::Deleted(rule("a", &json!({}), "NoSchedule")));
        assert_eq!(text(&known.changes(&ledger)).len(), 2);
        known.forget();
        assert_eq!(text(&known.changes(&ledger)), [""; 0], "before a complete list no mark is removed");
    }

    #[test]
    fn a_gpu_has_the_mark_of_a_rule_only_where_the_device_plugin_grants_it_or_will() {
        let mut ledger = node(1);
        let known = listed(vec![rule("a", &json!({}), "NoSchedule")]);
        let owner = Owner::taint_rule("a").unwrap();
        put_mark(&mut ledger, 0, owner, "taint example.com/bad=fan:NoSchedule");
        for (api, moving, expected) in [
            (KubeletApi::DevicePlugin, false, vec![]),
            (KubeletApi::DevicePlugin, true, vec![]),
            (KubeletApi::Dra, true, vec![]),
            (KubeletApi::Dra, false, vec!["GPU-0 without taintRule:a"]),
        ] {
            let state = Arc::make_mut(ledger.gpus.get_mut(&gpu(0)).unwrap());
            (state.via.api, state.via.moving) = (api, moving);
            assert_eq!(text(&known.changes(&ledger)), expected, "{api:?} {moving}");
            assert_eq!(known.owners(&ledger).len(), usize::from(expected.is_empty()));
        }
    }

    #[test]
    fn marks_that_an_api_server_without_rules_leaves_are_shown_with_the_commands_that_remove_them() {
        let mut ledger = node(2);
        assert_eq!(kept_marks(&ledger), None);
        (0..2).for_each(|index| put_mark(&mut ledger, index, Owner::taint_rule("a").unwrap(), ""));
        let text = kept_marks(&ledger).unwrap();
        for gpu in ["GPU-0", "GPU-1"] {
            assert!(text.contains(&format!("`berth gpu uncordon {gpu} --owner taintRule:a`")), "{text}");
        }
    }
}
