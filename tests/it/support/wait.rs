//! Waiting for the daemon. A test that waits in vain fails after five minutes, with what it waited for.

use std::time::{Duration, Instant};

/// How long a test waits: far longer than anything takes, also on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(300);
/// Between two checks.
const INTERVAL: Duration = Duration::from_millis(20);

/// Waits until `holds` is true.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    until_some(what, || holds().then_some(()));
}

/// Waits until `find` finds something, and answers with it.
pub(crate) fn until_some<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + SOON;
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(Instant::now() < end, "not within {SOON:?}: {what}");
        std::thread::sleep(INTERVAL);
    }
}
