//! Callers whom the cluster knows: the API server says who has a token (TokenReview) and what they may
//! do here (SubjectAccessReview). What it does not say is a no.

use super::failure::Failure;
use super::rate_limit::{Client, Counted, Limiter};
use actix_web::http::Method;
use berth_api::Kind;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// A review's answer is used for so long: a token or a right that was taken away opens for as long.
const KEPT_FOR: Duration = Duration::from_secs(60);
/// Users of one node's API at a time, and answers about what they may do: paths name GPUs and pods'
/// allocations. Some 200 bytes each.
const USERS_MAX: usize = 256;
const ANSWERS_MAX: usize = 4096;
/// Reviews under way at a time; the API server has others to answer.
const REVIEWS_MAX: usize = 8;
/// Of them, those of tokens that no user of the last while had: strangers leave two places to the others.
const STRANGE_MAX: usize = 6;
/// Reviews a second that one token, or one user, causes. A user who looks at all of a node's API asks of
/// some 30 routes, and of each GPU and allocation by its name.
const REVIEWS_PER_SECOND: u32 = 50;
/// Longest wait for a review, with the wait for a place.
const REVIEW_WAIT: Duration = Duration::from_secs(5);
/// Longest name of a user, bytes: that of a service account has at most 339.
const USER_BYTES_MAX: usize = 512;
/// Comes before the path in what the API server is asked. Not `/api` itself: every cluster lets all who
/// have any token at all read that (ClusterRole system:discovery).
const PREFIX: &str = "/berth";

/// A user as the API server knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// Such as `system:serviceaccount:monitoring:grafana`.
    pub name: String,
    /// Tells apart users who had the same name.
    pub uid: Option<String>,
    /// Groups they are in.
    pub groups: Vec<String>,
    /// Whatever else the cluster knows.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// The API server did not say.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ReviewError(pub String);

/// Who asks the API server; the daemon hands it in. A question begins when it is first polled, and ends
/// where it is dropped: how many are under way is counted by whoever waits for them.
pub trait Reviewer: Send + Sync {
    /// Whose token it is; `None`: nobody's.
    fn who(&self, token: String) -> BoxFuture<'static, Result<Option<User>, ReviewError>>;
    /// Whether the user may do `verb` (an HTTP method in small letters) at this path, which is no
    /// resource's.
    fn may(
        &self,
        user: Arc<User>,
        verb: &'static str,
        path: String,
    ) -> BoxFuture<'static, Result<bool, ReviewError>>;
}

/// Asks, and keeps the answers for a while. Only SHA-256 hashes of tokens are kept.
pub(super) struct Reviews {
    reviewer: Arc<dyn Reviewer>,
    users: Kept<Arc<User>>,
    answers: Kept<bool>,
    places: Semaphore,
    strange: Semaphore,
    often: Limiter,
}

impl Reviews {
    pub(super) fn new(reviewer: Arc<dyn Reviewer>) -> Self {
        Self {
            reviewer,
            users: Kept::new(USERS_MAX),
            answers: Kept::new(ANSWERS_MAX),
            places: Semaphore::new(REVIEWS_MAX),
            strange: Semaphore::new(STRANGE_MAX),
            often: Limiter::new("reviews", REVIEWS_PER_SECOND),
        }
    }

    /// Who has the token, if that was asked within the last minute.
    pub(super) fn known(&self, token: &str) -> Option<Arc<User>> {
        self.users.get(&key([token]), Instant::now())
    }

    /// Whether somebody had the token when that was asked last, however long ago.
    pub(super) fn was_known(&self, token: &str) -> bool {
        self.users.has(&key([token]))
    }

    /// Who has the token; `None`: nobody.
    ///
    /// # Errors
    /// If it is asked about too often, or the API server does not say.
    pub(super) async fn who(&self, token: &str, counted: Counted) -> Result<Option<Arc<User>>, Failure> {
        let key = key([token]);
        self.often.take_if(counted, &Client::token(&key))?;
        let strange = !self.users.has(&key);
        let found = self.ask(strange, self.reviewer.who(token.into())).await?;
        let size = 1..=USER_BYTES_MAX;
        let is_name =
            |user: &User| size.contains(&user.name.len()) && !user.name.chars().any(char::is_control);
        match found {
            Some(user) if is_name(&user) => {
                let user = Arc::new(user);
                self.users.put(key, Arc::clone(&user), Instant::now());
                Ok(Some(user))
            }
            other => {
                self.users.forget(&key);
                if let Some(user) = other {
                    tracing::warn!(
                        "the API server names a user in {} bytes that are no name",
                        user.name.len()
                    );
                }
                Ok(None)
            }
        }
    }

    /// Whether the user may do this at `path`, which is one of a route's, decoded.
    ///
    /// # Errors
    /// If they cause too many questions, or the API server does not say.
    pub(super) async fn may(
        &self,
        user: &Arc<User>,
        method: &Method,
        path: &str,
        counted: Counted,
    ) -> Result<bool, Failure> {
        let Some(verb) = verb(method) else { return Ok(false) };
        let path = format!("{PREFIX}{path}");
        let key = about(user, verb, &path);
        if let Some(answer) = self.answers.get(&key, Instant::now()) {
            return Ok(answer);
        }
        self.often.take_if(counted, &Client::Named("kubernetes", user.name.as_str().into()))?;
        let answer = self.ask(false, self.reviewer.may(Arc::clone(user), verb, path)).await?;
        self.answers.put(key, answer, Instant::now());
        Ok(answer)
    }

