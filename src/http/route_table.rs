//! The routes of an application, as one table. From it come what each listener serves, the methods of a 405, the
//! label of a path in metrics and traces, and what is checked before a handler is called: the query and the conditions
//! of a request.

use crate::failure::Failure;
use crate::route;
use actix_web::dev::ServiceRequest;
use actix_web::http::Method;
use actix_web::web;
use actix_web::{HttpMessage, HttpRequest, HttpResponse, Route, guard};
use berth_api::Kind;
use std::collections::HashMap;

/// A method that routes have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// GET, and HEAD with it.
    Get,
    /// PUT
    Put,
    /// POST
    Post,
    /// DELETE
    Delete,
}

impl Verb {
    /// All of them, in the order of an `Allow` header.
    const ALL: [Self; 4] = [Self::Get, Self::Put, Self::Post, Self::Delete];

    fn of(method: &Method) -> Option<Self> {
        match *method {
            Method::GET | Method::HEAD => Some(Self::Get),
            Method::PUT => Some(Self::Put),
            Method::POST => Some(Self::Post),
            Method::DELETE => Some(Self::Delete),
            _ => None,
        }
    }

    /// Its methods in an `Allow` header.
    fn methods(self) -> &'static str {
        match self {
            Self::Get => "GET, HEAD",
            Self::Put => "PUT",
            Self::Post => "POST",
            Self::Delete => "DELETE",
        }
    }

    fn route(self) -> Route {
        match self {
            Self::Get => web::route().guard(guard::Any(guard::Get()).or(guard::Head())),
            Self::Put => web::put(),
            Self::Post => web::post(),
            Self::Delete => web::delete(),
        }
    }
}

/// Who may use a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Callers that are authenticated and have the right that the method needs.
    Guarded,
    /// Any client of the admin listener.
    Open,
    /// As [`Self::Open`], and any client of the health listener. From another machine the details need the right to
    /// read.
    Probe,
    /// As [`Self::Probe`], but from another machine all of it needs the right to read, and its rate on the health
    /// listener is limited.
    Scrape,
}

/// Which queries a route has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryRule {
    /// None: every key is refused.
    None,
    /// Those of the handler's type, which refuses other keys.
    Typed,
    /// Any: a browser may add keys to what it opens.
    Any,
}

/// One row of the table: a method of a path.
#[derive(Clone, Copy)]
pub struct RouteRow {
    /// The method.
    pub verb: Verb,
    /// The whole path, with `{name}` for each part that varies.
    pub path: &'static str,
    /// Adds the handler.
    pub handler: fn(Route) -> Route,
    /// Who may use it; the same for all rows of a path.
    pub audience: Audience,
    /// Its query.
    pub query: QueryRule,
    /// Whether its handler passes `If-Match` on as a condition.
    pub takes_if_match: bool,
}

/// A path with its rows.
pub(crate) struct Endpoint {
    pub(crate) path: &'static str,
    /// The path in metrics and traces.
    pub(crate) label: String,
    allow: String,
    pub(crate) audience: Audience,
    rows: Vec<&'static RouteRow>,
}

impl Endpoint {
    fn new(first: &'static RouteRow) -> Self {
        let label = first.path.replace(":.*}", "}");
        Self { path: first.path, label, allow: String::new(), audience: first.audience, rows: Vec::new() }
    }

    fn row(&self, method: &Method) -> Option<&'static RouteRow> {
        let verb = Verb::of(method)?;
        self.rows.iter().copied().find(|row| row.verb == verb)
    }

    fn method_not_allowed(&'static self, request: &HttpRequest) -> HttpResponse {
        let (method, path, allow) = (request.method(), request.path(), self.allow.as_str());
        let detail = format!("{method} is not a method of {path}; it has {allow}");
        Failure::new(Kind::Method, detail).allow(allow).response()
    }
}

/// Which of its listeners the server adds routes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listener {
    /// The admin listener, or the socket: all routes.
    Admin,
    /// The health listener: probes and scrapes.
    Health,
}

impl Listener {
    /// Whether it has routes for this audience.
    pub(crate) fn serves(self, audience: Audience) -> bool {
        self == Self::Admin || matches!(audience, Audience::Probe | Audience::Scrape)
    }
}

/// All routes of an application.
pub struct RouteTable {
    /// The path below which everything needs a token, also what is not a route.
    pub(crate) guarded: &'static str,
    /// What a client does about an unknown path of the admin listener.
    admin_hint: &'static str,
    /// The same for the health listener.
    health_hint: &'static str,
    /// In the order of their first rows.
    pub(crate) endpoints: Vec<Endpoint>,
    by_path: HashMap<&'static str, usize>,
}

