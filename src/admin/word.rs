//! Who does something and why, by their own word.

use super::caller;
use super::gpus::check_reason;
use super::problem::{Kind, Problem};

/// Longest name of who does something, bytes.
const BY_BYTES_MAX: usize = 128;

/// Who it is: by their own word, else whom the door let in.
///
/// # Errors
/// If that or the reason is too long, or holds control characters.
pub(super) fn checked(by: Option<String>, reason: &str) -> Result<String, Problem> {
    check_reason(reason)?;
    let Some(by) = by else { return Ok(caller::name()) };
    if by.trim().is_empty() || by.len() > BY_BYTES_MAX || by.chars().any(char::is_control) {
        let rule = format!("by: 1 to {BY_BYTES_MAX} bytes, no control characters");
        return Err(Problem::new(Kind::Invalid, rule));
    }
    caller::says_who(&by);
    Ok(by)
}