    /// Asks once there is a place. `strange`: nobody was ever known by what is asked about.
    async fn ask<T>(
        &self,
        strange: bool,
        review: impl Future<Output = Result<T, ReviewError>>,
    ) -> Result<T, Failure> {
        let asked = tokio::time::timeout(REVIEW_WAIT, async {
            let _one_of_few = match strange {
                true => Some(self.strange.acquire().await),
                false => None,
            };
            let _place = self.places.acquire().await;
            review.await
        });
        let failed = match asked.await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", REVIEW_WAIT.as_secs()),
        };
        // The answer does not say why: whoever asks is a stranger so far.
        tracing::warn!("the API server does not say who may use the admin API: {failed}");
        Err(Failure::new(Kind::NoReview, "the API server does not say who this is and what they may do")
            .retry_after(1)
            .hint("the daemon's log says why; a token of the daemon's own opens meanwhile"))
    }
}

/// What the API server calls a method on a path that is no resource's.
fn verb(method: &Method) -> Option<&'static str> {
    Some(match method.as_str() {
        "GET" | "HEAD" => "get",
        "POST" => "post",
        "PUT" => "put",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => return None,
    })
}

/// All that an answer of the API server may hang on.
fn about(user: &User, verb: &str, path: &str) -> [u8; 32] {
    let User { name, uid, groups, extra } = user;
    let count = |n: usize| n.to_string();
    let mut parts = vec![name.clone(), count(uid.iter().len()), uid.clone().unwrap_or_default()];
    parts.push(count(groups.len()));
    parts.extend(groups.iter().cloned());
    parts.push(count(extra.len()));
    for (key, values) in extra {
        parts.extend([key.clone(), count(values.len())]);
        parts.extend(values.iter().cloned());
    }
    parts.extend([verb.to_owned(), path.to_owned()]);
    key(parts.iter().map(String::as_str))
}

/// Each part with its length before it, so that no two lists are one text.
fn key<'p>(parts: impl IntoIterator<Item = &'p str>) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.len().to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// Answers by hash, each for a minute, at most so many.
struct Kept<T> {
    most: usize,
    all: Mutex<HashMap<[u8; 32], (Instant, T)>>,
}

impl<T: Clone> Kept<T> {
    fn new(most: usize) -> Self {
        Self { most, all: Mutex::default() }
    }

    fn get(&self, key: &[u8; 32], now: Instant) -> Option<T> {
        let all = self.all.lock();
        let (since, value) = all.get(key)?;
        (now.saturating_duration_since(*since) < KEPT_FOR).then(|| value.clone())
    }

    /// Whether there is an answer, however old.
    fn has(&self, key: &[u8; 32]) -> bool {
        self.all.lock().contains_key(key)
    }

    fn forget(&self, key: &[u8; 32]) {
        self.all.lock().remove(key);
    }

    fn put(&self, key: [u8; 32], value: T, now: Instant) {
        let mut all = self.all.lock();
        if all.len() >= self.most {
            all.retain(|_, (since, _)| now.saturating_duration_since(*since) < KEPT_FOR);
        }
        if all.len() >= self.most
            && let Some(oldest) = all.iter().min_by_key(|(_, (since, _))| *since).map(|(key, _)| *key)
        {
            all.remove(&oldest);
        }
        all.insert(key, (now, value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_kept_for_a_minute_and_the_oldest_makes_room() {
        let kept = Kept::new(3);
        let start = Instant::now();
        for i in 0..4_u8 {
            kept.put([i; 32], i, start + Duration::from_secs(u64::from(i)));
        }
        let later = start + Duration::from_secs(5);
        assert_eq!(kept.get(&[0; 32], later), None);
        assert_eq!(kept.get(&[3; 32], later), Some(3));
        assert_eq!(kept.all.lock().len(), 3);
        assert_eq!(kept.get(&[3; 32], start + Duration::from_secs(3) + KEPT_FOR), None);
    }

    #[test]
    fn two_questions_are_never_one() {
        assert_ne!(key(["a", "bc"]), key(["ab", "c"]));
        assert_ne!(key(["a", ""]), key(["a"]));
        assert_eq!(verb(&Method::HEAD), Some("get"));
        assert_eq!(verb(&Method::OPTIONS), None);
    }

    #[test]
    fn an_answer_hangs_on_all_that_the_cluster_knows_of_a_user() {
        let list = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
        let user = |groups: &[&str], extra: &[(&str, &[&str])]| User {
            name: "ann".into(),
            uid: None,
            groups: list(groups),
            extra: extra.iter().map(|(key, values)| ((*key).to_owned(), list(values))).collect(),
        };
        let all = [
            user(&[], &[]),
            User { uid: Some(String::new()), ..user(&[], &[]) },
            user(&["a", "b"], &[]),
            user(&["a\nb"], &[]),
            user(&["b", "a"], &[]),
            user(&[], &[("scopes", &["read"])]),
            user(&[], &[("scopes", &["read", "write"])]),
            user(&[], &[("scopes", &["read"]), ("write", &[])]),
            user(&["scopes"], &[("1", &["read"])]),
        ];
        for (i, one) in all.iter().enumerate() {
            for other in &all[i + 1..] {
                assert_ne!(about(one, "get", "/x"), about(other, "get", "/x"), "{one:?} {other:?}");
            }
        }
    }
}
