//! Sets up logs to standard error, as text or one JSON object per line, and traces, if a collector is configured.

use crate::counters::MALFORMED;
use crate::spans;
use crate::trace::{self, TracingSettings};
use clap::ValueEnum;
use serde::Deserialize;
use std::io::IsTerminal;
use std::sync::atomic::Ordering;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::{Directive, LevelFilter, ParseError, filter_fn};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{EnvFilter, fmt, registry};

/// The default filter. actix logs every start of a worker. `kube_runtime` warns of each request that is refused with
/// 403 and also returns the error, which Berth logs once; so does `kube_client` for each 5xx.
const DEFAULT_FILTER: &str = "info,actix_server=warn,kube_runtime=error,kube_client::client::builder=off";

/// The target of audit lines.
const AUDIT: &str = "audit";

/// The target of the HTTP library, which logs an error for each connection with malformed HTTP. Any client can cause
/// them, so the admin API logs only their number ([`MALFORMED`]).
const HTTP: &str = "actix_http";

/// Error of [`start`].
#[derive(Debug, thiserror::Error)]
pub enum LogsError {
    /// The filter is malformed.
    #[error(
        "{variable} = {text:?} is not a log filter; expected levels, such as info,berth_wasm=debug: {cause}"
    )]
    Filter {
        /// The variable with the filter.
        variable: &'static str,
        /// Its value.
        text: String,
        /// The cause.
        cause: ParseError,
    },
    /// The headers for the collector are malformed.
    #[error("{0:#}")]
    Headers(anyhow::Error),
    /// Logs were set up before.
    #[error("logs are set up already")]
    AlreadySetUp(#[from] TryInitError),
}

/// Format of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Readable text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Sets up logs, and traces if they are configured; the caller runs the returned task on its runtime. The filter is
/// `BERTH_LOG_FILTER`, else `RUST_LOG`, else `info` except for libraries whose lines repeat those of Berth. Audit lines
/// are logged unless the filter names their target.
///
/// # Errors
/// If the filter or the collector's headers are malformed, or logs are set up already.
pub fn start(
    format: LogFormat,
    tracing: Option<&TracingSettings>,
    node: &str,
) -> Result<Option<trace::Pump>, LogsError> {
    let filter = filter()?;
    let Some(tracing) = tracing else {
        registry().with(malformed()).with(logs(format, filter)).try_init()?;
        return Ok(None);
    };
    let (layer, pump) = trace::start(tracing, node).map_err(LogsError::Headers)?;
    // Only Berth's spans: libraries create spans, too, and those of the exporter would cause further ones.
    let own_spans = filter_fn(|span: &Metadata<'_>| span.is_span() && span.target() == spans::TARGET);
    let layer = layer.with_filter(own_spans.with_max_level_hint(LevelFilter::INFO));
    registry().with(layer).with(malformed()).with(logs(format, filter)).try_init()?;
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

/// Counts connections with malformed HTTP.
fn malformed<S: Subscriber + for<'s> LookupSpan<'s>>() -> impl Layer<S> {
    let is_http_error = |metadata: &Metadata<'_>| {
        metadata.is_event() && *metadata.level() == Level::ERROR && metadata.target().starts_with(HTTP)
    };
    Malformed.with_filter(filter_fn(is_http_error).with_max_level_hint(LevelFilter::ERROR))
}

struct Malformed;

impl<S: Subscriber> Layer<S> for Malformed {
    fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
        MALFORMED.fetch_add(1, Ordering::Relaxed);
    }
}

fn filter() -> Result<EnvFilter, LogsError> {
    let setting = ["BERTH_LOG_FILTER", "RUST_LOG"].into_iter().find_map(|variable| {
        let text = std::env::var(variable).ok().filter(|t| !t.trim().is_empty())?;
        Some((variable, text))
    });
    let filter = match setting {
        None => EnvFilter::new(with_default(DEFAULT_FILTER, HTTP, "off")),
        Some((variable, text)) => {
            let filter = with_default(&with_default(&text, AUDIT, "info"), HTTP, "off");
            EnvFilter::try_new(filter).map_err(|cause| LogsError::Filter {
                variable,
                text: text.clone(),
                cause,
            })?
        }
    };
    // Log lines do not need the spans of traces. Without this directive they would be created while traces are off.
    let no_spans: Result<Directive, _> = format!("{}=off", spans::TARGET).parse();
    Ok(no_spans.into_iter().fold(filter, EnvFilter::add_directive))
}

/// The filter, with this level for the target unless it names the target.
fn with_default(filter: &str, target: &str, level: &str) -> String {
    let names = |directive: &str| {
        let name = directive.trim().split(['=', '[']).next().unwrap_or_default();
        name.strip_prefix(target).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    let filter = filter.trim().trim_end_matches(',');
    if filter.split(',').any(names) { filter.to_owned() } else { format!("{filter},{target}={level}") }
}

#[cfg(test)]
mod tests {
    use super::{AUDIT, HTTP, with_default};

    #[test]
    fn http_lines_are_off_unless_the_filter_names_them() {
        for (filter, expected) in [
            ("info", "info,actix_http=off"),
            ("debug,actix_http=warn", "debug,actix_http=warn"),
            ("debug,actix_http[request]=trace", "debug,actix_http[request]=trace"),
            ("actix_https=info", "actix_https=info,actix_http=off"),
        ] {
            assert_eq!(with_default(filter, HTTP, "off"), expected);
            tracing_subscriber::EnvFilter::try_new(expected).unwrap();
        }
    }

    #[test]
    fn audit_lines_are_on_unless_the_filter_names_them() {
        for (filter, expected) in [
            ("warn", "warn,audit=info"),
            ("off", "off,audit=info"),
            ("berth_wasm=debug, warn,", "berth_wasm=debug, warn,audit=info"),
            ("berth::admin::audit=debug", "berth::admin::audit=debug,audit=info"),
            ("warn,audit=off", "warn,audit=off"),
            ("warn, audit", "warn, audit"),
            ("audit[change]=warn", "audit[change]=warn"),
        ] {
            assert_eq!(with_default(filter, AUDIT, "info"), expected);
            tracing_subscriber::EnvFilter::try_new(expected).unwrap();
        }
    }
}
