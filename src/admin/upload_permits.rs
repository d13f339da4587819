//! Permits for uploads. An upload has its permit before its body is read, which may take a minute and 32 MiB, so no
//! caller has both permits: the other one is always left for another caller.

use berth_api::Kind;
use berth_http::Failure;
use parking_lot::Mutex;

/// Concurrent uploads: each holds up to 32 MiB, and only one is compiled at a time.
const PERMITS: usize = 2;

/// When to retry while uploads are under way, seconds: most policies compile in that time.
const RETRY_S: u64 = 5;

/// The callers whose uploads are under way, by [`berth_http::caller::Caller::key`].
#[derive(Default)]
pub(crate) struct UploadPermits(Mutex<Vec<String>>);

/// A permit, given back when it is dropped.
pub(crate) struct Permit<'p> {
    permits: &'p UploadPermits,
    caller: String,
}

impl UploadPermits {
    /// Takes a permit for this caller.
    ///
    /// # Errors
    /// [`Kind::Busy`] if an upload of the same caller is under way, or all permits are taken.
    pub(crate) fn take(&self, caller: String) -> Result<Permit<'_>, Failure> {
        let mut taken = self.0.lock();
        let problem = if taken.contains(&caller) {
            Failure::new(
                Kind::Busy,
                "another upload of the same caller is in progress; each caller may have one at a time",
            )
            .hint("send this upload when the other one was answered")
        } else if taken.len() >= PERMITS {
            Failure::new(Kind::Busy, "uploads of other callers are in progress")
        } else {
            taken.push(caller.clone());
            return Ok(Permit { permits: self, caller });
        };
        Err(problem.retry_after(RETRY_S))
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.permits.0.lock().retain(|caller| *caller != self.caller);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_caller_has_both_permits_and_each_gives_its_own_back() {
        let permits = UploadPermits::default();
        let take = |caller: &str| {
            permits.take(caller.into()).map_err(|failure| (failure.problem.status, failure.problem.detail))
        };
        let first = take("token a").unwrap();
        let (status, detail) = take("token a").err().unwrap();
        assert!(status == 503 && detail.contains("same caller"), "{status} {detail}");
        let second = take("certificate a").unwrap();
        let (status, detail) = take("token b").err().unwrap();
        assert!(status == 503 && detail.contains("other callers"), "{status} {detail}");
        drop(first);
        let third = take("token b").unwrap();
        assert_eq!(take("certificate a").err().unwrap().0, 503);
        drop((second, third));
        assert!(permits.0.lock().is_empty());
    }
}
