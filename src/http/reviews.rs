//! Callers that the cluster authenticates: the API server answers whose a token is (TokenReview) and what its user
//! may do (SubjectAccessReview). Without an answer the request is refused.

use crate::failure::Failure;
use crate::rate_limit::{Client, Counted, Limiter};
use crate::reviewer::{ClusterUser, Reviewer, ReviewerError};
use actix_web::http::Method;
use berth_api::Kind;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// How long the result of a review is used: a token or right that was removed works for as long.
const RESULT_VALID_FOR: Duration = Duration::from_secs(60);
/// Most users, and most results about their rights: paths contain names of GPUs and allocations. Some 200 bytes each.
const USERS_MAX: usize = 256;
const ANSWERS_MAX: usize = 4096;
/// Most concurrent reviews, to limit the load on the API server.
const REVIEWS_MAX: usize = 8;
/// Most concurrent reviews of tokens that were not valid recently: two permits are left for the others.
const UNKNOWN_TOKEN_REVIEWS_MAX: usize = 6;
/// Reviews a second for one token, or one user. A user who reads all of a node's API needs reviews of some 30 routes,
/// and of each GPU and allocation by its name.
const REVIEWS_PER_SECOND: u32 = 50;
/// Deadline of a review, with the wait for a permit.
const REVIEW_WAIT: Duration = Duration::from_secs(5);
/// Longest name of a user, bytes: a service account's has at most 339.
const USER_BYTES_MAX: usize = 512;
/// The prefix of the path in a review. Not `/api` itself: every cluster allows all authenticated users to read that
/// (ClusterRole system:discovery).
const PREFIX: &str = "/berth";

/// Sends reviews, and keeps their results for a while. Of tokens only SHA-256 hashes are kept.
pub(crate) struct Reviews {
    reviewer: Arc<dyn Reviewer>,
    users: ExpiringMap<Arc<ClusterUser>>,
    answers: ExpiringMap<bool>,
    places: Semaphore,
    unknown_tokens: Semaphore,
    often: Limiter,
}

impl Reviews {
    pub(crate) fn new(reviewer: Arc<dyn Reviewer>) -> Self {
        Self {
            reviewer,
            users: ExpiringMap::new(USERS_MAX),
            answers: ExpiringMap::new(ANSWERS_MAX),
            places: Semaphore::new(REVIEWS_MAX),
            unknown_tokens: Semaphore::new(UNKNOWN_TOKEN_REVIEWS_MAX),
            often: Limiter::new("reviews", REVIEWS_PER_SECOND),
        }
    }

    /// The user of the token, if it was reviewed within the last minute.
    pub(crate) fn cached_user(&self, token: &str) -> Option<Arc<ClusterUser>> {
        self.users.get(&key([token]), Instant::now())
    }

    /// Whether the last review of the token found a user, however long ago.
    pub(crate) fn was_authenticated(&self, token: &str) -> bool {
        self.users.has(&key([token]))
    }

