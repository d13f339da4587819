//! The author and the reason of a change.

use crate::resources::gpus::check_reason;
use berth_api::Kind;
use berth_http::Failure;
use berth_http::caller::{BY_BYTES_MAX, Caller};

/// The author of a change: the authenticated caller, and the person for whom it acts, if the request names one. So a
/// record has at most twice [`BY_BYTES_MAX`] bytes of it and eight more, and no caller can sign with another's name
/// alone.
///
/// # Errors
/// If the name or the reason is too long, or contains control characters.
pub(crate) fn checked(caller: &Caller, by: Option<String>, reason: &str) -> Result<String, Failure> {
    check_reason(caller, reason)?;
    let Some(by) = by else { return Ok(caller.name()) };
    if by.trim().is_empty() || by.len() > BY_BYTES_MAX || by.chars().any(char::is_control) {
        let rule = format!("by: 1 to {BY_BYTES_MAX} bytes, no control characters");
        return Err(Failure::new(Kind::Invalid, rule));
    }
    caller.note_person(&by);
    let known = caller.name();
    Ok(if by == known { known } else { format!("{known} (for {by})") })
}
