//! Headers for the collector, such as a token. They are read from the variables of OpenTelemetry, since a secret
//! belongs neither in a flag nor in a ConfigMap.

use anyhow::anyhow;
use std::fmt;

/// The variables with headers; the second one takes precedence.
const VARIABLES: [&str; 2] = ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"];
/// Most headers.
const HEADERS_MAX: usize = 32;

/// Names, in lower case, and values.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Headers(pub(super) Vec<(String, String)>);

/// Without values, which are secrets.
impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

impl Headers {
    /// # Errors
    /// If a variable is malformed. The text does not contain its value.
    pub(super) fn from_environment() -> anyhow::Result<Self> {
        let mut headers = Self::default();
        for variable in VARIABLES {
            let text = std::env::var(variable).unwrap_or_default();
            let more = parse(&text).map_err(|rule| anyhow!("{variable} cannot be used: {rule}"))?;
            headers.0.retain(|(name, _)| more.iter().all(|(newer, _)| newer != name));
            headers.0.extend(more);
        }
        Ok(headers)
    }
}

/// Parses `name=value,name=value`, with percent-encoded values.
fn parse(text: &str) -> Result<Vec<(String, String)>, &'static str> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    let headers: Vec<_> = pairs.map(pair).collect::<Result<_, _>>()?;
    if headers.len() > HEADERS_MAX {
        return Err("it has more than 32 headers");
    }
    Ok(headers)
}

fn pair(text: &str) -> Result<(String, String), &'static str> {
    const RULE: &str = "expected name=value pairs, separated by commas, with percent-encoded values, such as authorization=Bearer%20abc";
    let (name, value) = text.split_once('=').ok_or(RULE)?;
    let name = name.trim().to_ascii_lowercase();
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    // gRPC reserves the prefix, and reads values of names with the suffix as bytes.
    if name.is_empty() || !name.bytes().all(is_allowed) || name.ends_with("-bin") || name.starts_with("grpc-")
    {
        return Err(RULE);
    }
    let value = decode(value.trim()).ok_or(RULE)?;
    // Printable ASCII, which both gRPC and HTTP accept.
    if !value.bytes().all(|b| (b' '..=b'~').contains(&b)) {
        return Err(RULE);
    }
    Ok((name, value))
}

/// Decodes percent-encoded text.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut input = text.bytes();
    while let Some(byte) = input.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(input.next()?).to_digit(16);
        let (high, low) = (digit()?, digit()?);
        bytes.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn headers_are_pairs_with_percent_encoded_values() {
        let headers = parse(" Authorization=Bearer%20a%3Db==, x-scope = node ,").unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(headers, [pair("authorization", "Bearer a=b=="), pair("x-scope", "node")]);
        assert!(parse("").unwrap().is_empty());
        for bad in ["token", "a b=c", "x-bin=a", "grpc-timeout=1", "a=%0a", "a=%zz", "a=%2", "=x"] {
            parse(bad).unwrap_err();
        }
    }

    #[test]
    fn values_are_not_shown() {
        let headers = Headers(parse("authorization=secret").unwrap());
        assert_eq!(format!("{headers:?}"), "[\"authorization\"]");
    }
}
