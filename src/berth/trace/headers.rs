//! What a collector wants to know of its clients, such as a token: from the variables of OpenTelemetry,
//! since a secret belongs neither in a flag nor in a ConfigMap.

use std::fmt;

/// Where headers come from; the later wins.
const VARIABLES: [&str; 2] = ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"];
/// Most headers that are sent.
const HEADERS_MAX: usize = 32;

/// Headers that cannot be sent. Says which variable, and nothing of what is in it.
#[derive(Debug, thiserror::Error)]
#[error("{variable} cannot be used: {rule}")]
pub struct HeaderError {
    variable: &'static str,
    rule: &'static str,
}

/// Names, in lower case, and values.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Headers(pub(super) Vec<(String, String)>);

/// Values are secrets.
impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

impl Headers {
    pub(super) fn from_environment() -> Result<Self, HeaderError> {
        let mut all = Self::default();
        for variable in VARIABLES {
            let text = std::env::var(variable).unwrap_or_default();
            let more = parse(&text).map_err(|rule| HeaderError { variable, rule })?;
            all.0.retain(|(name, _)| more.iter().all(|(newer, _)| newer != name));
            all.0.extend(more);
        }
        Ok(all)
    }
}

/// `name=value,name=value`, with values as in a URL.
fn parse(text: &str) -> Result<Vec<(String, String)>, &'static str> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    let headers: Vec<_> = pairs.map(pair).collect::<Result<_, _>>()?;
    if headers.len() > HEADERS_MAX {
        return Err("it has more than 32 headers");
    }
    Ok(headers)
}

fn pair(text: &str) -> Result<(String, String), &'static str> {
    const RULE: &str = "give name=value pairs with commas between, values percent-encoded, such as authorization=Bearer%20abc";
    let (name, value) = text.split_once('=').ok_or(RULE)?;
    let name = name.trim().to_ascii_lowercase();
    let usable = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    // What ends so gRPC takes for bytes; what begins so is its own.
    if name.is_empty() || !name.bytes().all(usable) || name.ends_with("-bin") || name.starts_with("grpc-") {
        return Err(RULE);
    }
    let value = decoded(value.trim()).ok_or(RULE)?;
    // Visible ASCII and blanks, as both gRPC and HTTP take them.
    if !value.bytes().all(|b| (b' '..=b'~').contains(&b)) {
        return Err(RULE);
    }
    Ok((name, value))
}

/// Undoes percent-encoding.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
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
    fn headers_are_pairs_with_values_as_in_a_url() {
        let headers = parse(" Authorization=Bearer%20a%3Db==, x-scope = node ,").unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(headers, [pair("authorization", "Bearer a=b=="), pair("x-scope", "node")]);
        assert!(parse("").unwrap().is_empty());
        for bad in ["token", "a b=c", "x-bin=a", "grpc-timeout=1", "a=%0a", "a=%zz", "a=%2", "=x"] {
            parse(bad).unwrap_err();
        }
    }

    #[test]
    fn a_secret_is_shown_nowhere() {
        let headers = Headers(parse("authorization=secret").unwrap());
        assert_eq!(format!("{headers:?}"), "[\"authorization\"]");
    }
}
