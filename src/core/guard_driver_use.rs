//! The guard's use of the driver. A release of the driver ends it, too: until then the driver cannot be unloaded.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// What the daemon orders and knows of the guard's use of the driver. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct GuardDriverUse {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    is_released: watch::Sender<bool>,
    state: Mutex<GuardDriverState>,
    /// Notified when the state changes.
    changed: Condvar,
}

/// What the guard has last said of its use of the driver. A guard that never connected uses none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuardDriverState {
    /// Whether it has the driver open, or is about to open it.
    pub has_driver_open: bool,
    /// The last order that it has carried out: whether the driver is released. `None` from a guard that does not use the
    /// driver.
    pub carried_out: Option<bool>,
}

impl GuardDriverState {
    /// Whether it does not use the driver, and will not until another order.
    fn is_closed(self) -> bool {
        !self.has_driver_open && self.carried_out != Some(false)
    }
}

impl GuardDriverUse {
    /// Whether the driver is released at present.
    #[must_use]
    pub fn watch_release(&self) -> watch::Receiver<bool> {
        self.shared.is_released.subscribe()
    }

    /// Records what the guard has said. While the guard is away, what it said last counts.
    pub fn set_state(&self, state: GuardDriverState) {
        *self.shared.state.lock() = state;
        self.shared.changed.notify_all();
    }

    /// Orders that the guard closes the driver, or may use it again.
    pub fn set_released(&self, is_released: bool) {
        self.shared.is_released.send_replace(is_released);
    }

    /// Waits until the guard has closed the driver. Returns whether it has.
    #[must_use]
    pub fn wait_until_closed(&self, wait: Duration) -> bool {
        let mut state = self.shared.state.lock();
        self.shared.changed.wait_while_for(&mut state, |state| !state.is_closed(), wait);
        state.is_closed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(has_driver_open: bool, carried_out: Option<bool>) -> GuardDriverState {
        GuardDriverState { has_driver_open, carried_out }
    }

    #[test]
    fn a_release_waits_for_the_guard_that_has_said_that_it_uses_the_driver() {
        let guard = GuardDriverUse::default();
        assert!(guard.wait_until_closed(Duration::ZERO), "there is no guard");
        for (said, is_closed) in [
            (state(false, None), true),
            (state(true, None), false),
            (state(true, Some(false)), false),
            // It has not received the order yet, and may open the driver at any moment.
            (state(false, Some(false)), false),
            (state(true, Some(true)), false),
            (state(false, Some(true)), true),
        ] {
            guard.set_state(said);
            assert_eq!(guard.wait_until_closed(Duration::ZERO), is_closed, "{said:?}");
        }
    }

    #[test]
    fn the_guards_answer_ends_the_wait() {
        let guard = GuardDriverUse::default();
        guard.set_state(state(true, Some(false)));
        let waiting = guard.clone();
        let waiter = std::thread::spawn(move || waiting.wait_until_closed(Duration::from_secs(300)));
        guard.set_released(true);
        assert!(*guard.watch_release().borrow());
        guard.set_state(state(false, Some(true)));
        assert!(waiter.join().unwrap());
    }
}
