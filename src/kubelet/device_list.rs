//! The device lists of the resources, read by their ListAndWatch streams.

use berth_kernel::ids::names::Resource;
use berth_kernel::sharing::listing::ListedDevice;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// One resource's list. Written by the supervisor, read by every stream.
#[derive(Debug, Default)]
pub(super) struct DeviceList {
    /// The whole list, sorted by id.
    pub(super) devices: watch::Sender<Arc<Vec<ListedDevice>>>,
    /// The number of the kubelet's streams that read it.
    pub(super) streams: Arc<watch::Sender<usize>>,
}

impl DeviceList {
    /// Replaces the list. Streams send it only if it differs: most ledger entries change no list, and
    /// each message makes the kubelet write and fsync a file.
    pub(super) fn publish(&self, devices: Vec<ListedDevice>) {
        self.devices.send_if_modified(|current| {
            let differs = **current != devices;
            if differs {
                *current = Arc::new(devices);
            }
            differs
        });
    }
}

/// The device lists of all resources.
#[derive(Debug, Default)]
pub(super) struct DeviceLists(pub(super) Mutex<BTreeMap<Resource, Arc<DeviceList>>>);

impl DeviceLists {
    /// Sends one list to the kubelet again, so that it rewrites its checkpoint. False if the kubelet has no stream
    /// open.
    pub(super) fn resend_one(&self) -> bool {
        let lists = self.0.lock();
        let streamed = lists.values().find(|list| *list.streams.borrow() > 0);
        if let Some(list) = streamed {
            list.devices.send_modify(|_| {});
        }
        streamed.is_some()
    }
}
