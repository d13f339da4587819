//! A release of the GPUs' driver, which the scanner checks before each scan.

use crate::guard_driver_use::GuardDriverUse;
use crate::wake::Wake;
use berth_kernel::ids::time::rfc3339_seconds;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A release of the driver, for `by`, until a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// The operator.
    pub by: String,
    /// The operator's reason; may be empty.
    pub why: String,
    /// Its start, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// Its end, milliseconds since 1970. It ends earlier with [`crate::DriverAccess::resume`], or once another driver
    /// is loaded.
    pub until_wall_ms: u64,
}

impl Release {
    /// Why no GPU can be used, for people.
    #[must_use]
    pub fn reason(&self) -> String {
        format!("the driver was released by {} until {}", self.by, rfc3339_seconds(self.until_wall_ms))
    }
}

/// The release that the scanner checks before each scan.
pub(crate) struct Released {
    active: Mutex<Option<Active>>,
    /// Notified when a release begins or is ended.
    wake: Arc<Wake>,
    /// The guard, whose use of the driver ends with a release.
    pub(crate) guard: OnceLock<GuardDriverUse>,
}

struct Active {
    release: Release,
    ends: Instant,
    /// The driver that was loaded at its start.
    driver: Option<String>,
}

impl Released {
    pub(crate) fn new(wake: Arc<Wake>) -> Self {
        Self { active: Mutex::default(), wake, guard: OnceLock::new() }
    }

    fn set_guard_released(&self, is_released: bool) {
        if let Some(guard) = self.guard.get() {
            guard.set_released(is_released);
        }
    }

    pub(crate) fn begin(&self, release: Release, time: Duration, driver: Option<String>) {
        let mut active = self.active.lock();
        self.set_guard_released(true);
        *active = Some(Active { release, ends: Instant::now() + time, driver });
        drop(active);
        self.wake.notify();
    }

    /// Ends it. Returns whether there was one.
    pub(crate) fn end(&self) -> bool {
        let mut active = self.active.lock();
        let was_active = active.take().is_some();
        self.set_guard_released(false);
        drop(active);
        self.wake.notify();
        was_active
    }

    pub(crate) fn release(&self) -> Option<Release> {
        self.active.lock().as_ref().map(|active| active.release.clone())
    }

    /// The release, unless its time is over or another driver was loaded.
    pub(crate) fn current(&self, loaded_driver: impl FnOnce() -> Option<String>) -> Option<Release> {
        let mut slot = self.active.lock();
        let active = slot.as_ref()?;
        let driver = loaded_driver();
        let why = if Instant::now() >= active.ends {
            "the time of its release is over"
        } else if driver.is_some() && driver != active.driver {
            "another driver was loaded"
        } else {
            return Some(active.release.clone());
        };
        tracing::info!(by = active.release.by, "the driver is used again: {why}");
        *slot = None;
        self.set_guard_released(false);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn released(time: Duration) -> Released {
        let released = Released::new(Arc::default());
        let release =
            Release { by: "ada".into(), why: String::new(), since_wall_ms: 0, until_wall_ms: 1_800_000 };
        released.begin(release, time, Some("570".into()));
        released
    }

    #[test]
    fn a_release_ends_with_its_time_or_with_another_driver() {
        let lasting = released(Duration::from_secs(3600));
        let reason = lasting.current(|| Some("570".into())).map(|release| release.reason());
        assert_eq!(reason.as_deref(), Some("the driver was released by ada until 1970-01-01T00:30:00Z"));
        assert!(lasting.current(|| None).is_some(), "unloaded");
        assert_eq!(lasting.current(|| Some("580".into())), None);
        assert_eq!(lasting.release(), None);
        assert_eq!(released(Duration::ZERO).current(|| Some("570".into())), None);
    }
}
