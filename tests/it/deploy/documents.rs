//! The documents: the README stays short, links lead to files and headings, and commands can be parsed.

use berth::args::Cli;
use clap::Parser as _;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const README_LINES_MAX: usize = 130;

fn at(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(at(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// What a folder holds, as paths from the root, in order.
fn entries(folder: &str) -> Vec<String> {
    let names = std::fs::read_dir(at(folder)).unwrap().map(|entry| entry.unwrap().file_name());
    let mut paths: Vec<String> = names.map(|name| format!("{folder}/{}", name.to_str().unwrap())).collect();
    paths.sort();
    paths
}

/// The documents for users, whose commands are parsed.
fn guides() -> Vec<String> {
    let mut guides: Vec<String> = ["README.md", "policies-wasm/README.md"].map(String::from).into();
    guides.extend(entries("docs").into_iter().filter(|path| path.ends_with(".md")));
    guides
}

/// Every document whose links are checked; each policy has one of its own, and so have tools of the tests.
fn documents() -> Vec<String> {
    let mut documents = guides();
    documents.extend(["ARCHITECTURE.md", "CHANGELOG.md", "deploy/METRICS.md"].map(String::from));
    documents.extend(["openapi/README.md", "tests/README.md"].map(String::from));
    let folders = ["policies-wasm", "tests"].into_iter().flat_map(entries);
    documents.extend(folders.map(|folder| format!("{folder}/README.md")).filter(|path| at(path).exists()));
    documents
}

/// Each line with the language of the fenced block that it is in; `None` outside of blocks.
fn lines(text: &str) -> Vec<(Option<&str>, &str)> {
    let (mut block, mut lines) = (None, Vec::new());
    for line in text.lines() {
        match line.trim_start().strip_prefix("```") {
            Some(language) => block = if block.is_none() { Some(language.trim()) } else { None },
            None => lines.push((block, line)),
        }
    }
    lines
}

/// The lines outside of fenced blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    lines(text).into_iter().filter(|(block, _)| block.is_none()).map(|(_, line)| line)
}

/// The line without its code spans; one that goes on in the next line stays.
fn without_code(line: &str) -> String {
    let pieces: Vec<&str> = line.split('`').collect();
    if pieces.len().is_multiple_of(2) { line.to_owned() } else { pieces.into_iter().step_by(2).collect() }
}

/// The targets of links to files and headings: what is between `](` and `)`.
fn links(text: &str) -> Vec<String> {
    let prose: String = prose(text).map(|line| without_code(line) + "\n").collect();
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets.map(|(target, _)| target.to_owned()).filter(|target| !target.contains("://")).collect()
}

/// The fragments by which GitHub names the headings of a text.
fn fragments(text: &str) -> Vec<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let headings = prose(text).filter(|line| line.starts_with('#'));
    let fragment = |heading: &str| {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let fragment = kept.collect::<String>().replace(' ', "-");
        let times = seen.entry(fragment.clone()).or_default();
        *times += 1;
        if *times == 1 { fragment } else { format!("{fragment}-{}", *times - 1) }
    };
    headings.map(fragment).collect()
}

/// The words of a command as a shell splits them, up to a comment, a pipe or a redirection.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None::<char>);
    for c in line.chars() {
        match quote {
            Some(end) if end == c => quote = None,
            Some(_) => word.get_or_insert_default().push(c),
            None if c.is_whitespace() => words.extend(word.take()),
            None if (c == '#' && word.is_none()) || "|<>&;".contains(c) => break,
            None if c == '\'' || c == '"' => {
                word = Some(word.unwrap_or_default());
                quote = Some(c);
            }
            None => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

#[test]
fn the_readme_is_short() {
    let lines = read("README.md").lines().count();
    assert!(lines <= README_LINES_MAX, "README.md has {lines} lines, at most {README_LINES_MAX} are allowed");
}

/// Paths of the source tree in code spans, such as `src/kernel/node/decide.rs`; not those with a placeholder or braces.
fn paths(text: &str) -> Vec<&str> {
    const ROOTS: [&str; 7] = ["src/", "tests/", "proto/", "policies-wasm/", "openapi/", "deploy/", "docs/"];
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let spans = prose(text).flat_map(|line| line.split('`').skip(1).step_by(2));
    spans.filter(|span| ROOTS.iter().any(|root| span.starts_with(root)) && span.chars().all(plain)).collect()
}

#[test]
fn every_path_in_the_documents_leads_to_a_file_or_folder() {
    let mut found = 0;
    // The guides of policies name the paths of their authors.
    let checked = |document: &String| !document.starts_with("policies-wasm/");
    for document in documents().into_iter().filter(checked) {
        let text = read(&document);
        for path in paths(&text) {
            assert!(at(path).exists(), "{document} names {path}, which is not there");
            found += 1;
        }
    }
    assert!(found > 80, "only {found} paths were found");
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    for document in documents() {
        let text = read(&document);
        for link in links(&text) {
            let (path, fragment) = link.split_once('#').unwrap_or((&link, ""));
            let folder = Path::new(&document).parent().unwrap();
            let target =
                if path.is_empty() { document.clone() } else { folder.join(path).display().to_string() };
            assert!(at(&target).exists(), "{document}: there is no file for the link {link}");
            let known = fragment.is_empty() || fragments(&read(&target)).iter().any(|one| one == fragment);
            assert!(known, "{document}: there is no heading for the link {link}");
        }
    }
}

#[test]
fn every_command_of_the_documents_can_be_parsed() {
    let mut parsed = 0;
    for document in guides() {
        let text = read(&document);
        let blocks = lines(&text).into_iter().filter(|(block, _)| *block == Some("sh"));
        for command in blocks.map(|(_, line)| line.trim()).filter(|line| line.starts_with("berth ")) {
            if let Err(error) = Cli::try_parse_from(words(command)) {
                panic!("{document}: {command}\n{error}");
            }
            parsed += 1;
        }
    }
    assert!(parsed > 20, "only {parsed} commands were found");
}

#[test]
fn the_units_of_systemd_start_the_daemon_and_the_guard() {
    let command = |unit: &str| {
        let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        Cli::try_parse_from(words(start)).unwrap_or_else(|error| panic!("{start}: {error}")).command
    };
    let unit = read("deploy/berth.service");
    assert!(matches!(command(&unit), berth::args::Command::Serve(_)), "{unit}");
    // The folder that the daemon uses without `stateDir`.
    assert!(unit.contains("\nStateDirectory=berth\n"));
    let unit = read("deploy/berth-guard.service");
    assert!(matches!(command(&unit), berth::args::Command::Guard { .. }), "{unit}");
}

#[test]
fn what_an_uninstall_leaves_is_documented() {
    let text = read("docs/cluster.md");
    let section = text.split("\n## ").find(|section| section.starts_with("Uninstall")).unwrap();
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).collect();
    for left in [berth_gpus::cdi::OWN_FILE, "`GPUUnavailable`", "/var/lib/berth", "`labels.nfdFile`"] {
        assert!(rows.iter().any(|row| row.contains(left)), "{left}");
    }
    assert!(section.contains("--field-manager=berth"));
}

/// The documents for operators and the chart have one list of the keys that the daemon applies while it runs.
#[test]
fn the_keys_that_apply_at_once_are_those_for_which_the_chart_keeps_the_pods() {
    let chart = read("deploy/helm/berth/templates/_helpers.tpl");
    let omitted = chart.lines().find_map(|line| line.split_once("omit . ")).unwrap().1;
    let omitted: Vec<&str> = omitted.split('"').skip(1).step_by(2).collect();
    let text = read("docs/configuration.md");
    let row = text.lines().find(|line| line.starts_with("| `stack`, `resource`")).unwrap();
    let at_once = row.split('|').nth(1).unwrap();
    let documented: Vec<&str> = at_once.split('`').skip(1).step_by(2).collect();
    assert_eq!(documented, omitted);
    for path in ["docs/cluster.md", "docs/sharing.md", "deploy/helm/berth/values.yaml"] {
        let text = read(path);
        assert!(
            !text.contains("strategy needs a\n  restart") && !text.contains("A change rolls the pods"),
            "{path}"
        );
    }
}

/// The routes are those of the application, in one table: a second list would have to be kept equal.
#[test]
fn the_server_crate_names_no_route() {
    let document: serde_json::Value = serde_json::from_str(berth_admin::openapi_json()).unwrap();
    let mut paths: Vec<&str> = document["paths"].as_object().unwrap().keys().map(String::as_str).collect();
    assert!(paths.len() > 30, "{}", paths.len());
    paths.extend(["/swagger-ui", "/problems", "/page", "/openapi.json"]);
    for file in entries("src/http").into_iter().filter(|path| path.ends_with(".rs")) {
        let text = read(&file);
        let named = paths.iter().find(|path| text.contains(**path));
        assert_eq!(named, None, "{file}");
        assert!(!text.contains("/api/v1"), "{file}");
    }
}