impl RouteTable {
    /// A table of these rows. `guarded`: the path below which everything needs a token; the hints are those of an
    /// unknown path. A test of the application checks its rows with [`Self::mistakes`].
    pub fn new(
        guarded: &'static str,
        admin_hint: &'static str,
        health_hint: &'static str,
        rows: impl Iterator<Item = &'static RouteRow>,
    ) -> Self {
        let mut endpoints: Vec<Endpoint> = Vec::new();
        let mut by_path = HashMap::new();
        for row in rows {
            let at = *by_path.entry(row.path).or_insert_with(|| {
                endpoints.push(Endpoint::new(row));
                endpoints.len() - 1
            });
            endpoints[at].rows.push(row);
        }
        for endpoint in &mut endpoints {
            let has = |verb: &Verb| endpoint.rows.iter().any(|row| row.verb == *verb);
            let methods = Verb::ALL.into_iter().filter(has).map(Verb::methods);
            endpoint.allow = methods.collect::<Vec<_>>().join(", ");
        }
        Self { guarded, admin_hint, health_hint, endpoints, by_path }
    }

    /// What is wrong with the rows, in a sentence each: such rows would be served at another path, without their
    /// checks, or not at all.
    pub fn mistakes(&self) -> Vec<String> {
        let mut mistakes = Vec::new();
        let mut spellings: HashMap<String, &str> = HashMap::new();
        for (at, endpoint) in self.endpoints.iter().enumerate() {
            let path = endpoint.path;
            if !path.starts_with('/') {
                mistakes.push(format!("{path} does not begin with /"));
            }
            if (endpoint.audience == Audience::Guarded) != self.is_guarded(path) {
                mistakes.push(format!("{path} is for {:?}", endpoint.audience));
            }
            if endpoint.rows.iter().any(|row| row.audience != endpoint.audience) {
                mistakes.push(format!("{path} has rows for several audiences"));
            }
            let verbs = |verb: &Verb| endpoint.rows.iter().filter(|row| row.verb == *verb).count();
            mistakes.extend(
                Verb::ALL
                    .iter()
                    .filter(|verb| verbs(verb) > 1)
                    .map(|verb| format!("{path} has {verb:?} twice")),
            );
            // Two names of the same part are two resources, of which the first answers for both.
            if let Some(other) = spellings.insert(with_unnamed_parts(path), path) {
                mistakes.push(format!("{path} and {other} are the same path"));
            }
            let hides = |earlier: &&Endpoint| earlier.path != path && is_match(earlier.path, path);
            let earlier = self.endpoints[..at].iter().find(hides);
            mistakes.extend(earlier.map(|earlier| format!("{path} comes after {}", earlier.path)));
        }
        mistakes
    }

    /// Whether a path needs a token, whether or not it is a route.
    pub(crate) fn is_guarded(&self, path: &str) -> bool {
        let rest = path.strip_prefix(self.guarded);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// The problem of a path without a route.
    pub(crate) fn nothing_at(&self, path: &str, listener: Listener) -> Failure {
        let path: String = path.chars().take(200).collect();
        let hint = match listener {
            Listener::Admin => self.admin_hint,
            Listener::Health => self.health_hint,
        };
        Failure::new(Kind::NoRoute, format!("there is no route {path}")).hint(hint)
    }
}

/// A path whose varying parts have no names.
fn with_unnamed_parts(path: &str) -> String {
    path.split('/').map(|one| if one.starts_with('{') { "{}" } else { one }).collect::<Vec<_>>().join("/")
}

/// Whether a template matches the path `literal`, part by part.
fn is_match(template: &str, literal: &str) -> bool {
    let (template, literal): (Vec<_>, Vec<_>) = (template.split('/').collect(), literal.split('/').collect());
    let is_same =
        |(one, other): (&&str, &&str)| one == other || one.starts_with('{') && !other.starts_with('{');
    template.len() == literal.len() && template.iter().zip(&literal).all(is_same)
}

/// The resource of an endpoint.
pub(crate) fn resource(path: &str, endpoint: &'static Endpoint) -> actix_web::Resource {
    let other = move |request: HttpRequest| async move { endpoint.method_not_allowed(&request) };
    let mut resource = web::resource(path).default_service(web::to(other));
    for row in &endpoint.rows {
        resource = resource.route((row.handler)(row.verb.route()));
    }
    resource
}

/// The endpoint of a request, found before its routing and kept with it: the middleware needs it first. It is found by
/// the path as it is routed, without escapes, so that what is checked is what is done.
#[derive(Clone, Copy)]
pub(crate) struct Matched {
    table: &'static RouteTable,
    endpoint: Option<&'static Endpoint>,
}

impl Matched {
    /// Finds the endpoint, and keeps it with the request.
    ///
    /// # Errors
    /// If the router has a path that the table does not have: it would be served without the checks of its row.
    pub(crate) fn find(table: &'static RouteTable, request: &ServiceRequest) -> Result<Self, Failure> {
        let endpoint = match request.resource_map().match_pattern(route::path(request.request())) {
            None => None,
            Some(pattern) => match table.by_path.get(pattern.as_str()) {
                Some(at) => Some(&table.endpoints[*at]),
                None => {
                    let detail = format!("{pattern} is served, but is not in the route table");
                    return Err(Failure::new(Kind::Internal, detail));
                }
            },
        };
        let matched = Self { table, endpoint };
        request.extensions_mut().insert(matched);
        Ok(matched)
    }

