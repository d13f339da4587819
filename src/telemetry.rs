//! Logs, to standard error: text for people, or one JSON object a line. And traces, where a collector is
//! configured.

use crate::config::{Config, LogFormat};
use crate::spans;
use crate::trace;
use std::io::IsTerminal;
use tracing::{Metadata, Subscriber};
use tracing_subscriber::filter::{Directive, LevelFilter, filter_fn};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, registry};

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
    Twice(#[source] tracing_subscriber::util::TryInitError),
    /// What the collector of traces wants to know is malformed.
    #[error(transparent)]
    Traces(#[from] trace::HeaderError),
}

/// Starts logs, and traces where they are configured; then whoever has a runtime runs what is given back.
/// What is logged is said by `BERTH_LOG_FILTER`, else `RUST_LOG`, else it is `info` for all but
/// libraries that tell what we tell.
///
/// # Errors
/// If the filter is malformed, the collector's headers are, or logs were started already.
pub fn start(config: &Config) -> Result<Option<trace::Pump>, TelemetryError> {
    let filter = filter()?;
    let Some(tracing) = &config.tracing else {
        registry().with(logs(config.log, filter)).try_init().map_err(TelemetryError::Twice)?;
        return Ok(None);
    };
    let (layer, pump) = trace::start(tracing, &config.node_name)?;
    // Libraries make spans, too, and the exporter's own would never end.
    let ours = filter_fn(|span: &Metadata<'_>| span.is_span() && span.target() == spans::TARGET);
    let layer = layer.with_filter(ours.with_max_level_hint(LevelFilter::INFO));
    let logged = registry().with(layer).with(logs(config.log, filter)).try_init();
    logged.map_err(TelemetryError::Twice)?;
    Ok(Some(pump))
}

fn logs<S: Subscriber + for<'s> LookupSpan<'s>>(format: LogFormat, filter: EnvFilter) -> impl Layer<S> {
    let logs = fmt::layer().with_writer(std::io::stderr);
    let logs = match format {
        LogFormat::Text => logs.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => logs.json().flatten_event(true).boxed(),
    };
    logs.with_filter(filter)
}

fn filter() -> Result<EnvFilter, TelemetryError> {
    let given = ["BERTH_LOG_FILTER", "RUST_LOG"].into_iter().find_map(|variable| {
        let text = std::env::var(variable).ok().filter(|t| !t.trim().is_empty())?;
        Some((variable, text))
    });
    let filter = match given {
        None => EnvFilter::new(DEFAULT_FILTER),
        Some((variable, given)) => {
            EnvFilter::try_new(&given).map_err(|source| TelemetryError::Filter { variable, given, source })?
        }
    };
    // Lines of the log say what they are about; spans are for traces. While those are off nobody wants
    // a span, and none is made.
    let none: Result<Directive, _> = format!("{}=off", spans::TARGET).parse();
    Ok(none.into_iter().fold(filter, EnvFilter::add_directive))
}
