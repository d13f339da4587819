//! The device lists of all resources.

use super::board::Board;
use berth_kernel::names::Resource;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// The boards of all resources, and how many streams of the kubelet read each. A reconcile pass resends lists by it.
#[derive(Debug, Default)]
pub(super) struct Boards(Mutex<BTreeMap<Resource, Posted>>);

#[derive(Debug)]
pub(super) struct Posted {
    pub(super) board: Arc<Board>,
    pub(super) streams: Arc<watch::Sender<usize>>,
}

impl Boards {
    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<Resource, Posted>> {
        self.0.lock()
    }

    /// Sends one list once more to the kubelet. False if it reads none.
    pub(super) fn resend_one(&self) -> bool {
        let boards = self.lock();
        let read = boards.values().find(|posted| *posted.streams.borrow() > 0);
        if let Some(posted) = read {
            posted.board.resend();
        }
        read.is_some()
    }
}
