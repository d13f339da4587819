//! The door of `/api/v1`: who asks, whether they may, how often, and the audit line of what they change.
//!
//! A bearer token that comes decides alone, even where the connection has a certificate or is root's:
//! whoever shows one means it. Reading is GET and HEAD; every other method is changing, trials and
//! replays among them, so that no route can forget to say so.

use super::audit::Line;
use super::auth;
use super::caller::{self, Caller, Said};
use super::certificate::ClientCertificate;
use super::context::context;
use super::error::AdminError;
use super::failure::Failure;
use super::host;
use super::peer::Peer;
use super::rate_limit::{Client, Counted, Limiter};
use super::response_budget::Known;
use super::reviews::Reviews;
use super::route;
use super::server_settings::Settings;
use super::slot::Slot;
use super::tls::Tls;
use super::token::Tokens;
use super::traced;
use super::unix_socket;
use crate::settings::Right;
use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::Method;
use actix_web::middleware::Next;
use actix_web::{Error, HttpRequest};
use berth_api::Kind;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Requests a second of one address that open nothing: without a token, with a wrong one, or with one
/// that the API server is asked about. Own tokens are not among them, so nobody is locked out by others. And as many
/// of one user of the cluster, wherever they are, that the API server says they may not make.
const STRANGERS_PER_SECOND: u32 = 50;

/// Scrapes a second of one address, on the listener that needs no token: each walks over all figures. A
/// scraper comes every few seconds, and some look at a node through the same address.
const SCRAPES_PER_SECOND: u32 = 20;

/// Longest path that the API server is asked about, bytes: names of GPUs, allocations and policies have at
/// most 90.
const REVIEWED_PATH_BYTES_MAX: usize = 256;

/// Everything that lets in.
pub struct Access {
    tokens: Tokens,
    tls: Option<Arc<Tls>>,
    /// What each client certificate's name may do.
    clients: BTreeMap<String, Right>,
    /// What certificates of other names may do.
    others: Option<Right>,
    reviews: Option<Reviews>,
    reads: Limiter,
    changes: Limiter,
    strangers: Limiter,
    forbidden: Limiter,
    scrapes: Limiter,
    own_uid: u32,
}

impl Access {
    /// # Errors
    /// If a token's file or one of TLS cannot be used.
    pub(super) fn open(settings: &Settings) -> Result<Self, AdminError> {
        let access = &settings.access;
        Ok(Self {
            tokens: Tokens::open(&settings.token_file, &access.tokens)?,
            tls: access.tls.clone().map(Tls::open).transpose()?,
            clients: access.tls.as_ref().and_then(|tls| tls.clients.clone()).unwrap_or_default(),
            others: access.tls.as_ref().and_then(|tls| tls.others_may),
            reviews: settings.reviewer.clone().map(Reviews::new),
            reads: Limiter::new("reads", access.limits.reads_per_second),
            changes: Limiter::new("changes", access.limits.changes_per_second),
            strangers: Limiter::new("requests without a valid token", STRANGERS_PER_SECOND),
            forbidden: Limiter::new("requests that they may not make", STRANGERS_PER_SECOND),
            scrapes: Limiter::new("scrapes", SCRAPES_PER_SECOND),
            own_uid: rustix::process::geteuid().as_raw(),
        })
    }

    /// The TLS of the admin listener, if it has any.
    #[must_use]
    pub fn tls(&self) -> Option<&Arc<Tls>> {
        self.tls.as_ref()
    }

    /// Who asks. Who is none counts among the strangers of their address, if this counts.
    async fn known(&self, request: &HttpRequest, counted: Counted) -> Result<Caller, Failure> {
        let peer = request.conn_data::<Peer>();
        let stranger = |problem| self.strangers.take_if(counted, &Client::of(peer)).and(Err(problem));
        let token = match auth::bearer(request.headers()) {
            Ok(token) => token,
            Err(problem) => return stranger(problem),
        };
        if let Some(token) = token {
            if let Some((name, right)) = self.tokens.find(token) {
                return Ok(Caller { name, right: Some(right), by: "token", user: None });
            }
            let Some(reviews) = &self.reviews else { return stranger(auth::wrong_token()) };
            let user = match reviews.known(token) {
                Some(user) => user,
                None => {
                    // Whoever was known is not held up by the strangers of their network.
                    if !reviews.was_known(token) {
                        self.strangers.take_if(counted, &Client::of(peer))?;
                    }
                    reviews.who(token, counted).await?.ok_or_else(auth::wrong_token)?
                }
            };
            return Ok(Caller {
                name: user.name.as_str().into(),
                right: None,
                by: "kubernetes",
                user: Some(user),
            });
        }
        let known = match peer {
            Some(Peer::Unix { uid, .. }) => unix_socket::trusted(*uid, self.own_uid)
                .map(|name| Caller {
                    name: name.into(),
                    right: Some(Right::Change),
                    by: "socket",
                    user: None,
                })
                .ok_or_else(auth::no_token),
            Some(Peer::Tls { certificate: Some(certificate), .. }) => self.certified(certificate, counted),
            _ => Err(auth::no_token()),
        };
        known.or_else(stranger)
    }

