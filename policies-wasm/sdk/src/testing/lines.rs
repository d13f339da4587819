//! Log lines of natively called policies.

use std::cell::RefCell;

thread_local! {
    /// Lines that the present call of [`logged`] on this thread has captured; `None` outside of one.
    static CAPTURED: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Calls `policy` and returns its result with the lines that it logs. Outside of this function they are
/// written to standard error.
pub fn logged<T>(policy: impl FnOnce() -> T) -> (T, Vec<String>) {
    let before = CAPTURED.replace(Some(Vec::new()));
    let answer = policy();
    (answer, CAPTURED.replace(before).unwrap_or_default())
}

pub(crate) fn log(line: &str) {
    CAPTURED.with_borrow_mut(|captured| match captured {
        Some(lines) => lines.push(line.to_owned()),
        None => eprintln!("{line}"),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_call_captures_the_lines() {
        let ((inner, last), lines) = logged(|| {
            log("outer");
            (logged(|| log("inner")).1, log("again"))
        });
        assert_eq!((inner, last), (vec!["inner".to_owned()], ()));
        assert_eq!(lines, ["outer", "again"]);
    }
}
