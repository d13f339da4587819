//! Authentication of guarded routes: the caller, its right, and its request rate.
//!
//! If a request has a bearer token, only the token counts, even if the connection has a client certificate or is
//! root's. GET and HEAD need the right to read; every other method needs the right to change, trials and replays
//! included, so that no route can omit the check.

use crate::caller::Identity;
use crate::certificate::ClientCertificate;
use crate::connection_slots::Slot;
use crate::failure::Failure;
use crate::peer::Peer;
use crate::rate_limit::{Client, Counted, Limiter};
use crate::reviews::Reviews;
use crate::route;
use crate::route_table::{Listener, Matched};
use crate::settings::{AdminAccess, AdminError, Right, Settings};
use crate::tls::Tls;
use crate::token::{self, Tokens};
use crate::unix_socket;
use actix_web::HttpRequest;
use actix_web::dev::ServiceRequest;
use actix_web::http::Method;
use berth_api::Kind;
use std::path::Path;
use std::sync::Arc;

/// Unauthenticated requests a second of one address: without a token, with a wrong one, or with one that the API
/// server has to review. Requests with the daemon's own tokens do not count, so no client locks another out. The same
/// limit holds for the requests of one user of the cluster, at any address, that the API server denies.
const UNAUTHENTICATED_PER_SECOND: u32 = 50;

/// Scrapes a second of one address, on the listener that needs no token: each scrape reads all metrics. A scraper
/// comes every few seconds, and several may share an address.
const SCRAPES_PER_SECOND: u32 = 20;

/// Longest path that is sent to the API server for review, bytes: paths with names of GPUs, allocations and policies
/// have at most 90.
const REVIEWED_PATH_BYTES_MAX: usize = 256;

/// The tokens, certificates and reviews that authenticate callers, and their limits.
pub struct AccessControl {
    tokens: Tokens,
    tls: Option<Arc<Tls>>,
    reviews: Option<Reviews>,
    reads: Limiter,
    changes: Limiter,
    unauthenticated: Limiter,
    forbidden: Limiter,
    scrapes: Limiter,
    own_uid: u32,
}

impl AccessControl {
    /// # Errors
    /// If a token's file or one of TLS cannot be used.
    pub(crate) fn open(settings: &Settings) -> Result<Self, AdminError> {
        let access = &settings.access;
        Ok(Self {
            tokens: Tokens::open(&settings.token_file, &access.tokens)?,
            tls: access.tls.clone().map(Tls::open).transpose()?,
            reviews: settings.reviewer.clone().map(Reviews::new),
            reads: Limiter::new("reads", access.limits.reads_per_second),
            changes: Limiter::new("changes", access.limits.changes_per_second),
            unauthenticated: Limiter::new("requests without a valid token", UNAUTHENTICATED_PER_SECOND),
            forbidden: Limiter::new("requests that are not allowed to them", UNAUTHENTICATED_PER_SECOND),
            scrapes: Limiter::new("scrapes", SCRAPES_PER_SECOND),
            own_uid: rustix::process::geteuid().as_raw(),
        })
    }

    /// The TLS of the admin listener, if it is configured.
    #[must_use]
    pub fn tls(&self) -> Option<&Arc<Tls>> {
        self.tls.as_ref()
    }

    /// Authenticates the caller. If `counted`, a request that fails to authenticate counts against the limit
    /// of its address.
    pub(crate) async fn identify(
        &self,
        request: &HttpRequest,
        counted: Counted,
    ) -> Result<Identity, Failure> {
        let peer = request.conn_data::<Peer>();
        let reject = |problem| self.unauthenticated.take_if(counted, &Client::of(peer)).and(Err(problem));
        let token = match token::bearer(request.headers()) {
            Ok(token) => token,
            Err(problem) => return reject(problem),
        };
        if let Some(token) = token {
            if let Some((name, right)) = self.tokens.find(token) {
                return Ok(Identity::with_right("token", name, right));
            }
            let Some(reviews) = &self.reviews else { return reject(token::wrong_token()) };
            let user = match reviews.cached_user(token) {
                Some(user) => user,
                None => {
                    // A token that was accepted before is not delayed by unauthenticated requests of the same
                    // network.
                    if !reviews.was_authenticated(token) {
                        self.unauthenticated.take_if(counted, &Client::of(peer))?;
                    }
                    reviews.authenticate(token, counted).await?.ok_or_else(token::wrong_token)?
                }
            };
            return Ok(Identity {
                name: user.name.as_str().into(),
                right: None,
                by: "kubernetes",
                user: Some(user),
            });
        }
        let known = match peer {
            Some(Peer::Unix { uid, .. }) => unix_socket::trusted(*uid, self.own_uid)
                .map(|name| Identity::with_right("socket", name, Right::Change))
                .ok_or_else(token::no_token),
            Some(Peer::Tls { certificate: Some(certificate), .. }) => self.certified(certificate, counted),
            _ => Err(token::no_token()),
        };
        known.or_else(reject)
    }

    fn certified(&self, certificate: &ClientCertificate, counted: Counted) -> Result<Identity, Failure> {
        let is_good = |tls: &&Arc<Tls>| match counted {
            Counted::Yes => certificate.is_good(tls),
            Counted::No => certificate.is_good_now(tls),
        };
        let Some(tls) = self.tls.as_ref().filter(is_good) else {
            return Err(Failure::new(
                Kind::Unauthorized,
                "the client certificate has expired, or its CA is no longer accepted",
            )
            .hint("renew it, and connect again")
            .challenge("Bearer"));
        };
        let Some(name) = certificate.name() else {
            return Err(Failure::new(
                Kind::Unauthorized,
                "the client certificate has no common name (CN) of 1 to 64 bytes",
            )
            .challenge("Bearer"));
        };
        let right = tls.right_of(name).ok_or_else(|| {
            Failure::new(Kind::Forbidden, format!("the client certificate of {name:?} gives no access here"))
                .hint(
                    "the daemon's configuration has the names with access: admin.tls.clients, and othersMay",
                )
        })?;
        Ok(Identity::with_right("certificate", name, right))
    }

