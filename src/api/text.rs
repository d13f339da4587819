//! Optional texts.

/// The text, or `None` if it is empty.
pub(super) fn non_empty(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}
