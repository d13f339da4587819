//! An error of a request: a [`Problem`] and its response headers.

use actix_web::http::{StatusCode, header};
use actix_web::{HttpResponse, ResponseError};
use berth_api::{Action, Check, Kind, Problem};
use std::fmt;

/// The media type of problems.
pub const PROBLEM_JSON: &str = "application/problem+json";

/// An error of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The body of the response.
    pub problem: Box<Problem>,
    /// Headers of the response.
    headers: Option<Box<Headers>>,
}

/// The header values of a failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Headers {
    /// Seconds after which a retry makes sense.
    retry_after_s: Option<u64>,
    /// The allowed methods.
    allow: Option<&'static str>,
    /// The `WWW-Authenticate` challenge.
    challenge: Option<&'static str>,
}

impl Failure {
    /// A failure of this kind; `detail` has the circumstances.
    #[must_use]
    pub fn new(kind: Kind, detail: impl fmt::Display) -> Self {
        Self { problem: Box::new(Problem::new(kind, detail)), headers: None }
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
    pub fn retry_after(mut self, seconds: u64) -> Self {
        self.headers.get_or_insert_default().retry_after_s = Some(seconds);
        self
    }

    /// Adds the allowed methods.
    #[must_use]
    pub fn allow(mut self, methods: &'static str) -> Self {
        self.headers.get_or_insert_default().allow = Some(methods);
        self
    }

    /// Adds the `WWW-Authenticate` challenge.
    #[must_use]
    pub fn challenge(mut self, challenge: &'static str) -> Self {
        self.headers.get_or_insert_default().challenge = Some(challenge);
        self
    }

    /// The failure for a status that a lower layer chose without a body.
    #[must_use]
    pub fn of_status(status: StatusCode, detail: impl fmt::Display) -> Self {
        Self { problem: Box::new(Problem::of_status(status.as_u16(), detail)), headers: None }
    }

    /// The response.
    #[must_use]
    pub fn response(&self) -> HttpResponse {
        let status = self.status_code();
        let mut response = HttpResponse::build(status);
        response.content_type(PROBLEM_JSON);
        let headers = self.headers.as_deref().cloned().unwrap_or_default();
        if let Some(seconds) = headers.retry_after_s {
            response.insert_header((header::RETRY_AFTER, seconds.to_string()));
        }
        if let Some(allow) = headers.allow {
            response.insert_header((header::ALLOW, allow));
        }
        if let Some(challenge) = headers.challenge {
            response.insert_header((header::WWW_AUTHENTICATE, challenge));
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
