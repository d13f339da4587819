//! Who may upload now. A place is taken before a body comes, which may take a minute and 32 MiB, so no caller has
//! two of them: the other one is always somebody else's.

use berth_api::Kind;
use berth_http::Failure;
use berth_http::caller;
use parking_lot::Mutex;

/// Uploads under way at a time: each holds up to 32 MiB, and only one is compiled at a time.
const PLACES: usize = 2;

/// When to retry while uploads are at work, seconds: compiling takes some, as a rule.
const RETRY_S: u64 = 5;

/// The places of uploads.
#[derive(Default)]
pub(super) struct Places(Mutex<Vec<Upload>>);

#[derive(Clone, PartialEq, Eq)]
struct Upload {
    /// [`caller::identity`].
    who: String,
    /// The `Idempotency-Key`.
    key: Option<String>,
}

/// A place that is taken, for as long as this lives.
pub(super) struct Place<'p> {
    places: &'p Places,
    who: String,
}

impl Places {
    /// Takes a place for the caller of the request at work, and for its key, if it has one.
    ///
    /// # Errors
    /// [`Kind::KeyBusy`] where the caller's upload with this key is at work, [`Kind::Busy`] where another one of
    /// theirs is, or all places are taken.
    pub(super) fn take(&self, key: Option<&String>) -> Result<Place<'_>, Failure> {
        self.take_for(caller::identity(), key.cloned())
    }

    fn take_for(&self, who: String, key: Option<String>) -> Result<Place<'_>, Failure> {
        let mut taken = self.0.lock();
        let problem = match taken.iter().find(|upload| upload.who == who) {
            Some(own) if key.is_some() && own.key == key => {
                Failure::new(Kind::KeyBusy, "the request with this Idempotency-Key is still at work")
            }
            Some(_) => {
                Failure::new(Kind::Busy, "another upload of yours is at work; each caller has one at a time")
                    .hint("send this one when that was answered")
            }
            None if taken.len() >= PLACES => Failure::new(Kind::Busy, "other uploads are at work"),
            None => {
                taken.push(Upload { who: who.clone(), key });
                return Ok(Place { places: self, who });
            }
        };
        Err(problem.retry_after(RETRY_S))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut taken = self.places.0.lock();
        taken.retain(|upload| upload.who != self.who);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_caller_has_both_places_and_each_has_its_own_back() {
        let places = Places::default();
        let take = |who: &str, key: Option<&str>| {
            let taken = places.take_for(who.into(), key.map(Into::into));
            taken.map_err(|problem| (problem.problem.status, problem.problem.detail))
        };
        let first = take("token a", Some("k")).unwrap();
        let (status, words) = take("token a", None).err().unwrap();
        assert!(status == 503 && words.contains("yours"), "{status} {words}");
        assert_eq!(take("token a", Some("other")).err().unwrap().0, 503);
        assert_eq!(take("token a", Some("k")).err().unwrap().0, 409);
        let second = take("certificate a", None).unwrap();
        let (status, words) = take("token b", None).err().unwrap();
        assert!(status == 503 && words.starts_with("other"), "{status} {words}");
        drop(first);
        let third = take("token b", None).unwrap();
        assert_eq!(take("certificate a", None).err().unwrap().0, 503);
        drop((second, third));
        assert!(places.0.lock().is_empty());
    }
}
