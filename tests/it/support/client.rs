//! A client of a daemon's API.

use std::time::Duration;

/// Sends a request with any method, accepts any response, and waits for it up to a limit.
pub(crate) fn agent(wait: Duration) -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .proxy(None)
        .allow_non_standard_methods(true)
        .timeout_global(Some(wait))
        .build()
        .new_agent()
}