    /// What [`Self::find`] has found.
    ///
    /// # Errors
    /// If it was not called, so that nothing is known about the request.
    pub(crate) fn of(request: &HttpRequest) -> Result<Self, Failure> {
        let kept = request.extensions().get::<Self>().copied();
        kept.ok_or_else(|| Failure::new(Kind::Internal, "the route table was not searched for the request"))
    }

    /// The endpoint; `None` for an unknown path.
    pub(crate) fn endpoint(self) -> Option<&'static Endpoint> {
        self.endpoint
    }

    /// The table.
    pub(crate) fn table(self) -> &'static RouteTable {
        self.table
    }

    /// The row; `None` for an unknown path and for a method that the path does not have, which the router answers.
    pub(crate) fn row(self, method: &Method) -> Option<&'static RouteRow> {
        self.endpoint?.row(method)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn row(verb: Verb, path: &'static str, audience: Audience) -> RouteRow {
        RouteRow {
            verb,
            path,
            handler: |route| route,
            audience,
            query: QueryRule::None,
            takes_if_match: false,
        }
    }

    static ROWS: [RouteRow; 5] = [
        row(Verb::Get, "/api/things", Audience::Guarded),
        row(Verb::Delete, "/api/things/{id}", Audience::Guarded),
        row(Verb::Post, "/api/things", Audience::Guarded),
        row(Verb::Put, "/api/things/{id}", Audience::Guarded),
        row(Verb::Get, "/files/{file:.*}", Audience::Open),
    ];

    #[test]
    fn rows_of_one_path_are_one_endpoint_with_its_methods_in_a_fixed_order() {
        let table = RouteTable::new("/api", "", "", ROWS.iter());
        let shown = table.endpoints.iter().map(|one| (one.path, one.allow.as_str(), one.label.as_str()));
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [
                ("/api/things", "GET, HEAD, POST", "/api/things"),
                ("/api/things/{id}", "PUT, DELETE", "/api/things/{id}"),
                ("/files/{file:.*}", "GET, HEAD", "/files/{file}"),
            ]
        );
        let things = &table.endpoints[0];
        assert!(things.row(&Method::HEAD).is_some_and(|row| row.verb == Verb::Get));
        assert!(things.row(&Method::PUT).is_none() && things.row(&Method::PATCH).is_none());
    }

    #[test]
    fn rows_that_would_be_served_otherwise_than_they_say_are_found() {
        static WRONG: [RouteRow; 8] = [
            row(Verb::Get, "metrics", Audience::Scrape),
            row(Verb::Get, "/api/open", Audience::Open),
            row(Verb::Get, "/view", Audience::Guarded),
            row(Verb::Get, "/two", Audience::Open),
            row(Verb::Put, "/two", Audience::Probe),
            row(Verb::Get, "/x/{a}", Audience::Open),
            row(Verb::Delete, "/x/{b}", Audience::Open),
            row(Verb::Get, "/x/fixed", Audience::Open),
        ];
        let mistakes = RouteTable::new("/api", "", "", WRONG.iter()).mistakes();
        let expected = [
            "metrics does not begin with /",
            "/api/open is for Open",
            "/view is for Guarded",
            "/two has rows for several audiences",
            "/x/{b} and /x/{a} are the same path",
            "/x/fixed comes after /x/{a}",
        ];
        assert_eq!(mistakes, expected);
        let twice = RouteTable::new("/api", "", "", ROWS[..1].iter().chain(&ROWS[..1])).mistakes();
        assert_eq!(twice, ["/api/things has Get twice"]);
        assert!(RouteTable::new("/api", "", "", ROWS.iter()).mistakes().is_empty());
    }

    #[test]
    fn everything_below_the_guarded_path_needs_a_token_and_nothing_else() {
        let table = RouteTable::new("/api", "", "", ROWS.iter());
        for (path, is_guarded) in
            [("/api", true), ("/api/", true), ("/api/nothing", true), ("/apix", false), ("/", false)]
        {
            assert_eq!(table.is_guarded(path), is_guarded, "{path}");
        }
    }
}
