//! `Idempotency-Key`: an upload whose answer was lost on the way is sent again and answered as the
//! first time. Bounded in memory; a key that was let go of is a new one, which is safe, since the same
//! bytes uploaded again change nothing.

use actix_web::HttpRequest;
use actix_web::http::StatusCode;
use berth_api::Kind;
use berth_http::Failure;
use berth_http::caller;
use berth_kernel::names::Digest as PolicyDigest;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::VecDeque;

/// The header, as draft-ietf-httpapi-idempotency-key-header names it.
const KEY: &str = "idempotency-key";
/// Longest key, bytes: a UUID has 36.
const KEY_BYTES_MAX: usize = 128;
/// Keys that are remembered, the oldest going first. With answers of at most some 10 KiB (a schema of
/// 6 KiB and 3 KiB of words) that is 0.7 MiB; with those of the shipped policies 0.1 MiB.
const KEYS_MAX: usize = 64;
/// When to retry while the first request is at work: it may be compiling.
const AT_WORK_RETRY_S: u64 = 5;

/// What a key was sent with: hash of the body and of what else makes the request.
type Request = [u8; 32];

/// The answer of an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answered {
    /// What was uploaded.
    pub(super) digest: PolicyDigest,
    pub(super) status: StatusCode,
    pub(super) location: Option<String>,
    pub(super) body: Vec<u8>,
}

/// The keys of this daemon.
#[derive(Default)]
pub(super) struct Keys(Mutex<VecDeque<Known>>);

struct Known {
    key: String,
    request: Request,
    /// `None` while it is at work.
    answer: Option<Answered>,
}

/// What to do with a request.
pub(super) enum Turn<'k> {
    /// It is to be done, and [`Claim::done`] with its answer.
    First(Claim<'k>),
    /// It was done: this is the answer.
    Again(Answered),
}

/// A key at work. Dropped without an answer, it is free again: a request that failed may be sent again.
pub(super) struct Claim<'k> {
    keys: &'k Keys,
    key: Option<String>,
}

/// The key of a request, where it has one, and whose it is: another caller's is another one, whatever it
/// says.
///
/// # Errors
/// [`Kind::Header`] where it is malformed.
pub(super) fn key_of(request: &HttpRequest) -> Result<Option<String>, Failure> {
    let mut given = request.headers().get_all(KEY);
    let (Some(first), second) = (given.next(), given.next()) else {
        return Ok(None);
    };
    let text = first.to_str().unwrap_or_default().trim();
    // The draft has it as a quoted string; most senders leave the quotes out.
    let key = text.strip_prefix('"').and_then(|t| t.strip_suffix('"')).unwrap_or(text);
    let fits = (1..=KEY_BYTES_MAX).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic());
    if second.is_some() || !fits {
        let rule =
            format!("Idempotency-Key: one word of 1 to {KEY_BYTES_MAX} visible characters, such as a UUID");
        return Err(Failure::new(Kind::Header, rule));
    }
    // No key has a line break.
    Ok(Some(format!("{}\n{key}", caller::identity())))
}

/// Hash of what makes a request: parts, each with its length.
pub(super) fn request_of(parts: &[&[u8]]) -> Request {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

impl Keys {
    /// Takes a key for a request. Without a key everything is new, and so is what was answered where
    /// `still` says that the answer no longer holds.
    ///
    /// # Errors
    /// [`Kind::KeyReused`] where it came with another request, [`Kind::KeyBusy`] while that is at work,
    /// [`Kind::Busy`] where all keys are at work.
    pub(super) fn take(
        &self,
        asked: Option<(String, Request)>,
        still: impl Fn(&Answered) -> bool,
    ) -> Result<Turn<'_>, Failure> {
        let Some((key, request)) = asked else {
            return Ok(Turn::First(Claim { keys: self, key: None }));
        };
        let mut known = self.0.lock();
        known.retain(|one| one.key != key || one.answer.as_ref().is_none_or(&still));
        if let Some(one) = known.iter().find(|one| one.key == key) {
            return match &one.answer {
                _ if one.request != request => Err(Failure::new(
                    Kind::KeyReused,
                    "this Idempotency-Key came before with another body, signature or reason",
                )
                .hint("use a new key for each upload")),
                Some(answer) => Ok(Turn::Again(answer.clone())),
                None => {
                    Err(Failure::new(Kind::KeyBusy, "the request with this Idempotency-Key is still at work")
                        .retry_after(AT_WORK_RETRY_S))
                }
            };
        }
        if known.len() >= KEYS_MAX {
            let Some(oldest) = known.iter().position(|one| one.answer.is_some()) else {
                return Err(Failure::new(Kind::Busy, "too many uploads with keys are at work")
                    .retry_after(AT_WORK_RETRY_S));
            };
            known.remove(oldest);
        }
        known.push_back(Known { key: key.clone(), request, answer: None });
        Ok(Turn::First(Claim { keys: self, key: Some(key) }))
    }
}

