//! What a policy logs natively.

use std::cell::RefCell;

thread_local! {
    /// Lines of this thread since somebody wants them.
    static WANTED: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Calls `policy` and answers what it does and the lines that it logs, which otherwise go to
/// standard error.
pub fn logged<T>(policy: impl FnOnce() -> T) -> (T, Vec<String>) {
    let before = WANTED.replace(Some(Vec::new()));
    let answer = policy();
    (answer, WANTED.replace(before).unwrap_or_default())
}

pub(crate) fn log(line: &str) {
    WANTED.with_borrow_mut(|wanted| match wanted {
        Some(lines) => lines.push(line.to_owned()),
        None => eprintln!("{line}"),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_to_whoever_asked_last() {
        let ((inner, last), lines) = logged(|| {
            log("outer");
            (logged(|| log("inner")).1, log("again"))
        });
        assert_eq!((inner, last), (vec!["inner".to_owned()], ()));
        assert_eq!(lines, ["outer", "again"]);
    }
}
