//! Runs one plugin for each resource that has a listed device.

use super::device_list::{DeviceList, DeviceLists};
use super::device_plugin::Handler;
use super::folder::FolderState;
use super::plugin::{LoggedReason, Plugin, Predecessor, Registrations};
use super::reconciler::Reconciler;
use super::settings::Settings;
use berth_core::KernelHandle;
use berth_core::keeper::Snapshot;
use berth_kernel::ids::names::Resource;
use berth_kernel::sharing::listing::listing;
use berth_kernel::sharing::offer::RESOURCES_MAX;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// Starts and stops plugins as resources get and lose their listed devices.
pub(super) struct Supervisor {
    pub(super) settings: Arc<Settings>,
    pub(super) kernel: KernelHandle,
    pub(super) reconciler: Arc<Reconciler>,
    pub(super) device_lists: Arc<DeviceLists>,
    pub(super) folder_state: watch::Receiver<FolderState>,
    pub(super) registrations: Arc<watch::Sender<Registrations>>,
    pub(super) predecessor: Predecessor,
}

struct RunningPlugin {
    device_list: Arc<DeviceList>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// A plugin that was stopped because its resource has no listed device any more.
struct StoppingPlugin {
    /// Resolves when the plugin no longer serves and its socket is removed.
    stopped_serving: oneshot::Receiver<()>,
    /// Ends once the kubelet has also had time to process the end of the plugin's streams.
    settled: JoinHandle<()>,
}

impl Supervisor {
    /// Runs until `stop`, then stops every plugin and waits for them.
    pub(super) async fn run(self, mut stop: watch::Receiver<bool>) {
        let logged_wait = Arc::new(LoggedReason::default());
        let mut snapshots = self.kernel.watch();
        let mut plugins: BTreeMap<Resource, RunningPlugin> = BTreeMap::new();
        // Plugins that are stopping. A successor waits for them, as both use the same socket.
        let mut stopping: BTreeMap<Resource, StoppingPlugin> = BTreeMap::new();
        loop {
            let ledger = Arc::clone(&snapshots.borrow_and_update());
            stopping.retain(|_, plugin| !plugin.settled.is_finished());
            let listed = ledger.resources();
            let unlisted: Vec<Resource> =
                plugins.keys().filter(|resource| !listed.contains(*resource)).cloned().collect();
            for resource in unlisted {
                if let Some(plugin) = plugins.remove(&resource) {
                    tracing::info!(%resource, "the resource has no listed device any more; stopping its device plugin");
                    self.device_lists.0.lock().remove(&resource);
                    plugin.stop.send_replace(true);
                    let settle = self.settings.timeouts.disconnect.settle;
                    let (serving_guard, stopped_serving) = oneshot::channel();
                    let settled = tokio::spawn(async move {
                        let _ = plugin.task.await;
                        drop(serving_guard);
                        // The kubelet may still process the end of its streams.
                        tokio::time::sleep(settle).await;
                    });
                    stopping.insert(resource, StoppingPlugin { stopped_serving, settled });
                }
            }
            for resource in listed {
                if let Some(plugin) = plugins.get(&resource) {
                    plugin.device_list.publish(listing(&ledger, &resource));
                } else if plugins.len() < RESOURCES_MAX {
                    let predecessor = stopping.remove(&resource);
                    let plugin = self.start_plugin(&resource, &ledger, &logged_wait, predecessor);
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
        for task in plugins.into_values().map(|plugin| plugin.task) {
            // A plugin that panicked has been reported by the runtime.
            let _ = task.await;
        }
        for plugin in stopping.into_values() {
            let _ = plugin.stopped_serving.await;
        }
    }

    fn start_plugin(
        &self,
        resource: &Resource,
        ledger: &Snapshot,
        logged_wait: &Arc<LoggedReason>,
        predecessor: Option<StoppingPlugin>,
    ) -> RunningPlugin {
        let device_list = Arc::new(DeviceList::default());
        // Before any stream reads it: an empty first list would remove the resource's devices from the node.
        device_list.publish(listing(ledger, resource));
        self.device_lists.0.lock().insert(resource.clone(), Arc::clone(&device_list));
        let handler = Arc::new(Handler {
            resource: resource.clone(),
            kernel: self.kernel.clone(),
            edits: self.settings.edits.clone(),
            reconciler: Arc::clone(&self.reconciler),
            device_list: Arc::clone(&device_list),
            register_began: watch::Sender::default(),
            kubelet_connections: Arc::default(),
            refusal_log: Mutex::default(),
            stream_end: watch::Sender::default(),
        });
        let settings = Arc::clone(&self.settings);
        let folder_state = self.folder_state.clone();
        let registrations = Arc::clone(&self.registrations);
        let (logged_wait, before) = (Arc::clone(logged_wait), self.predecessor);
        let (stop, mut stopped) = watch::channel(false);
        let task = tokio::spawn(async move {
            let before = match predecessor {
                Some(StoppingPlugin { stopped_serving, settled }) => {
                    tokio::select! {
                        _ = settled => {}
                        _ = stopped.changed() => {
                            let _ = stopped_serving.await;
                            return;
                        }
                    }
                    Predecessor::default()
                }
                None => before,
            };
            let plugin = Plugin::new(handler, settings, folder_state, registrations, logged_wait, before);
            plugin.run(stopped).await;
        });
        RunningPlugin { device_list, stop, task }
    }
}
