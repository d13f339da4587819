//! Label values: at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends (Kubernetes, "Labels
//! and Selectors").

/// Longest label value, bytes.
pub const LABEL_VALUE_MAX: usize = 63;

/// Converts a text to a label value as GFD does: white space becomes one `-`, other characters that are not allowed are
/// removed. The result may be empty, which is a valid value.
#[must_use]
pub fn label_value(text: &str) -> String {
    label_value_with_suffix(text, "")
}

/// [`label_value`] with a suffix that is never cut: the text before it is. Behind its leading `-` the suffix must be a
/// valid value.
#[must_use]
pub fn label_value_with_suffix(text: &str, suffix: &str) -> String {
    let kept: String = text
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || c.is_whitespace() || "-_.".contains(*c))
        .collect();
    let joined = kept.split_whitespace().collect::<Vec<_>>().join("-");
    let edge = |c: char| !c.is_ascii_alphanumeric();
    let text_max = LABEL_VALUE_MAX.saturating_sub(suffix.len());
    // ASCII only, so every index is a character boundary.
    let cut = &joined[..joined.len().min(text_max)];
    let cut = cut.trim_matches(edge);
    if cut.is_empty() { suffix.trim_matches(edge).to_owned() } else { format!("{cut}{suffix}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_valid_in_kubernetes() {
        for (text, value) in [
            ("NVIDIA H100 80GB HBM3", "NVIDIA-H100-80GB-HBM3"),
            ("  Tesla   T4 ", "Tesla-T4"),
            ("NVIDIA RTX\u{2122} 6000 (Ada) /x+y", "NVIDIA-RTX-6000-Ada-xy"),
            ("\u{1f600}", ""),
            ("-_.a._-", "a"),
            ("", ""),
            ("a\tb\nc", "a-b-c"),
        ] {
            assert_eq!(label_value(text), value, "{text:?}");
        }
        let long = "a ".repeat(100);
        assert_eq!(label_value(&long).len(), LABEL_VALUE_MAX);
        let shared = label_value_with_suffix(&long, "-SHARED");
        assert!(shared.len() <= LABEL_VALUE_MAX && shared.ends_with("a-SHARED"), "{shared}");
        assert_eq!(label_value_with_suffix("\u{2122}", "-SHARED"), "SHARED");
    }

    proptest::proptest! {
        #[test]
        fn every_model_name_becomes_a_valid_value(text in "\\PC{0,120}", shared: bool) {
            let value = label_value_with_suffix(&text, if shared { "-SHARED" } else { "" });
            let ends = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
            proptest::prop_assert!(value.len() <= LABEL_VALUE_MAX);
            proptest::prop_assert!(ends(value.chars().next()) && ends(value.chars().last()));
            let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            proptest::prop_assert!(value.chars().all(allowed));
        }
    }
}
