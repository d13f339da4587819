//! Limits the memory of responses that clients have not read yet.
//!
//! The HTTP library copies small responses at once into buffers that each connection has. A larger one stays in
//! memory until its client has read it, for which the connection has a little more than a minute, and a client may
//! have many connections. So their sizes are counted, and responses beyond the limit are refused. The same request is
//! refused again, before its response is made, until the client has read something: making the response is most of
//! its cost. Texts that are part of the program do not count; event streams have permits of their own.

use crate::failure::Failure;
use crate::peer::Peer;
use crate::rate_limit::Client;
use actix_web::HttpRequest;
use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::ServiceResponse;
use actix_web::http::Method;
use berth_api::Kind;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Responses to authenticated clients, KiB. The largest lists, of 1,000 allocations or 500 decisions, have about 1
/// MiB: 48 of them, each on a connection of its own, although they are usually read within milliseconds.
const AUTHENTICATED_KIB: u32 = 48 * 1024;
/// Responses to all others, KiB. The only large one is a node's metrics, some 0.2 MiB, which all 64 connections of
/// the health listener may request: 13 MiB. With the above 64 MiB.
const UNAUTHENTICATED_KIB: u32 = 16 * 1024;
/// The reciprocal of one client's largest share: a client that reads nothing leaves the rest to others.
const SHARE: u32 = 2;
/// The `Retry-After`, seconds: by then a reading client has read its responses.
const RETRY_S: u64 = 5;
/// Memory of the HTTP library's compressor for one response, KiB.
const COMPRESSOR_KIB: u32 = 300;
/// Most requests of one client that are kept as refused; scripts and pages send few different ones.
const REFUSED_MAX: usize = 8;

/// The size of a response for the limit, KiB, if it is not that of its body. An extension of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight(u32);

impl Weight {
    /// None: it is part of the program, or shared by all clients.
    pub const NONE: Self = Self(0);

    /// So many KiB.
    #[must_use]
    pub const fn kib(kib: u32) -> Self {
        Self(kib)
    }

    /// The size of a response of so many bytes that the HTTP library compresses.
    pub(crate) fn compressed(bytes: u64) -> Self {
        Self(kib(bytes).saturating_add(COMPRESSOR_KIB))
    }
}

/// The authenticated client, an extension of the response.
pub(crate) struct AuthenticatedClient(pub(crate) Client);

/// The memory in use by authenticated and by other clients.
pub(crate) struct Budget {
    authenticated: Arc<Pool>,
    unauthenticated: Arc<Pool>,
}

struct Pool {
    kib_max: u32,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    kib: u32,
    /// The use by client; clients without any have no entry.
    of: HashMap<Client, Own>,
}

/// The use of one client.
#[derive(Default)]
struct Own {
    kib: u32,
    /// The requests that were refused since the client last read something, oldest first.
    refused: Vec<RequestHash>,
}

/// The hash of a request: a collision only refuses another request of the same client.
type RequestHash = u64;

/// Memory in use, until this is dropped.
pub(crate) struct Share {
    pool: Arc<Pool>,
    client: Client,
    kib: u32,
}

impl Default for Budget {
    fn default() -> Self {
        let pool = |kib_max| Arc::new(Pool { kib_max, held: Mutex::default() });
        Self { authenticated: pool(AUTHENTICATED_KIB), unauthenticated: pool(UNAUTHENTICATED_KIB) }
    }
}

impl Budget {
    /// Checks whether the response to an authenticated client's request is worth making.
    ///
    /// # Errors
    /// If it was refused, and the client has read nothing since.
    pub(crate) fn has_room(&self, client: &Client, request: &HttpRequest) -> Result<(), Failure> {
        match is_read(request) {
            true => self.authenticated.has_room(client, hash_of(request)),
            false => Ok(()),
        }
    }

    /// Counts a response's size, or replaces the response by a problem if that exceeds the limit. The response to a
    /// change is never refused, since the change is made; it counts, though.
    pub(crate) fn within(
        &self,
        response: ServiceResponse<BoxBody>,
    ) -> (ServiceResponse<BoxBody>, Option<Share>) {
        let Some(kib) = weight(&response) else { return (response, None) };
        let known =
            response.response().extensions().get::<AuthenticatedClient>().map(|known| known.0.clone());
        let request = response.request();
        let (pool, client) = match known {
            Some(client) => (&self.authenticated, client),
            None => (&self.unauthenticated, Client::of(request.conn_data::<Peer>())),
        };
        let hash = is_read(request).then(|| hash_of(request));
        match pool.take(client, kib, hash) {
            Ok(share) => (response, Some(share)),
            Err(problem) => (response.into_response(problem.response()), None),
        }
    }
}

