//! Logs, to standard error: text for people, or one JSON object a line.

use crate::config::LogFormat;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// What is logged if nobody says.
/// actix tells every start of a worker. `kube_runtime` warns of each request that is refused with 403
/// by itself, and hands the error on to us, who say it once; likewise `kube_client` of each 5xx.
const DEFAULT_FILTER: &str = "info,actix_server=warn,kube_runtime=error,kube_client::client::builder=off";

/// The target of audit lines.
const AUDIT: &str = "audit";

/// Logs that cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter is malformed.
    #[error(
        "{variable} = {given:?} is no filter: levels with commas between, such as info,berth::wasm=debug"
    )]
    Filter {
        /// Where it came from.
        variable: &'static str,
        /// What came.
        given: String,
        /// Why.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// Logs were started already.
    #[error("logs were started twice")]
    Twice(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Starts logs. What is logged is said by `BERTH_LOG_FILTER`, else `RUST_LOG`, else it is `info`
/// for all but libraries that tell what we tell. Audit lines are logged unless the filter names them.
///
/// # Errors
/// If the filter is malformed, or logs were started already.
pub fn start(format: LogFormat) -> Result<(), TelemetryError> {
    let logs = tracing_subscriber::fmt().with_env_filter(filter()?).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => logs.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
    };
    started.map_err(TelemetryError::Twice)
}

fn filter() -> Result<EnvFilter, TelemetryError> {
    let given = ["BERTH_LOG_FILTER", "RUST_LOG"].into_iter().find_map(|variable| {
        let text = std::env::var(variable).ok().filter(|t| !t.trim().is_empty())?;
        Some((variable, text))
    });
    let Some((variable, given)) = given else {
        return Ok(EnvFilter::new(DEFAULT_FILTER));
    };
    match EnvFilter::try_new(with_audit(&given)) {
        Ok(filter) => Ok(filter),
        Err(source) => Err(TelemetryError::Filter { variable, given, source }),
    }
}

/// A filter that was set to look for something else does not take the audit lines away; one that names them
/// means it.
fn with_audit(given: &str) -> String {
    let names = |directive: &str| {
        let target = directive.trim().split(['=', '[']).next().unwrap_or_default();
        target == AUDIT || target.starts_with("audit::")
    };
    let given = given.trim().trim_end_matches(',');
    if given.split(',').any(names) { given.to_owned() } else { format!("{given},{AUDIT}=info") }
}

#[cfg(test)]
mod tests {
    use super::with_audit;

    #[test]
    fn audit_lines_stay_unless_the_filter_names_them() {
        for (given, becomes) in [
            ("warn", "warn,audit=info"),
            ("off", "off,audit=info"),
            ("berth::wasm=debug, warn,", "berth::wasm=debug, warn,audit=info"),
            ("berth::admin::audit=debug", "berth::admin::audit=debug,audit=info"),
            ("warn,audit=off", "warn,audit=off"),
            ("warn, audit", "warn, audit"),
            ("audit[change]=warn", "audit[change]=warn"),
        ] {
            assert_eq!(with_audit(given), becomes);
            tracing_subscriber::EnvFilter::try_new(becomes).unwrap();
        }
    }
}
