//! Requests to the API server, and their errors.

use kube::core::Status;
use std::time::Duration;
use tokio::time::timeout;

/// Timeout of one request. Watches have a timeout of their own.
pub const ANSWER_MAX: Duration = Duration::from_secs(15);

/// Why a request failed.
pub struct RequestError {
    /// The reason, for the log.
    pub why: String,
    /// The error status that the API server answered with.
    pub status: Option<Box<Status>>,
}

impl RequestError {
    /// The code of the error status; 0 without one.
    pub fn code(&self) -> u16 {
        self.status.as_ref().map_or(0, |status| status.code)
    }
}

/// The answer to a request within its timeout. `right`: the right that the request needs, for the message of a 403.
pub async fn request<T>(
    request: impl Future<Output = kube::Result<T>>,
    right: &str,
) -> Result<T, RequestError> {
    let error = match timeout(ANSWER_MAX, request).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(error)) => error,
        Err(_) => {
            let why = format!("no answer within {} s", ANSWER_MAX.as_secs());
            return Err(RequestError { why, status: None });
        }
    };
    let why = match &error {
        kube::Error::Api(status) if status.code == 403 => {
            format!("{} (it needs: {right}; see deploy/cluster-role.yaml)", status.message)
        }
        kube::Error::Api(status) => format!("{} ({})", status.message.trim_end(), status.code),
        error => error_chain(error),
    };
    let status = if let kube::Error::Api(status) = error { Some(status) } else { None };
    Err(RequestError { why, status })
}

/// The text of an error and of its causes, each once: many of kube's errors contain the text of their cause.
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        // Its own text also has the whole status as the debugger would show it.
        if let Some(kube::Error::Api(status)) = next.downcast_ref() {
            return format!("{text}: {} ({})", status.message.trim_end(), status.code);
        }
        let next_text = next.to_string();
        if !text.contains(&next_text) {
            text = format!("{text}: {next_text}");
        }
        cause = next.source();
    }
    text
}