/// The size of a response, KiB; `None` if it does not count.
fn weight(response: &ServiceResponse<BoxBody>) -> Option<u32> {
    let given = response.response().extensions().get::<Weight>().copied();
    let body = response.response().body();
    match (given, body.size()) {
        (Some(Weight(kib)), _) => Some(kib).filter(|kib| *kib > 0),
        (None, BodySize::Sized(bytes)) if !is_small(body) => Some(kib(bytes)),
        (None, _) => None,
    }
}

fn kib(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}

impl Pool {
    /// Takes memory for this client's response to this request; without a request it is always granted.
    fn take(self: &Arc<Self>, client: Client, kib: u32, hash: Option<RequestHash>) -> Result<Share, Failure> {
        let of_one = self.kib_max / SHARE;
        // A single response is never refused for its size.
        let kib = if hash.is_some() { kib.min(of_one) } else { kib };
        let mut held = self.held.lock();
        let all = held.kib.saturating_add(kib);
        let own = held.of.get_mut(&client);
        if let Some(hash) = hash {
            match own {
                Some(own) if own.kib.saturating_add(kib) > of_one => return Err(own.refuse(hash)),
                _ if all > self.kib_max => return Err(refusal(held.kib, "of responses to others")),
                _ => {}
            }
        }
        held.kib = all;
        let own = held.of.entry(client.clone()).or_default();
        own.kib = own.kib.saturating_add(kib);
        drop(held);
        Ok(Share { pool: Arc::clone(self), client, kib })
    }

    fn has_room(&self, client: &Client, hash: RequestHash) -> Result<(), Failure> {
        let held = self.held.lock();
        match held.of.get(client) {
            Some(own) if own.refused.contains(&hash) => Err(own.refusal()),
            _ => Ok(()),
        }
    }
}

impl Own {
    fn refuse(&mut self, hash: RequestHash) -> Failure {
        if !self.refused.contains(&hash) {
            if self.refused.len() == REFUSED_MAX {
                self.refused.remove(0);
            }
            self.refused.push(hash);
        }
        self.refusal()
    }

    fn refusal(&self) -> Failure {
        refusal(self.kib, "of responses to you on other connections")
    }
}

fn is_read(request: &HttpRequest) -> bool {
    matches!(*request.method(), Method::GET | Method::HEAD)
}

/// Path and query, as sent.
fn hash_of(request: &HttpRequest) -> RequestHash {
    let mut hasher = DefaultHasher::new();
    request.uri().hash(&mut hasher);
    hasher.finish()
}

fn refusal(kib: u32, of: &str) -> Failure {
    Failure::new(Kind::Unread, format!("{kib} KiB {of} are not read yet"))
        .retry_after(RETRY_S)
        .hint("read responses as they arrive, and request less at a time: `limit`")
}

impl Share {
    /// The size, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.kib) * 1024
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut held = self.pool.held.lock();
        held.kib = held.kib.saturating_sub(self.kib);
        let Some(own) = held.of.get_mut(&self.client) else { return };
        own.kib = own.kib.saturating_sub(self.kib);
        own.refused.clear();
        if own.kib == 0 {
            held.of.remove(&self.client);
        }
    }
}

/// Largest body that the HTTP library copies at once, bytes: what it buffers before it writes.
const SMALL_BYTES_MAX: u64 = 32 * 1024;

