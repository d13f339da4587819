//! One plugin a resource that has a listed device, from the first to the last.

use super::board::Board;
use super::boards::{Boards, Posted};
use super::device_plugin::Desk;
use super::folder::Seen;
use super::plugin::{LoggedReason, Plugin, Registrations};
use super::rounds::Rounds;
use super::settings::Settings;
use crate::edits::Edits;
use berth_core::admission::KernelHandle;
use berth_core::keeper::Snapshot;
use berth_kernel::names::Resource;
use berth_kernel::offer::RESOURCES_MAX;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What every plugin needs.
pub(super) struct Supervisor {
    pub(super) settings: Arc<Settings>,
    pub(super) kernel: KernelHandle,
    pub(super) rounds: Arc<Rounds>,
    pub(super) boards: Arc<Boards>,
    pub(super) seen: watch::Receiver<Seen>,
    pub(super) registrations: Arc<watch::Sender<Registrations>>,
}

struct Employed {
    board: Arc<Board>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Supervisor {
    /// Runs until `stop`, then stops every plugin and waits for them.
    pub(super) async fn run(self, mut stop: watch::Receiver<bool>) {
        let logged_wait = Arc::new(LoggedReason::default());
        let edits = Arc::new(self.settings.edits.clone());
        let mut snapshots = self.kernel.watch();
        let mut plugins: BTreeMap<Resource, Employed> = BTreeMap::new();
        // Plugins on their way out; their successors wait for them, as the socket is the same.
        let mut leaving: BTreeMap<Resource, JoinHandle<()>> = BTreeMap::new();
        loop {
            let ledger = Arc::clone(&snapshots.borrow_and_update());
            leaving.retain(|_, task| !task.is_finished());
            let listed = ledger.resources();
            let gone: Vec<Resource> =
                plugins.keys().filter(|resource| !listed.contains(*resource)).cloned().collect();
            for resource in gone {
                if let Some(plugin) = plugins.remove(&resource) {
                    tracing::info!(%resource, "no device is listed any more; leaving the kubelet");
                    self.boards.lock().remove(&resource);
                    plugin.stop.send_replace(true);
                    leaving.insert(resource, plugin.task);
                }
            }
            for resource in listed {
                if let Some(plugin) = plugins.get(&resource) {
                    self.show(&plugin.board, &ledger, &resource);
                } else if plugins.len() < RESOURCES_MAX {
                    let before = leaving.remove(&resource);
                    let plugin = self.employ(&resource, &ledger, &edits, &logged_wait, before);
                    plugins.insert(resource, plugin);
                }
            }
            tokio::select! {
                changed = snapshots.changed() => if changed.is_err() { break },
                _ = stop.wait_for(|stop| *stop) => break,
            }
        }
        for plugin in plugins.values() {
            plugin.stop.send_replace(true);
        }
        let tasks = plugins.into_values().map(|plugin| plugin.task);
        for task in tasks.chain(leaving.into_values()) {
            // A plugin that panicked has been reported by the runtime.
            let _ = task.await;
        }
    }

    fn show(&self, board: &Board, ledger: &Snapshot, resource: &Resource) {
        board.show(self.kernel.listing(ledger, resource));
    }

    fn employ(
        &self,
        resource: &Resource,
        ledger: &Snapshot,
        edits: &Arc<Edits>,
        logged_wait: &Arc<LoggedReason>,
        before: Option<JoinHandle<()>>,
    ) -> Employed {
        let board = Arc::new(Board::new());
        // Before anybody can read it: an empty first list would take the resource's devices away.
        self.show(&board, ledger, resource);
        let streams = Arc::new(watch::Sender::new(0));
        let posted = Posted { board: Arc::clone(&board), streams: Arc::clone(&streams) };
        self.boards.lock().insert(resource.clone(), posted);
        let desk = Arc::new(Desk {
            resource: resource.clone(),
            kernel: self.kernel.clone(),
            edits: Arc::clone(edits),
            rounds: Arc::clone(&self.rounds),
            board: Arc::clone(&board),
            registering: watch::Sender::default(),
            kubelets: Arc::new(watch::Sender::new(0)),
            streams,
            ending: watch::Sender::default(),
        });
        let settings = Arc::clone(&self.settings);
        let seen = self.seen.clone();
        let registrations = Arc::clone(&self.registrations);
        let logged_wait = Arc::clone(logged_wait);
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            Plugin::new(desk, settings, seen, registrations, logged_wait).run(stopped).await;
        });
        Employed { board, stop, task }
    }
}
