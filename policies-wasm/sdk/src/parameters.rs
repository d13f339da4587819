//! Parameters: JSON of an operator's hand, into types, with errors that help that operator.

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// For a policy that has no parameters: refuses any.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct NoParameters {}

/// The schema to describe beside [`NoParameters`].
pub const NO_PARAMETERS_SCHEMA: &str = r#"{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","additionalProperties":false}"#;

/// Reads parameters. An empty text is `{}`, since some front ends send nothing where nothing is
/// set.
///
/// # Errors
/// What is wrong and where, in a sentence that names the key.
pub fn parse<T: DeserializeOwned>(json: &str) -> Result<T, String> {
    let json = if json.trim().is_empty() { "{}" } else { json };
    if !json.trim_start().starts_with('{') {
        // serde would take a list as the fields in their order.
        return Err("must be a JSON object".to_owned());
    }
    serde_json::from_str(json).map_err(|error| error.to_string())
}

/// Checks the name of an extended resource, `domain/name`, as Kubernetes would; `key` is the
/// parameter that held it.
///
/// # Errors
/// A sentence that names the parameter.
pub fn check_resource(key: &str, name: &str) -> Result<(), String> {
    let wrong =
        || format!("{key}: `{name}` is no resource name; write `domain/name`, such as `nvidia.com/gpu`");
    let (domain, rest) = name.split_once('/').ok_or_else(wrong)?;
    let lower = domain == domain.to_ascii_lowercase();
    if lower && is_label(domain, 253, "-.") && is_label(rest, 63, "-_.") { Ok(()) } else { Err(wrong()) }
}

/// Whether a text is what a parameter names: exactly, or with any characters, or none, in the place
/// of each `*` of the pattern.
#[must_use]
pub fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut at, mut seen) = (0, 0);
    // Behind the last `*`, and how far the text was when it began to match the rest.
    let mut last: Option<(usize, usize)> = None;
    while seen < text.len() {
        if pattern.get(at) == Some(&b'*') {
            at += 1;
            last = Some((at, seen));
        } else if pattern.get(at) == Some(&text[seen]) {
            (at, seen) = (at + 1, seen + 1);
        } else if let Some((behind, from)) = last {
            // The `*` takes one byte more.
            (at, seen) = (behind, from + 1);
            last = Some((behind, seen));
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
    fn nothing_set_is_an_empty_object() {
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
    fn a_star_stands_for_any_text_anywhere() {
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
    fn a_wrong_type_and_broken_json_say_where() {
        let error = parse::<Example>(r#"{"settleSeconds": "3"}"#).unwrap_err();
        assert!(error.contains("column"), "{error}");
        let error = parse::<Example>("{").unwrap_err();
        assert!(error.contains("column"), "{error}");
        assert_eq!(parse::<Example>("[3]"), Err("must be a JSON object".to_owned()));
        assert!(parse::<Example>(r#"{"settleSeconds": 1} x"#).is_err());
    }
}