impl Claim<'_> {
    /// Remembers the answer.
    pub(super) fn done(mut self, answer: &Answered) {
        let Some(key) = self.key.take() else { return };
        let mut known = self.keys.0.lock();
        if let Some(one) = known.iter_mut().find(|one| one.key == key) {
            one.answer = Some(answer.clone());
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            let mut known = self.keys.0.lock();
            known.retain(|one| one.key != key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::test::TestRequest;

    fn answer(n: u8) -> Answered {
        let digest = PolicyDigest::parse(&"0".repeat(64)).unwrap();
        Answered { digest, status: StatusCode::CREATED, location: None, body: vec![n] }
    }

    fn take<'k>(keys: &'k Keys, key: &str, parts: &[&[u8]]) -> Result<Turn<'k>, Failure> {
        keys.take(Some((key.into(), request_of(parts))), |_| true)
    }

    fn first(keys: &Keys, key: &str, body: u8) -> Answered {
        let Ok(Turn::First(claim)) = take(keys, key, &[&[body]]) else {
            panic!("{key} is not new");
        };
        claim.done(&answer(body));
        answer(body)
    }

    #[test]
    fn the_same_request_is_answered_as_the_first_time_and_another_is_refused() {
        let keys = Keys::default();
        let done = first(&keys, "a", 1);
        match take(&keys, "a", &[&[1]]).unwrap_or_else(|p| panic!("{p}")) {
            Turn::Again(again) => assert_eq!(again, done),
            Turn::First(_) => panic!("done twice"),
        }
        let other = take(&keys, "a", &[&[2]]).err().unwrap();
        assert_eq!(other.problem.status, 422);
        assert!(matches!(keys.take(None, |_| true), Ok(Turn::First(_))));
    }

    #[test]
    fn an_answer_that_no_longer_holds_is_not_given_again() {
        let keys = Keys::default();
        first(&keys, "a", 1);
        let gone = || keys.take(Some(("a".into(), request_of(&[&[1]]))), |_| false);
        assert!(matches!(gone(), Ok(Turn::First(_))));
        // One that is at work has no answer yet.
        let at_work = take(&keys, "b", &[]);
        assert_eq!(
            keys.take(Some(("b".into(), request_of(&[]))), |_| false).err().unwrap().problem.status,
            409
        );
        drop(at_work);
    }

    #[test]
    fn a_key_at_work_is_waited_for_and_one_that_failed_is_free_again() {
        let keys = Keys::default();
        let claim = take(&keys, "a", &[&[1]]);
        assert_eq!(take(&keys, "a", &[&[1]]).err().unwrap().problem.status, 409);
        assert_eq!(take(&keys, "a", &[&[2]]).err().unwrap().problem.status, 422);
        drop(claim);
        first(&keys, "a", 2);
    }

    #[test]
    fn as_many_keys_are_remembered_as_is_said_and_none_at_work_is_let_go_of() {
        let keys = Keys::default();
        let at_work = take(&keys, "at-work", &[]);
        for n in 0..10 * KEYS_MAX {
            first(&keys, &n.to_string(), 1);
        }
        assert_eq!(keys.0.lock().len(), KEYS_MAX);
        assert_eq!(take(&keys, "at-work", &[]).err().unwrap().problem.status, 409);
        let newest = (10 * KEYS_MAX - 1).to_string();
        assert!(matches!(take(&keys, &newest, &[&[1]]), Ok(Turn::Again(_))));
        drop(at_work);
        let all: Vec<_> = (0..KEYS_MAX).map(|n| take(&keys, &format!("w{n}"), &[])).collect();
        assert!(all.iter().all(Result::is_ok));
        assert_eq!(take(&keys, "one more", &[]).err().unwrap().problem.status, 503);
    }

    #[test]
    fn parts_of_a_request_do_not_run_together() {
        assert_ne!(request_of(&[b"ab", b"c"]), request_of(&[b"a", b"bc"]));
    }

    #[test]
    fn keys_are_one_visible_word() {
        let of = |values: &[&str]| {
            let mut request = TestRequest::default();
            for value in values {
                request = request.append_header((KEY, *value));
            }
            key_of(&request.to_http_request()).map_err(|p| p.problem.status)
        };
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&["8e03978e"]), Ok(Some("\n8e03978e".into())));
        assert_eq!(of(&["\"8e03978e\""]), Ok(Some("\n8e03978e".into())));
        let long = "x".repeat(KEY_BYTES_MAX + 1);
        for bad in [&[""][..], &["a b"], &["\"\""], &[&long], &["a", "a"]] {
            assert_eq!(of(bad), Err(400), "{bad:?}");
        }
    }
}
