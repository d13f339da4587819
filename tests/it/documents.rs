//! The documents: README stays short, and every link leads somewhere.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// README is for the first hour; all else is in `docs/`.
const README_LINES_MAX: usize = 130;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn documents() -> Vec<PathBuf> {
    let fixed = [
        "README.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "deploy/METRICS.md",
        "openapi/README.md",
        "policies-wasm/README.md",
        "tests/e2e/README.md",
        "tests/fuzz/README.md",
    ];
    let mut all: Vec<PathBuf> = fixed.iter().map(|path| root().join(path)).collect();
    for entry in std::fs::read_dir(root().join("docs")).unwrap() {
        all.push(entry.unwrap().path());
    }
    all
}

/// The text without its blocks of code, in which brackets are no links.
fn prose(text: &str) -> String {
    let mut inside = false;
    let lines = text.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        inside ^= fence;
        !inside && !fence
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Targets of `[text](target)` in this repository.
fn links(text: &str) -> Vec<String> {
    let ends = text.match_indices("](").map(|(at, _)| &text[at + 2..]);
    let targets = ends.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target.to_owned());
    targets.filter(|target| !target.contains("://") && !target.contains(char::is_whitespace)).collect()
}

/// Fragments of a document's headings, by the rule of GitHub.
fn fragments(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let slug = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(slug).collect()
}

#[test]
fn readme_is_short() {
    let lines = read(&root().join("README.md")).lines().count();
    assert!(
        lines <= README_LINES_MAX,
        "README.md has {lines} lines; move what is not for the first hour to docs/"
    );
}

#[test]
fn every_link_of_the_documents_leads_to_a_file_and_a_heading() {
    let mut broken = Vec::new();
    let mut followed = 0;
    for document in documents() {
        for link in links(&prose(&read(&document))) {
            followed += 1;
            let (path, fragment) = link.split_once('#').unwrap_or((&link, ""));
            let target = match path {
                "" => document.clone(),
                path => document.parent().unwrap().join(path),
            };
            let found = target.exists()
                && (fragment.is_empty() || fragments(&prose(&read(&target))).contains(fragment));
            if !found {
                broken.push(format!("{}: {link}", document.strip_prefix(root()).unwrap().display()));
            }
        }
    }
    assert!(followed > 40, "{followed} links were found");
    assert_eq!(broken, Vec::<String>::new());
}
