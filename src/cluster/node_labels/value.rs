//! Values of labels: at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends
//! (Kubernetes, "Labels and Selectors").

/// Longest value of a label.
pub const LABEL_VALUE_MAX: usize = 63;

/// The text as a label's value, as GFD writes it: spaces become one `-`, what is not allowed goes. May be
/// empty, which is a value.
#[must_use]
pub fn safe(text: &str) -> String {
    safe_with(text, "")
}

/// The same with a suffix that stays whole, whatever must be cut off before it. The suffix is a value
/// of its own behind a `-`.
#[must_use]
pub fn safe_with(text: &str, suffix: &str) -> String {
    let kept: String = text
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || c.is_whitespace() || "-_.".contains(*c))
        .collect();
    let joined = kept.split_whitespace().collect::<Vec<_>>().join("-");
    let edge = |c: char| !c.is_ascii_alphanumeric();
    let room = LABEL_VALUE_MAX.saturating_sub(suffix.len());
    // All of it is ASCII by now.
    let cut = &joined[..joined.len().min(room)];
    let cut = cut.trim_matches(edge);
    if cut.is_empty() { suffix.trim_matches(edge).to_owned() } else { format!("{cut}{suffix}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_as_kubernetes_takes_them() {
        for (text, value) in [
            ("NVIDIA H100 80GB HBM3", "NVIDIA-H100-80GB-HBM3"),
            ("  Tesla   T4 ", "Tesla-T4"),
            ("NVIDIA RTX\u{2122} 6000 (Ada) /x+y", "NVIDIA-RTX-6000-Ada-xy"),
            ("\u{1f600}", ""),
            ("-_.a._-", "a"),
            ("", ""),
            ("a\tb\nc", "a-b-c"),
        ] {
            assert_eq!(safe(text), value, "{text:?}");
        }
        let long = "a ".repeat(100);
        assert_eq!(safe(&long).len(), LABEL_VALUE_MAX);
        let shared = safe_with(&long, "-SHARED");
        assert!(shared.len() <= LABEL_VALUE_MAX && shared.ends_with("a-SHARED"), "{shared}");
        assert_eq!(safe_with("\u{2122}", "-SHARED"), "SHARED");
    }

    proptest::proptest! {
        #[test]
        fn whatever_a_model_is_called(text in "\\PC{0,120}", shared: bool) {
            let value = safe_with(&text, if shared { "-SHARED" } else { "" });
            let ends = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
            proptest::prop_assert!(value.len() <= LABEL_VALUE_MAX);
            proptest::prop_assert!(ends(value.chars().next()) && ends(value.chars().last()));
            let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            proptest::prop_assert!(value.chars().all(allowed));
        }
    }
}