    /// The user of the token; `None` if it is invalid.
    ///
    /// # Errors
    /// If it is reviewed too often, or the API server gives no answer.
    pub(crate) async fn authenticate(
        &self,
        token: &str,
        counted: Counted,
    ) -> Result<Option<Arc<ClusterUser>>, Failure> {
        let key = key([token]);
        self.often.take_if(counted, &Client::token(&key))?;
        let is_unknown = !self.users.has(&key);
        let found = self.ask(is_unknown, self.reviewer.authenticate(token.into())).await?;
        let size = 1..=USER_BYTES_MAX;
        let is_name =
            |user: &ClusterUser| size.contains(&user.name.len()) && !user.name.chars().any(char::is_control);
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
                        "the API server returned an invalid user name of {} bytes",
                        user.name.len()
                    );
                }
                Ok(None)
            }
        }
    }

    /// Whether the user may do this at `path`, a route's path without escapes.
    ///
    /// # Errors
    /// If the user causes too many reviews, or the API server gives no answer.
    pub(crate) async fn authorize(
        &self,
        user: &Arc<ClusterUser>,
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
        let answer = self.ask(false, self.reviewer.authorize(Arc::clone(user), verb, path)).await?;
        self.answers.put(key, answer, Instant::now());
        Ok(answer)
    }

    /// Sends a review once there is a permit. `is_unknown`: no earlier review of this token found a user.
    async fn ask<T>(
        &self,
        is_unknown: bool,
        review: impl Future<Output = Result<T, ReviewerError>>,
    ) -> Result<T, Failure> {
        let reviewed = tokio::time::timeout(REVIEW_WAIT, async {
            let _unknown_token_permit = match is_unknown {
                true => Some(self.unknown_tokens.acquire().await),
                false => None,
            };
            let _place = self.places.acquire().await;
            review.await
        });
        let failed = match reviewed.await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", REVIEW_WAIT.as_secs()),
        };
        // The response does not contain the cause: the caller is not authenticated.
        tracing::warn!("the API server cannot review callers of the admin API: {failed}");
        Err(Failure::new(Kind::NoReview, "the API server cannot review the token's user and rights")
            .retry_after(1)
            .hint("the daemon's log has the cause; the daemon's own tokens continue to work"))
    }
}

/// The verb for a method on a non-resource path.
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

/// Everything that the API server's answer may depend on.
fn about(user: &ClusterUser, verb: &str, path: &str) -> [u8; 32] {
    let ClusterUser { name, uid, groups, extra } = user;
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

/// Each part is preceded by its length, so that no two lists have the same text.
fn key<'p>(parts: impl IntoIterator<Item = &'p str>) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.len().to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// Results by hash, each for a minute, up to a limit.
struct ExpiringMap<T> {
    most: usize,
    all: Mutex<HashMap<[u8; 32], (Instant, T)>>,
}

impl<T: Clone> ExpiringMap<T> {
    fn new(most: usize) -> Self {
        Self { most, all: Mutex::default() }
    }

    fn get(&self, key: &[u8; 32], now: Instant) -> Option<T> {
        let all = self.all.lock();
        let (since, value) = all.get(key)?;
        (now.saturating_duration_since(*since) < RESULT_VALID_FOR).then(|| value.clone())
    }

    /// Whether there is a result, however old.
    fn has(&self, key: &[u8; 32]) -> bool {
        self.all.lock().contains_key(key)
    }

    fn forget(&self, key: &[u8; 32]) {
        self.all.lock().remove(key);
    }

    fn put(&self, key: [u8; 32], value: T, now: Instant) {
        let mut all = self.all.lock();
        if all.len() >= self.most {
            all.retain(|_, (since, _)| now.saturating_duration_since(*since) < RESULT_VALID_FOR);
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
    fn a_review_is_cached_for_a_minute_and_the_oldest_is_evicted() {
        let kept = ExpiringMap::new(3);
        let start = Instant::now();
        for i in 0..4_u8 {
            kept.put([i; 32], i, start + Duration::from_secs(u64::from(i)));
        }
        let later = start + Duration::from_secs(5);
        assert_eq!(kept.get(&[0; 32], later), None);
        assert_eq!(kept.get(&[3; 32], later), Some(3));
        assert_eq!(kept.all.lock().len(), 3);
        assert_eq!(kept.get(&[3; 32], start + Duration::from_secs(3) + RESULT_VALID_FOR), None);
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
        let user = |groups: &[&str], extra: &[(&str, &[&str])]| ClusterUser {
            name: "ann".into(),
            uid: None,
            groups: list(groups),
            extra: extra.iter().map(|(key, values)| ((*key).to_owned(), list(values))).collect(),
        };
        let all = [
            user(&[], &[]),
            ClusterUser { uid: Some(String::new()), ..user(&[], &[]) },
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