    fn certified(&self, certificate: &ClientCertificate, counted: Counted) -> Result<Caller, Failure> {
        let is_good = |tls: &Arc<Tls>| match counted {
            Counted::Yes => certificate.is_good(tls),
            Counted::No => certificate.is_good_now(tls),
        };
        if !self.tls.as_ref().is_some_and(is_good) {
            return Err(Failure::new(
                Kind::Unauthorized,
                "the client certificate has expired, or its CA is no longer taken",
            )
            .hint("renew it, and connect anew")
            .challenge("Bearer"));
        }
        let Some(name) = certificate.name() else {
            return Err(Failure::new(
                Kind::Unauthorized,
                "the client certificate has no common name (CN) of 1 to 64 bytes",
            )
            .challenge("Bearer"));
        };
        let right = self.clients.get(name).copied().or(self.others).ok_or_else(|| {
            Failure::new(Kind::Forbidden, format!("the client certificate of {name:?} opens nothing here"))
                .hint("the daemon's configuration says which do: admin.tls.clients, and othersMay")
        })?;
        Ok(Caller { name: name.into(), right: Some(right), by: "certificate", user: None })
    }

    /// Whether they may do this, now. A user of the cluster who may not may ask as rarely as a stranger, since all
    /// of its pods have a token; what they would change is refused by the same words all the same, and audited.
    async fn permits(&self, caller: &Caller, request: &ServiceRequest) -> Result<(), Failure> {
        let needed = needed(request.method());
        let limiter = match needed {
            Right::Read => &self.reads,
            Right::Change => &self.changes,
        };
        limiter.take(&caller.client())?;
        // A browser sends its certificate along with what any page makes it ask. A token it does not.
        if caller.by == "certificate" && needed == Right::Change {
            host::same_site(request.headers())?;
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

    /// `path`: what the API server is asked about, where it is.
    async fn may<'p>(
        &self,
        caller: &Caller,
        method: &Method,
        path: impl FnOnce() -> Result<&'p str, Failure>,
        counted: Counted,
    ) -> Result<bool, Failure> {
        match (caller.right, &caller.user, &self.reviews) {
            (Some(right), ..) => Ok(right >= needed(method)),
            (None, Some(user), Some(reviews)) => reviews.may(user, method, path()?, counted).await,
            (None, ..) => Ok(false),
        }
    }

    /// Whether whoever was let in to this route with this request would be now: their token, certificate or
    /// right may have been taken away. Where it cannot be asked, they are; how often others ask does not count.
    pub async fn still(&self, request: &HttpRequest) -> bool {
        let route = request.match_pattern().unwrap_or_default();
        let may = match self.known(request, Counted::No).await {
            Ok(caller) => self.may(&caller, request.method(), || Ok(&route), Counted::No).await,
            Err(problem) => Err(problem),
        };
        match may {
            Ok(may) => may,
            Err(failure) => !matches!(failure.problem.status, 401 | 403),
        }
    }

    /// Whether they may read what is open to this node alone: the same rules as below `/api/v1`.
    ///
    /// # Errors
    /// Why not.
    pub(super) async fn may_read(&self, request: &ServiceRequest) -> Result<(), Failure> {
        let caller = self.known(request.request(), Counted::Yes).await?;
        self.permits(&caller, request).await?;
        know(request);
        Ok(())
    }

    /// Whether whoever asks for what needs no token asks too often.
    pub(super) fn limit_public(&self, request: &ServiceRequest) -> Result<(), Failure> {
        self.reads.take(&Client::of(request.conn_data::<Peer>()))
    }

    /// Whether whoever asks the health listener for all figures does so too often. Probes are never too many.
    pub(super) fn limit_scrapes(&self, request: &ServiceRequest) -> Result<(), Failure> {
        match route::path(request) {
            "/metrics" => self.scrapes.take(&Client::of(request.conn_data::<Peer>())),
            _ => Ok(()),
        }
    }
}

/// What the API server is asked about: the path as it is routed, with its escapes undone, so that it is
/// asked about what is then done. What is at no route it is not asked about.
fn reviewed(request: &ServiceRequest) -> Result<&str, Failure> {
    let path = route::path(request);
    if request.resource_map().match_pattern(path).is_none() {
        return Err(route::nothing_at(path));
    }
    if path.len() > REVIEWED_PATH_BYTES_MAX {
        let rule = format!("the path is longer than {REVIEWED_PATH_BYTES_MAX} bytes");
        return Err(Failure::new(Kind::Path, rule));
    }
    Ok(path)
}

fn forbidden(caller: &Caller, needed: Right) -> Failure {
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

fn needed(method: &Method) -> Right {
    match *method {
        Method::GET | Method::HEAD => Right::Read,
        _ => Right::Change,
    }
}

/// Its connection has let somebody in.
fn know(request: &ServiceRequest) {
    if let Some(slot) = request.conn_data::<Arc<Slot>>() {
        slot.know();
    }
}

/// Wraps all of /api/v1, unknown routes under it too.
pub(super) async fn kernel(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let context = context(&request)?;
    let mut line = (needed(request.method()) == Right::Change).then(|| Line::of(&request));
    let let_in = match context.access.known(request.request(), Counted::Yes).await {
        Ok(caller) => {
            if let Some(line) = &mut line {
                line.caller(&caller);
            }
            match context.access.permits(&caller, &request).await {
                Ok(()) => {
                    know(&request);
                    context.budget.has_room(&caller.client(), request.request()).map(|()| caller)
                }
                Err(problem) => Err(problem),
            }
        }
        Err(problem) => Err(problem),
    };
    let answered = match let_in {
        Err(problem) => Ok(request.into_response(problem.response())),
        Ok(caller) => {
            let client = caller.client();
            let said = Said::new(caller);
            if let Some(line) = &mut line {
                line.listen(&said);
            }
            caller::scope(said, traced::call(request, next)).await.map(|response| {
                let mut response = response.map_into_boxed_body();
                response.response_mut().extensions_mut().insert(Known(client));
                response
            })
        }
    };
    if let Some(line) = line {
        line.answered(match &answered {
            Ok(response) => response.status(),
            Err(error) => error.as_response_error().status_code(),
        });
    }
    answered
}