/// Whether the HTTP library copies the whole body of a response at once.
pub(crate) fn is_small(body: &BoxBody) -> bool {
    matches!(body.size(), BodySize::None | BodySize::Sized(..=SMALL_BYTES_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::HttpResponse;
    use actix_web::test::TestRequest;

    const ASKED: Option<RequestHash> = Some(0);

    fn pool() -> Arc<Pool> {
        Budget::default().authenticated
    }

    fn named(name: &str) -> Client {
        Client::Named("token", name.into())
    }

    #[test]
    fn one_client_has_at_most_half_of_it_and_all_have_it_back() {
        let pool = pool();
        let take = |who: &str| pool.take(named(who), 1024, ASKED);
        let half: Vec<_> = (0..24).map(|_| take("a").unwrap()).collect();
        let refused = take("a").err().unwrap();
        assert!(refused.problem.status == 503 && refused.problem.detail.contains("to you"), "{refused}");
        assert_eq!(refused.response().headers().get("retry-after").unwrap(), "5");
        let others: Vec<_> = (0..24).map(|n| take(&format!("b{n}")).unwrap()).collect();
        let refused = take("c").err().unwrap();
        assert!(refused.problem.status == 503 && refused.problem.detail.contains("others"), "{refused}");
        // The response to a change counts too, and is always sent.
        let changed = pool.take(named("a"), 1024, None).unwrap();
        assert_eq!(pool.held.lock().kib, AUTHENTICATED_KIB + 1024);
        drop((half, changed));
        assert!(take("c").is_ok() && take("a").is_ok());
        drop(others);
        let held = pool.held.lock();
        assert!(held.kib == 0 && held.of.is_empty());
    }

    #[test]
    fn a_refused_response_is_not_built_again_until_memory_is_free() {
        let pool = pool();
        let hash = |uri: &str| hash_of(&TestRequest::with_uri(uri).to_http_request());
        let take = |who: &str, uri: &str| pool.take(named(who), 8 * 1024, Some(hash(uri)));
        let room =
            |who: &str, uri| pool.has_room(&named(who), hash(uri)).map_err(|problem| problem.problem.detail);
        let mut own: Vec<_> = (0..3).map(|_| take("a", "/list?limit=9").unwrap()).collect();
        assert!(room("a", "/list?limit=9").is_ok(), "nothing was refused yet");
        assert!(take("a", "/list?limit=9").is_err());
        assert!(room("a", "/list?limit=9").unwrap_err().contains("24576 KiB of responses to you"));
        // Other requests may have small responses, and other clients have their own share.
        assert!(room("a", "/list?limit=1").is_ok() && room("a", "/list").is_ok());
        assert!(room("b", "/list?limit=9").is_ok());
        own.pop();
        assert!(room("a", "/list?limit=9").is_ok());
        own.push(take("a", "/list?limit=9").unwrap());
        let others: Vec<_> = ["b", "c", "d"].map(|who| take(who, "/").unwrap()).into_iter().collect();
        assert!(
            take("e", "/")
                .is_err_and(|problem| problem.problem.detail.contains("49152 KiB of responses to others"))
        );
        assert!(room("e", "/").is_ok(), "it may be made by the time that others have read");
        drop(others);
        // However many requests are refused, few are kept.
        for n in 0..2 * REFUSED_MAX {
            let uri = format!("/{n}");
            assert!(take("a", &uri).is_err());
        }
        assert_eq!(pool.held.lock().of[&named("a")].refused.len(), REFUSED_MAX);
        assert!(room("a", "/0").is_ok() && room("a", "/15").is_err());
    }

    #[test]
    fn an_answer_that_is_larger_than_a_share_is_let_through_alone() {
        let pool = pool();
        let large = pool.take(named("a"), u32::MAX, ASKED).unwrap();
        assert!(pool.take(named("a"), 1, ASKED).is_err() && pool.take(named("b"), 1, ASKED).is_ok());
        drop(large);
        assert!(pool.take(named("a"), 1, ASKED).is_ok());
    }

    #[test]
    fn small_and_static_bodies_are_not_counted() {
        let weight_of = |bytes: usize, given: Option<Weight>| {
            let mut response = HttpResponse::Ok().body(vec![0_u8; bytes]);
            if let Some(given) = given {
                response.extensions_mut().insert(given);
            }
            weight(&ServiceResponse::new(TestRequest::default().to_http_request(), response))
        };
        assert_eq!(weight_of(32 * 1024, None), None);
        assert_eq!(weight_of(32 * 1024 + 1, None), Some(33));
        assert_eq!(weight_of(1 << 20, Some(Weight::NONE)), None);
        assert_eq!(weight_of(1 << 20, Some(Weight::compressed(1 << 20))), Some(1324));
        assert_eq!(weight_of(10, Some(Weight(128))), Some(128));
    }

    #[test]
    fn unauthenticated_clients_have_a_budget_of_their_own() {
        let budget = Budget::default();
        let answer = |known: bool| {
            let mut response = HttpResponse::Ok().body(vec![0_u8; 1 << 20]);
            if known {
                response.extensions_mut().insert(AuthenticatedClient(named("a")));
            }
            let request = TestRequest::default().to_http_request();
            let (response, share) = budget.within(ServiceResponse::new(request, response));
            (response.status().as_u16(), share)
        };
        let strangers: Vec<_> = (0..8).map(|_| answer(false)).collect();
        assert!(strangers.iter().all(|(status, share)| *status == 200 && share.is_some()));
        assert_eq!(answer(false).0, 503);
        assert_eq!(answer(true).0, 200);
    }
}
