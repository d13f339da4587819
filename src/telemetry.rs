//! Logs, to standard error: text for people, or one JSON object a line.

use crate::config::LogFormat;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// What is logged if nobody says.
/// actix tells every start of a worker. `kube_runtime` warns of each request that is refused with 403
/// by itself, and hands the error on to us, who say it once; likewise `kube_client` of each 5xx.
const DEFAULT_FILTER: &str = "info,actix_server=warn,kube_runtime=error,kube_client::client::builder=off";

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
/// for all but libraries that tell what we tell.
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
    EnvFilter::try_new(&given).map_err(|source| TelemetryError::Filter { variable, given, source })
}
