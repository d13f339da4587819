//! The device list of one resource, as its streams show it.

use berth_kernel::listing::ListedDevice;
use std::sync::Arc;
use tokio::sync::watch;

/// What is on the board.
#[derive(Clone, Debug, Default)]
pub(super) struct Sheet {
    /// The whole list, sorted by id.
    pub(super) devices: Arc<Vec<ListedDevice>>,
    /// Counts changes and resends, so that a stream knows whether to send.
    pub(super) turn: u64,
}

/// One resource's list. Written by its plugin, read by every stream.
#[derive(Debug)]
pub(super) struct Board {
    sheet: watch::Sender<Sheet>,
}

impl Board {
    pub(super) fn new() -> Self {
        Self { sheet: watch::Sender::new(Sheet::default()) }
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Sheet> {
        self.sheet.subscribe()
    }

    /// Puts up a list. Streams hear of it only if it differs: most entries
    /// of a ledger change no list, and each message makes the kubelet write and fsync a file.
    pub(super) fn show(&self, devices: Vec<ListedDevice>) {
        self.sheet.send_if_modified(|sheet| {
            let differs = *sheet.devices != devices;
            if differs {
                sheet.devices = Arc::new(devices);
                sheet.turn += 1;
            }
            differs
        });
    }

    /// Sends the same list once more: the kubelet then rewrites its checkpoint.
    pub(super) fn resend(&self) {
        self.sheet.send_modify(|sheet| sheet.turn += 1);
    }
}