    /// Checks whether the caller may do this now. A user of the cluster without the right has the rate of an
    /// unauthenticated client, since each of its pods has a token; its changes are still refused with the same
    /// message, and audited.
    pub(crate) async fn check_right(
        &self,
        caller: &Identity,
        request: &ServiceRequest,
    ) -> Result<(), Failure> {
        let needed = needed(request.method());
        let limiter = match needed {
            Right::Read => &self.reads,
            Right::Change => &self.changes,
        };
        limiter.take(&caller.client())?;
        // A browser sends its certificate with requests of any page; it does not do so with a token.
        if caller.by == "certificate" && needed == Right::Change {
            route::same_site(request.headers())?;
        }
        let path = || reviewed(request);
        if self.may(caller, request.method(), path, Counted::Yes).await? {
            return Ok(());
        }
        if caller.user.is_some() && needed == Right::Read {
            self.forbidden.take(&caller.client())?;
        }
        Err(forbidden(caller, needed))
    }

    /// `path`: the path for the API server's review, if there is one.
    async fn may<'p>(
        &self,
        caller: &Identity,
        method: &Method,
        path: impl FnOnce() -> Result<&'p str, Failure>,
        counted: Counted,
    ) -> Result<bool, Failure> {
        match (caller.right, &caller.user, &self.reviews) {
            (Some(right), ..) => Ok(right >= needed(method)),
            (None, Some(user), Some(reviews)) => reviews.authorize(user, method, path()?, counted).await,
            (None, ..) => Ok(false),
        }
    }

    /// Whether the caller of this request is still authorized: its token, certificate or right may have been removed.
    /// A caller that cannot be reviewed now stays authorized; rates do not count.
    pub async fn is_still_authorized(&self, request: &HttpRequest) -> bool {
        let path = route::path(request);
        let may = match self.identify(request, Counted::No).await {
            Ok(caller) => self.may(&caller, request.method(), || Ok(path), Counted::No).await,
            Err(problem) => Err(problem),
        };
        match may {
            Ok(may) => may,
            Err(failure) => !matches!(failure.problem.status, 401 | 403),
        }
    }

    /// Checks whether the caller may read what is open without a token on this node only, by the rules of guarded
    /// routes.
    ///
    /// # Errors
    /// If it may not.
    pub(crate) async fn may_read(&self, request: &ServiceRequest) -> Result<(), Failure> {
        let caller = self.identify(request.request(), Counted::Yes).await?;
        self.check_right(&caller, request).await?;
        mark_authenticated(request);
        Ok(())
    }

    /// Limits the rate of requests that need no token.
    pub(crate) fn limit_public(&self, request: &ServiceRequest) -> Result<(), Failure> {
        self.reads.take(&Client::of(request.conn_data::<Peer>()))
    }

    /// Limits the rate of scrapes on the health listener.
    pub(crate) fn limit_scrapes(&self, request: &ServiceRequest) -> Result<(), Failure> {
        self.scrapes.take(&Client::of(request.conn_data::<Peer>()))
    }
}

/// The path for the API server's review: as it is routed, without escapes, so that the review is about what is done.
/// A path without a route is not reviewed.
fn reviewed(request: &ServiceRequest) -> Result<&str, Failure> {
    let path = route::path(request.request());
    let matched = Matched::of(request.request())?;
    if matched.endpoint().is_none() {
        return Err(matched.table().nothing_at(path, Listener::Admin));
    }
    if path.len() > REVIEWED_PATH_BYTES_MAX {
        let rule = format!("the path is longer than {REVIEWED_PATH_BYTES_MAX} bytes");
        return Err(Failure::new(Kind::Path, rule));
    }
    Ok(path)
}

fn forbidden(caller: &Identity, needed: Right) -> Failure {
    let what = match needed {
        Right::Read => "read",
        Right::Change => "change anything",
    };
    let name = &caller.name;
    Failure::new(Kind::Forbidden, format!("{name:?} may not {what} here")).hint(match caller.by {
        "kubernetes" => "grant it in the cluster: a ClusterRole with nonResourceURLs /berth/* and the verb",
        _ => "use a token or a certificate with the right `change`",
    })
}

/// The right that a method needs.
pub(crate) fn needed(method: &Method) -> Right {
    match *method {
        Method::GET | Method::HEAD => Right::Read,
        _ => Right::Change,
    }
}

/// Marks the connection as one of an authenticated client.
pub(crate) fn mark_authenticated(request: &ServiceRequest) {
    if let Some(slot) = request.conn_data::<Arc<Slot>>() {
        slot.mark_authenticated();
    }
}

/// Reads the files that authentication reads at a start, tokens' and TLS', and reports the errors of a start. It
/// creates none, and the token of the first start may be missing.
///
/// Returns the key and the error of each file that cannot be used.
#[must_use]
pub fn check_files(token_file: &Path, access: &AdminAccess) -> Vec<(String, AdminError)> {
    let own = ("tokenFile".to_owned(), token::check_token_file(token_file));
    let named = access.tokens.iter().enumerate();
    let named = named.map(|(at, token)| (format!("admin.tokens[{at}].file"), token::check_given(token)));
    let tls = ("admin.tls".to_owned(), access.tls.clone().map(Tls::open).transpose().map(drop));
    let all = std::iter::once(own).chain(named).chain([tls]);
    all.filter_map(|(key, checked)| Some((key, checked.err()?))).collect()
}
