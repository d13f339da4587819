//! An error of a request: a [`Problem`] and its response headers.

use actix_web::http::StatusCode;
use actix_web::http::header::{self, HeaderName, HeaderValue};
use actix_web::{HttpResponse, ResponseError};
use berth_api::{Action, Check, Kind, Problem};
use std::fmt;

/// Characters of a client's text in an error.
const EXCERPT_CHARACTERS: usize = 80;
/// The media type of problems.
pub const PROBLEM_JSON: &str = "application/problem+json";

/// The beginning of a client's text, for an error: it may be as long as a request's head.
#[must_use]
pub fn excerpt(text: &str) -> &str {
    match text.char_indices().nth(EXCERPT_CHARACTERS) {
        Some((end, _)) => &text[..end],
        None => text,
    }
}

/// The result of a handler.
pub type HandlerResult = Result<HttpResponse, Failure>;

/// An error of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The body of the response.
    pub problem: Box<Problem>,
    /// Headers of the response.
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl Failure {
    /// A failure of this kind; `detail` has the circumstances.
    #[must_use]
    pub fn new(kind: Kind, detail: impl fmt::Display) -> Self {
        Self { problem: Box::new(Problem::new(kind, detail)), headers: Vec::new() }
    }

    /// Adds advice for the client.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.problem.hint = Some(hint.to_string());
        self
    }

    /// Adds the operation of the API that helps.
    #[must_use]
    pub fn action(mut self, action: impl Into<Action>) -> Self {
        self.problem.action = Some(action.into());
        self
    }

    /// Adds the checks of readiness or liveness.
    #[must_use]
    pub fn checks(mut self, checks: Vec<Check>) -> Self {
        self.problem.checks = checks;
        self
    }

    /// Adds the seconds after which a retry makes sense.
    #[must_use]
    pub fn retry_after(self, seconds: u64) -> Self {
        self.header(header::RETRY_AFTER, seconds.into())
    }

    /// Adds the allowed methods.
    #[must_use]
    pub fn allow(self, methods: &'static str) -> Self {
        self.header(header::ALLOW, HeaderValue::from_static(methods))
    }

    /// Adds the `WWW-Authenticate` challenge.
    #[must_use]
    pub fn challenge(self, challenge: &'static str) -> Self {
        self.header(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge))
    }

    fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// The failure for a status that a lower layer chose without a body.
    #[must_use]
    pub fn of_status(status: StatusCode, detail: impl fmt::Display) -> Self {
        Self { problem: Box::new(Problem::of_status(status.as_u16(), detail)), headers: Vec::new() }
    }

    /// The response.
    #[must_use]
    pub fn response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.status_code());
        response.content_type(PROBLEM_JSON);
        for header in self.headers.iter().cloned() {
            response.insert_header(header);
        }
        // Serializing strings and numbers cannot fail.
        response.body(serde_json::to_vec(&self.problem).unwrap_or_default())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problem.fmt(f)
    }
}

impl std::error::Error for Failure {}

impl ResponseError for Failure {
    fn status_code(&self) -> StatusCode {
        StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn error_response(&self) -> HttpResponse {
        self.response()
    }
}
