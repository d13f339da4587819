//! The device lists of all resources.

use super::device_list::DeviceList;
use berth_kernel::ids::names::Resource;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// The device list of each resource with the number of the kubelet's streams. A reconcile pass resends one of them.
#[derive(Debug, Default)]
pub(super) struct DeviceLists(Mutex<BTreeMap<Resource, ListEntry>>);

#[derive(Debug)]
pub(super) struct ListEntry {
    pub(super) list: Arc<DeviceList>,
    pub(super) streams: Arc<watch::Sender<usize>>,
}

impl DeviceLists {
    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<Resource, ListEntry>> {
        self.0.lock()
    }

    /// Sends one list to the kubelet again. False if the kubelet has no stream open.
    pub(super) fn resend_one(&self) -> bool {
        let entries = self.lock();
        let streamed = entries.values().find(|entry| *entry.streams.borrow() > 0);
        if let Some(entry) = streamed {
            entry.list.resend();
        }
        streamed.is_some()
    }
}
