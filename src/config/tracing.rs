//! `tracing`: export of traces by OTLP. Off unless there is an endpoint. The variables are OpenTelemetry's, so that
//! tools that inject them into pods work here, too.

use super::checks::{BadSetting, bad, by_rule, parse_keyword};
use berth_observe::trace::{Endpoint, Protocol, TracingSettings};
use clap::Args;
use serde::Deserialize;
use std::time::Duration;

/// Default port of a collector for gRPC, by OTLP's specification.
const PORT_GRPC: u16 = 4317;
/// Default port for HTTP.
const PORT_HTTP: u16 = 4318;
/// Path of traces by HTTP, appended to the endpoint.
const PATH: &str = "/v1/traces";
/// Longest endpoint, bytes.
const ENDPOINT_BYTES_MAX: usize = 1024;
/// Default timeout of one export, seconds.
const TIMEOUT_S: f64 = 5.0;
/// Longest timeout, seconds: spans wait in a queue meanwhile, which would overflow.
const TIMEOUT_S_MAX: f64 = 60.0;

/// The rule for endpoints.
const ENDPOINT_RULE: &str = "a URL with scheme, host and port, such as http://otel-collector.observability:4317 (gRPC) or http://otel-collector.observability:4318 (http/protobuf)";

/// The flags for traces, which have OpenTelemetry's variables.
#[derive(Args, Clone, Debug, Default)]
pub struct TracingArgs {
    /// OTLP endpoint for traces, such as `http://otel-collector.observability:4317` [default: none]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", hide_env = true, hide_short_help = true, value_name = "URL", value_parser = by_rule(unless_empty(endpoint_flag)))]
    pub tracing_endpoint: Option<String>,
    /// Protocol of the endpoint: grpc or http/protobuf [default: http/protobuf at port 4318, else grpc]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_PROTOCOL", hide_env = true, hide_short_help = true, value_name = "PROTOCOL", value_parser = by_rule(unless_empty(protocol)))]
    pub tracing_protocol: Option<String>,
    /// Fraction of traces that are exported, 0 to 1; a caller's own decision takes precedence [default: 1]
    #[arg(long, env = "OTEL_TRACES_SAMPLER_ARG", hide_env = true, hide_short_help = true, value_name = "RATIO", value_parser = by_rule(unless_empty(sample_ratio)))]
    pub tracing_sample_ratio: Option<String>,
}

/// Checks a text unless it is empty, which OpenTelemetry defines as not set.
fn unless_empty<T>(
    check: impl Fn(&str) -> Result<T, BadSetting> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<Option<T>, BadSetting> + Clone + Send + Sync + 'static {
    move |text| if text.trim().is_empty() { Ok(None) } else { check(text).map(Some) }
}

/// Checks an endpoint as far as possible before the file is read.
fn endpoint_flag(text: &str) -> Result<(), BadSetting> {
    // clap would show the value, which may contain a password; `Config::merge` refuses it.
    if text.contains('@') {
        return Ok(());
    }
    // A path is valid for `http/protobuf` only, which another flag may set.
    endpoint(text, Some(Protocol::HttpProtobuf)).or_else(|_| endpoint(text, None)).map(drop)
}

/// `tracing` of the file: see [`TracingSettings`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct TracingFile {
    endpoint: Option<String>,
    protocol: Option<String>,
    sample_ratio: Option<f64>,
    timeout_seconds: Option<f64>,
}

impl TracingFile {
    /// The settings, with the precedence of flags and environment; `None` without an endpoint.
    pub(super) fn resolve(self, args: &TracingArgs) -> Result<Option<TracingSettings>, BadSetting> {
        // OpenTelemetry defines an empty variable as not set.
        let non_empty = |text: &Option<String>| text.clone().filter(|t| !t.trim().is_empty());
        let ratio = match non_empty(&args.tracing_sample_ratio) {
            Some(text) => sample_ratio(&text)?,
            None => checked_ratio(self.sample_ratio.unwrap_or(1.0))?,
        };
        let protocol =
            non_empty(&args.tracing_protocol).or(self.protocol).map(|p| protocol(&p)).transpose()?;
        let seconds = self.timeout_seconds.unwrap_or(TIMEOUT_S);
        if !(0.1..=TIMEOUT_S_MAX).contains(&seconds) {
            let rule = format!("0.1 to {TIMEOUT_S_MAX}");
            return Err(bad("tracing.timeoutSeconds", &seconds.to_string(), rule));
        }
        let Some(text) = non_empty(&args.tracing_endpoint).or(self.endpoint) else { return Ok(None) };
        let endpoint = endpoint(&text, protocol)?;
        let timeout = Duration::from_secs_f64(seconds);
        Ok(Some(TracingSettings { endpoint, sample_ratio: ratio, timeout }))
    }
}

/// Parses the keywords of OpenTelemetry.
fn protocol(keyword: &str) -> Result<Protocol, BadSetting> {
    let known = [("grpc", Protocol::Grpc), ("http/protobuf", Protocol::HttpProtobuf)];
    parse_keyword("tracing.protocol", keyword.trim(), &known)
}

fn sample_ratio(text: &str) -> Result<f64, BadSetting> {
    let ratio = text.trim().parse();
    ratio.map_or_else(|_| Err(bad("tracing.sampleRatio", text, "a number, 0 to 1")), checked_ratio)
}

fn checked_ratio(ratio: f64) -> Result<f64, BadSetting> {
    if (0.0..=1.0).contains(&ratio) {
        return Ok(ratio);
    }
    Err(bad("tracing.sampleRatio", &ratio.to_string(), "0 (none) to 1 (all)"))
}

