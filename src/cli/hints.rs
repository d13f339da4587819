//! Hints of the API, rewritten for the command line: they name requests and headers, in place of which the user of a
//! command has subcommands and flags.

use berth_api::Problem;

/// Terms of the API, and those of the command line. A longer text comes before one that it begins with.
const REPLACEMENTS: [(&str, &str); 17] = [
    ("GET /api/v1/gpus lists", "`berth gpu list` shows"),
    ("GET /api/v1/allocations lists", "`berth allocation list` shows"),
    ("GET /api/v1/policies lists", "`berth policy list` shows"),
    ("GET /api/v1/shadows lists", "`berth policy shadow list` shows"),
    ("GET /api/v1/stack/history lists", "`berth policy history` shows"),
    ("upload their bytes again", "`berth policy push` their bytes again"),
    ("PUT /api/v1/stack activates", "`berth policy activate` activates"),
    ("GET /api/v1/stack shows", "`berth policy stack` shows"),
    ("DELETE /api/v1/shadows/{id}", "berth policy shadow stop ID"),
    ("DELETE /api/v1/shadows/", "berth policy shadow stop "),
    (
        "read the stack again and send its ETag as If-Match",
        "look at what is active now (`berth policy stack`) and give its revision with --if-revision",
    ),
    ("cursor: the `next` of an answer", "--after: the `next` of an answer"),
    ("read it again, and send its new ETag as If-Match", "look at it again, and repeat the command"),
    ("read the state again before a retry", "see whether it was done after all before you try again"),
    ("DELETE /api/v1/allocations/", "`berth allocation end` "),
    ("upload it first", "`berth policy push` it first"),
    ("repeat the request with ?force=true", "repeat the command with --force"),
];

/// A problem's detail, with the hint in the next line.
pub(super) fn message(problem: &Problem) -> String {
    let detail = typed(&problem.detail);
    match &problem.hint {
        Some(hint) => format!("{detail}\n  {}", typed(hint)),
        None => detail,
    }
}

fn typed(text: &str) -> String {
    REPLACEMENTS.iter().fold(text.to_owned(), |text, (http, command)| text.replace(http, command))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// The literals of every `.hint(` in the API's sources.
    fn hints() -> Vec<String> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../admin");
        let mut found = Vec::new();
        for file in fs::read_dir(folder).unwrap() {
            let text = fs::read_to_string(file.unwrap().path()).unwrap_or_default();
            for after in text.split(".hint(").skip(1) {
                let Some((_, literal)) = after.split_once('"') else { continue };
                found.push(literal.split('"').next().unwrap().to_owned());
            }
        }
        found
    }

    #[test]
    fn no_hint_that_a_command_can_meet_speaks_http() {
        // Hints for requests that the command line never sends.
        const NEVER_SENT: [&str; 3] = ["Content-Type", "Authorization", "Accept-Encoding"];
        let hints = hints();
        assert!(hints.len() > 12, "the hints were not found");
        for hint in hints.iter().filter(|h| !NEVER_SENT.iter().any(|n| h.contains(n))) {
            let said = typed(hint);
            for http in ["/api/", "ETag", "If-Match", "GET ", "DELETE ", "header"] {
                assert!(!said.contains(http), "{said}");
            }
        }
    }
}
