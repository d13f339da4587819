//! Rebuilds the services of HTTP workers whose date task panicked because the clock was before 1970.
//!
//! The HTTP library has a task in each worker that formats the date, and that its timeouts depend on. The task panics
//! if the clock shows a time before 1970, and is not started again: each later request of that worker would end with
//! 408. So such panics are counted, and once the clock is set, each worker's service is created again, with its task.

use actix_service::{Service, ServiceFactory, fn_factory};
use std::future::{Ready, ready};
use std::panic;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

/// Path component that identifies the library in a panic's location.
const DATES: &str = "/httpdate-";
/// Number of panics in that library.
static PANICS: AtomicU64 = AtomicU64::new(0);

/// Counts the library's panics from now on, and logs what they mean.
pub(super) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if panic.location().is_some_and(|at| at.file().contains(DATES)) {
                PANICS.fetch_add(1, Ordering::SeqCst);
                tracing::error!(
                    "the system's clock shows a time before 1970: set it; the admin API answers again once it is set"
                );
            } else {
                others(panic);
            }
        }));
    });
}

/// Service wrapper that requests a rebuild after such a panic.
pub(super) fn guard<Io: 'static>()
-> impl ServiceFactory<Io, Response = Io, Error = (), Config = (), InitError = (), Service = Guard> {
    fn_factory(|| ready(Ok(Guard { panics: PANICS.load(Ordering::SeqCst) })))
}

pub(super) struct Guard {
    /// Number of panics when this was created.
    panics: u64,
}

impl<Io: 'static> Service<Io> for Guard {
    type Response = Io;
    type Error = ();
    type Future = Ready<Result<Io, ()>>;

    fn poll_ready(&self, _: &mut Context<'_>) -> Poll<Result<(), ()>> {
        let is_stale = self.panics != PANICS.load(Ordering::SeqCst);
        // While the clock is wrong, a new one would panic too.
        Poll::Ready(if is_stale && SystemTime::now() >= UNIX_EPOCH { Err(()) } else { Ok(()) })
    }

    fn call(&self, io: Io) -> Self::Future {
        ready(Ok(io))
    }
}
