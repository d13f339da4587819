//! Rounds: what the kubelet's two accounts show, in one piece or step by step, in time or late.

use super::ends::{Cause, Sight};
use super::event::{Look, Lost};
use super::violation::Violation;
use super::world::World;
use berth_kernel::evidence::kubelet_view::{KubeletAge, ReconcileView};
use berth_kernel::node::command::Command;
use berth_kernel::node::ports::Clock;

/// Reconcile passes that may wait to be submitted.
const WAITING_MAX: usize = 6;

impl World {
    /// A whole round at once.
    pub(crate) fn whole_round(&mut self, look: Look) {
        if self.daemon.is_none() {
            return;
        }
        let (mut sight, version) = self.begin(look.list);
        self.read(&mut sight.view, version, look.write, look.read);
        self.hand_in(sight);
    }

    pub(crate) fn begin_round(&mut self, list: bool) {
        if self.daemon.is_some() {
            self.round = Some(self.begin(list));
        }
    }

    pub(crate) fn read_round(&mut self, write: bool, read: bool) {
        let Some((mut sight, version)) = self.round.take() else { return };
        self.read(&mut sight.view, version, write, read);
        if self.views.len() < WAITING_MAX {
            self.views.push(sight);
        }
    }

    pub(crate) fn hand_in_round(&mut self, which: u32, keep: bool) {
        if self.views.is_empty() {
            return;
        }
        let at = which as usize % self.views.len();
        let sight = if keep { self.views[at].clone() } else { self.views.remove(at) };
        self.hand_in(sight);
    }

    /// Both sources as they are, without making the kubelet write.
    pub(crate) fn glance(&mut self, list: bool, read: bool) {
        if self.daemon.is_some() {
            let (mut sight, _) = self.begin(list);
            let version = self.kubelet.file_version();
            self.read(&mut sight.view, version, false, read);
            self.hand_in(sight);
        }
    }

    /// Before the first registration: adopts what pods hold that is not recorded. Answers
    /// whether it was recorded.
    pub(crate) fn adopt(&mut self) -> bool {
        let (mut sight, _) = self.begin(true);
        sight.view.checkpoint = Some(self.kubelet.checkpoint());
        sight.view.adopt = true;
        if !self.hand_in(sight) {
            return false;
        }
        // What an operator ended stays ended.
        let ledger = self.ledger();
        let known = |h: &super::kubelet::Hold| {
            let lives = ledger.live.values().any(|a| a.resource == h.resource && a.devices == h.devices);
            lives || ledger.ended.iter().any(|p| *p.resource() == h.resource && p.devices() == h.devices)
        };
        let parts = &self.ledger().parts;
        let ours = |h: &super::kubelet::Hold| h.devices.iter().all(|id| parts.contains_key(&id.part));
        let missed = self.kubelet.held().find(|h| h.allocation.is_none() && ours(h) && !known(h)).cloned();
        if let Some(hold) = missed {
            self.checks.violations.push(Violation::new("I5", format!("{hold:?} was not adopted")));
        }
        true
    }

    /// From now on an account is lost, or none is.
    pub(crate) fn lose_evidence(&mut self, lost: Option<Lost>) {
        self.lost = (lost, self.kubelet.checkpoint());
    }

    fn begin(&mut self, list: bool) -> (Sight, u64) {
        let now = self.around.hands.now();
        let (created_wall_ms, kubelet_ms) = self.kubelet.created_ms;
        // A socket that is older than the process is of moment 0.
        let created_mono_ms = kubelet_ms.saturating_sub(self.around.hands.true_of(0));
        let view = ReconcileView {
            began_mono_ms: now.mono_ms,
            kubelet: Some(KubeletAge { created_wall_ms, created_mono_ms }),
            list: if list && self.lost.0 != Some(Lost::List) { self.kubelet.list() } else { None },
            ..ReconcileView::default()
        };
        let version = self.kubelet.file_version();
        (Sight { view, began_ms: self.around.hands.true_ms(), kubelet_ms }, version)
    }

    fn read(&mut self, view: &mut ReconcileView, version: u64, write: bool, read: bool) {
        if write && self.daemon.is_some() {
            self.kubelet.write();
        }
        match &self.lost {
            (Some(Lost::Checkpoint), _) => {}
            (Some(Lost::Stale), old) if read => view.checkpoint = Some(old.clone()),
            _ if read => {
                view.fresh = self.kubelet.file_version() != version;
                view.checkpoint = Some(self.kubelet.checkpoint());
            }
            _ => {}
        }
    }

    fn hand_in(&mut self, sight: Sight) -> bool {
        let command = Command::Reconcile(sight.view.clone());
        matches!(self.turn(&command, Cause::Round(Box::new(sight))), Some(Ok(_)))
    }
}
