//! Parses the parameters that an operator wrote as JSON, with errors that help the operator.

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// The parameters of a policy that has none: any key is refused.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct NoParameters {}

/// The schema of [`NoParameters`], for the description of the policy.
pub const NO_PARAMETERS_SCHEMA: &str = r#"{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","additionalProperties":false}"#;

/// Parses parameters. An empty string is treated like `{}`, since some front ends send it if no
/// parameters are set.
///
/// # Errors
/// What is wrong and where, in a sentence that names the key.
pub fn parse<T: DeserializeOwned>(json: &str) -> Result<T, String> {
    let json = if json.trim().is_empty() { "{}" } else { json };
    if !json.trim_start().starts_with('{') {
        // serde would accept a list as the fields in their order.
        return Err("must be a JSON object".to_owned());
    }
    serde_json::from_str(json).map_err(|error| error.to_string())
}

/// Checks the name of an extended resource, `domain/name`, as Kubernetes does; `key` is the parameter
/// that contains it.
///
/// # Errors
/// A sentence that names the parameter.
pub fn check_resource(key: &str, name: &str) -> Result<(), String> {
    let wrong =
        || format!("{key}: `{name}` is not a resource name; write `domain/name`, such as `nvidia.com/gpu`");
    let (domain, local) = name.split_once('/').ok_or_else(wrong)?;
    let lower = domain == domain.to_ascii_lowercase();
    if lower && is_label(domain, 253, "-.") && is_label(local, 63, "-_.") { Ok(()) } else { Err(wrong()) }
}

/// Checks the name of a resource that a policy offers whole GPUs or parts of them as, and never MIG instances: their
/// names stand for hardware of a known size. `instead` is what shares instances, if anything does.
///
/// # Errors
/// A sentence that names the parameter.
pub fn check_gpu_resource(key: &str, name: &str, instead: &str) -> Result<(), String> {
    check_resource(key, name)?;
    if name.starts_with("nvidia.com/mig-") {
        return Err(format!("{key}: `{name}` is a name of MIG instances, and it is for GPUs here{instead}"));
    }
    Ok(())
}

/// Whether a text matches a pattern, in which each `*` matches any number of characters, or none.
#[must_use]
pub fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut at, mut matched) = (0, 0);
    // The position after the last `*` in the pattern, and the position in the text up to which that `*`
    // matches.
    let mut last: Option<(usize, usize)> = None;
    while matched < text.len() {
        if pattern.get(at) == Some(&b'*') {
            at += 1;
            last = Some((at, matched));
        } else if pattern.get(at) == Some(&text[matched]) {
            (at, matched) = (at + 1, matched + 1);
        } else if let Some((after_star, from)) = last {
            // Try again with one more byte matched by the `*`.
            (at, matched) = (after_star, from + 1);
            last = Some((after_star, matched));
        } else {
            return false;
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

fn is_label(text: &str, length_max: usize, inner: &str) -> bool {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= length_max
        && text.chars().all(|c| c.is_ascii_alphanumeric() || inner.contains(c))
        && ends(text.chars().next())
        && ends(text.chars().next_back())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(rename_all = "camelCase", deny_unknown_fields)]
    struct Example {
        #[serde(default)]
        settle_seconds: u32,
    }

    #[test]
    fn an_empty_string_is_an_empty_object() {
        assert_eq!(parse(""), Ok(Example { settle_seconds: 0 }));
        assert_eq!(parse("{}"), Ok(Example { settle_seconds: 0 }));
        assert_eq!(parse::<NoParameters>(" "), Ok(NoParameters {}));
    }

    #[test]
    fn an_unknown_key_is_named_beside_the_known_ones() {
        let error = parse::<Example>(r#"{"settleSecond": 3}"#).unwrap_err();
        assert!(error.contains("`settleSecond`"), "{error}");
        assert!(error.contains("`settleSeconds`"), "{error}");
        let error = parse::<NoParameters>(r#"{"a": 1}"#).unwrap_err();
        assert!(error.contains("`a`"), "{error}");
    }

    #[test]
    fn resource_names_are_those_of_kubernetes() {
        let long = format!("a.b/{}", "x".repeat(63));
        for right in ["nvidia.com/gpu", "nvidia.com/gpu.shared", "a.b/mig-1g.10gb", "x/y_z", &long] {
            assert_eq!(check_resource("resource", right), Ok(()), "{right}");
        }
        let longer = format!("{long}x");
        for wrong in
            ["gpu", "/gpu", "a.b/", "a.b/-x", "a.b/x-", "a_b/x", "A.b/x", "a.b/c/d", "a.b/\u{e9}", &longer]
        {
            assert!(check_resource("resource", wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_star_matches_any_text_anywhere() {
        let fits = [
            ("NVIDIA H100*", "NVIDIA H100 80GB HBM3"),
            ("*A100*", "NVIDIA A100-SXM4-40GB"),
            ("*A100*", "A100"),
            ("*40GB", "NVIDIA A100-SXM4-40GB"),
            ("NVIDIA*40GB", "NVIDIA A100-SXM4-40GB"),
            ("*aab", "aaab"),
            ("a*b*c", "a-b-b-c"),
            ("**", ""),
            ("", ""),
            ("Tesla T4", "Tesla T4"),
        ];
        for (pattern, text) in fits {
            assert!(matches(pattern, text), "{pattern} {text}");
        }
        let others = [
            ("NVIDIA H100", "NVIDIA H100 80GB HBM3"),
            ("*A100", "NVIDIA A100-SXM4-40GB"),
            ("A100*", "NVIDIA A100-SXM4-40GB"),
            ("ab*ba", "aba"),
            ("a*b*c", "a-c-b"),
            ("", "x"),
            ("x", ""),
        ];
        for (pattern, text) in others {
            assert!(!matches(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn errors_of_wrong_types_and_broken_json_have_the_position() {
        let error = parse::<Example>(r#"{"settleSeconds": "3"}"#).unwrap_err();
        assert!(error.contains("column"), "{error}");
        let error = parse::<Example>("{").unwrap_err();
        assert!(error.contains("column"), "{error}");
        assert_eq!(parse::<Example>("[3]"), Err("must be a JSON object".to_owned()));
        assert!(parse::<Example>(r#"{"settleSeconds": 1} x"#).is_err());
    }
}
