//! Logs, to standard error: text for people, or one JSON object a line. And traces, where a collector is
//! configured.

use crate::config::{Config, LogFormat};
use crate::trace;
use berth_core::figures::MALFORMED;
use berth_core::spans;
use std::io::IsTerminal;
use std::sync::atomic::Ordering;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::{Directive, LevelFilter, filter_fn};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, registry};

/// The filter if none is set.
/// actix logs every start of a worker. `kube_runtime` warns of each request that is refused with 403 and returns the error
/// as well, which Berth logs once; so does `kube_client` for each 5xx.
const DEFAULT_FILTER: &str = "info,actix_server=warn,kube_runtime=error,kube_client::client::builder=off";

/// The target of audit lines.
const AUDIT: &str = "audit";

/// The HTTP library's logs: an error for each connection that sent what is not HTTP, which anyone may do.
/// The admin API logs how many there were ([`MALFORMED`]).
const HTTP: &str = "actix_http";

/// Logs that cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter is malformed.
    #[error("{variable} = {given:?} is no filter: levels with commas between, such as info,berth_wasm=debug")]
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

/// Starts logs, and traces if they are configured; the caller runs the returned task on its runtime. The filter is
/// `BERTH_LOG_FILTER`, else `RUST_LOG`, else `info` except for libraries that log what Berth logs. Audit lines are logged
/// unless the filter names them.
///
/// # Errors
/// If the filter is malformed, the collector's headers are, or logs were started already.
pub fn start(config: &Config) -> Result<Option<trace::Pump>, TelemetryError> {
    let filter = filter()?;
    let Some(tracing) = &config.tracing else {
        registry()
            .with(malformed())
            .with(logs(config.log, filter))
            .try_init()
            .map_err(TelemetryError::Twice)?;
        return Ok(None);
    };
    let (layer, pump) = trace::start(tracing, &config.node_name)?;
    // Libraries make spans, too, and the exporter's own would never end.
    let ours = filter_fn(|span: &Metadata<'_>| span.is_span() && span.target() == spans::TARGET);
    let layer = layer.with_filter(ours.with_max_level_hint(LevelFilter::INFO));
    let logged = registry().with(layer).with(malformed()).with(logs(config.log, filter)).try_init();
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

/// Counts the connections that the HTTP library has an error for.
fn malformed<S: Subscriber + for<'s> LookupSpan<'s>>() -> impl Layer<S> {
    let of_http = |about: &Metadata<'_>| {
        about.is_event() && *about.level() == Level::ERROR && about.target().starts_with(HTTP)
    };
    Malformed.with_filter(filter_fn(of_http).with_max_level_hint(LevelFilter::ERROR))
}

struct Malformed;

impl<S: Subscriber> Layer<S> for Malformed {
    fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
        MALFORMED.fetch_add(1, Ordering::Relaxed);
    }
}

fn filter() -> Result<EnvFilter, TelemetryError> {
    let given = ["BERTH_LOG_FILTER", "RUST_LOG"].into_iter().find_map(|variable| {
        let text = std::env::var(variable).ok().filter(|t| !t.trim().is_empty())?;
        Some((variable, text))
    });
    let filter = match given {
        None => EnvFilter::new(without_http(DEFAULT_FILTER)),
        Some((variable, given)) => EnvFilter::try_new(without_http(&with_audit(&given)))
            .map_err(|source| TelemetryError::Filter { variable, given, source })?,
    };
    // Log lines are complete without their spans, which are for traces. While traces are off, no span is made.
    let none: Result<Directive, _> = format!("{}=off", spans::TARGET).parse();
    Ok(none.into_iter().fold(filter, EnvFilter::add_directive))
}

/// A filter for something else keeps the audit lines; only one that names them changes them.
fn with_audit(given: &str) -> String {
    with(given, AUDIT, "info")
}

/// The same for the HTTP library's lines, which any stranger can cause.
fn without_http(given: &str) -> String {
    with(given, HTTP, "off")
}

/// The filter with this level for a target that it does not name.
fn with(given: &str, target: &str, level: &str) -> String {
    let names = |directive: &str| {
        let named = directive.trim().split(['=', '[']).next().unwrap_or_default();
        named.strip_prefix(target).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    let given = given.trim().trim_end_matches(',');
    if given.split(',').any(names) { given.to_owned() } else { format!("{given},{target}={level}") }
}

#[cfg(test)]
mod tests {
    use super::{with_audit, without_http};

    #[test]
    fn lines_that_strangers_cause_are_off_unless_the_filter_names_them() {
        for (given, becomes) in [
            ("info", "info,actix_http=off"),
            ("debug,actix_http=warn", "debug,actix_http=warn"),
            ("debug,actix_http[request]=trace", "debug,actix_http[request]=trace"),
            ("actix_https=info", "actix_https=info,actix_http=off"),
        ] {
            assert_eq!(without_http(given), becomes);
            tracing_subscriber::EnvFilter::try_new(becomes).unwrap();
        }
    }

    #[test]
    fn audit_lines_stay_unless_the_filter_names_them() {
        for (given, becomes) in [
            ("warn", "warn,audit=info"),
            ("off", "off,audit=info"),
            ("berth_wasm=debug, warn,", "berth_wasm=debug, warn,audit=info"),
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
