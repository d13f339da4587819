//! The device list of one resource, read by its ListAndWatch streams.

use berth_kernel::sharing::listing::ListedDevice;
use std::sync::Arc;
use tokio::sync::watch;

/// One version of the list.
#[derive(Clone, Debug, Default)]
pub(super) struct ListVersion {
    /// The whole list, sorted by id.
    pub(super) devices: Arc<Vec<ListedDevice>>,
    /// Incremented by each change and each resend.
    pub(super) number: u64,
}

/// One resource's list. Written by the supervisor, read by every stream.
#[derive(Debug)]
pub(super) struct DeviceList {
    current: watch::Sender<ListVersion>,
}

impl DeviceList {
    pub(super) fn new() -> Self {
        Self { current: watch::Sender::new(ListVersion::default()) }
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<ListVersion> {
        self.current.subscribe()
    }

    /// Replaces the list. Streams send it only if it differs: most ledger entries change no list, and
    /// each message makes the kubelet write and fsync a file.
    pub(super) fn publish(&self, devices: Vec<ListedDevice>) {
        self.current.send_if_modified(|current| {
            let differs = *current.devices != devices;
            if differs {
                current.devices = Arc::new(devices);
                current.number += 1;
            }
            differs
        });
    }

    /// Sends the same list again, so that the kubelet rewrites its checkpoint.
    pub(super) fn resend(&self) {
        self.current.send_modify(|current| current.number += 1);
    }
}