/// Parses an endpoint. The default protocol is HTTP for port 4318, gRPC for all others.
fn endpoint(text: &str, protocol: Option<Protocol>) -> Result<Endpoint, BadSetting> {
    let text = text.trim();
    // A value that may contain a password is not shown.
    let invalid = |rule: &str| {
        let shown = if text.contains('@') { "(hidden: it may contain a password)" } else { text };
        bad("tracing.endpoint", shown, rule)
    };
    if text.len() > ENDPOINT_BYTES_MAX || text.contains(|c: char| c.is_control() || c.is_whitespace()) {
        return Err(bad("tracing.endpoint", "(not shown)", ENDPOINT_RULE));
    }
    let Some((scheme @ ("http" | "https"), rest)) = text.split_once("://") else {
        return Err(invalid(ENDPOINT_RULE));
    };
    if rest.contains('@') {
        return Err(invalid(
            "a URL without user and password; set the headers that the collector needs in the environment variable OTEL_EXPORTER_OTLP_HEADERS",
        ));
    }
    if rest.contains(['?', '#']) {
        return Err(invalid("a URL without a query"));
    }
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let (host, port) = host_and_port(authority).ok_or_else(|| invalid(ENDPOINT_RULE))?;
    let protocol = protocol.unwrap_or(match port {
        Some(PORT_HTTP) => Protocol::HttpProtobuf,
        _ => Protocol::Grpc,
    });
    let path = path.trim_end_matches('/');
    let url = match protocol {
        Protocol::Grpc if path.is_empty() => format!("{scheme}://{host}:{}", port.unwrap_or(PORT_GRPC)),
        Protocol::Grpc => return Err(invalid("a URL without a path, as protocol grpc has none")),
        Protocol::HttpProtobuf => {
            let suffix = if path.ends_with(PATH) { "" } else { PATH };
            format!("{scheme}://{host}:{}{path}{suffix}", port.unwrap_or(PORT_HTTP))
        }
    };
    Ok(Endpoint { url, protocol })
}

/// `host`, `host:port`, `[v6]`, `[v6]:port`.
fn host_and_port(authority: &str) -> Option<(&str, Option<u16>)> {
    let (host, port) = match authority.rsplit_once(':') {
        // Not a colon within an address.
        Some((host, port)) if !port.contains(']') => (host, Some(port.parse().ok().filter(|p| *p != 0)?)),
        _ => (authority, None),
    };
    let is_name = |host: &str| host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
    let is_valid = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && is_name(host),
    };
    is_valid.then_some((host, port))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn parsed(text: &str) -> (String, String) {
        let endpoint = endpoint(text, None).unwrap();
        (endpoint.url, endpoint.protocol.to_string())
    }

    #[test]
    fn the_default_protocol_depends_on_the_port() {
        let check = |text, url: &str, protocol: &str| {
            assert_eq!(parsed(text), (url.to_owned(), protocol.to_owned()));
        };
        check("http://collector:4317", "http://collector:4317", "grpc");
        check("http://collector", "http://collector:4317", "grpc");
        check("https://[::1]:55/", "https://[::1]:55", "grpc");
        check("http://10.0.0.1:4318", "http://10.0.0.1:4318/v1/traces", "http/protobuf");
        check("http://c:4318/otlp/v1/traces", "http://c:4318/otlp/v1/traces", "http/protobuf");
        let endpoint = endpoint("http://tempo/otlp/", Some(Protocol::HttpProtobuf)).unwrap();
        assert_eq!(endpoint.url, "http://tempo:4318/otlp/v1/traces");
    }

    #[test]
    fn an_invalid_endpoint_is_reported_with_the_rule() {
        for bad in
            ["collector:4317", "http://", "http://a:0", "http://a:b", "ftp://a", "http://[::1", "http://a b"]
        {
            let error = endpoint(bad, None).unwrap_err().to_string();
            assert!(error.contains("tracing.endpoint") && error.contains("otel-collector"), "{bad}: {error}");
        }
        let error = endpoint("http://me:secret@collector:4317", None).unwrap_err().to_string();
        assert!(error.contains("OTEL_EXPORTER_OTLP_HEADERS") && !error.contains("secret"), "{error}");
        let error = endpoint("http://collector:4317/v1/traces", None).unwrap_err().to_string();
        assert!(error.contains("without a path"), "{error}");
    }

    #[test]
    fn an_empty_variable_is_not_set_and_a_flag_takes_precedence() {
        let file = || TracingFile {
            endpoint: Some("http://file:4317".into()),
            sample_ratio: Some(0.25),
            ..TracingFile::default()
        };
        let mut args = TracingArgs { tracing_endpoint: Some(String::new()), ..TracingArgs::default() };
        let settings = file().resolve(&args).unwrap().unwrap();
        assert_eq!((settings.endpoint.url.as_str(), settings.sample_ratio), ("http://file:4317", 0.25));
        args.tracing_endpoint = Some("http://flag:4318".into());
        args.tracing_sample_ratio = Some("1".into());
        let settings = file().resolve(&args).unwrap().unwrap();
        assert_eq!(settings.endpoint.protocol, Protocol::HttpProtobuf);
        assert!(settings.sample_ratio > 0.99);
        assert_eq!(TracingFile::default().resolve(&TracingArgs::default()).unwrap(), None);
        let file = TracingFile { sample_ratio: Some(7.0), ..TracingFile::default() };
        assert!(
            file.resolve(&TracingArgs::default()).unwrap_err().to_string().contains("tracing.sampleRatio")
        );
    }
}
