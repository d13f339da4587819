//! A test over the texts of this repository that are printed: every command of `berth` that they name is one that the
//! command line accepts, and every flag exists.

use berth::args::Cli;
use clap::error::{ContextKind, ErrorKind};
use clap::{Command, CommandFactory, Parser};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Words with `--` that are flags of other programs, or rights in a map of memory.
const NOT_OF_BERTH: [&str; 14] = [
    "--default-runtime",
    "--driver-root",
    "--folder",
    "--gpu-id",
    "--gpu-reset",
    "--host-driver-version",
    "--link",
    "--root-dir",
    "--runtime",
    "--set-as-default",
    "--show-managed-fields",
    "--test",
    "--validate",
    "--xp",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All files below a folder with one of these extensions.
fn files(folder: &Path, extensions: &[&str], into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, extensions, into);
        } else if path.extension().is_some_and(|end| extensions.iter().any(|known| end == *known)) {
            into.push(path);
        }
    }
}

/// The texts that are printed: sources without their tests, the chart, and the pages about problems.
fn texts() -> Vec<(String, String)> {
    let mut all = Vec::new();
    files(&root().join("src"), &["rs"], &mut all);
    files(&root().join("deploy/helm/berth"), &["tpl", "yaml", "txt"], &mut all);
    all.push(root().join("docs/problems.md"));
    let is_test =
        |path: &PathBuf| path.file_name().is_some_and(|name| name == "tests.rs" || name == "remedies.rs");
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_owned();
        let is_rust = path.extension().is_some_and(|end| end == "rs");
        (path.strip_prefix(root()).unwrap().display().to_string(), joined(&text, is_rust))
    };
    all.into_iter().filter(|path| !is_test(path)).map(read).collect()
}

/// The text with literals and comments that continue in the next line as one line.
fn joined(text: &str, is_rust: bool) -> String {
    let mut result = String::with_capacity(text.len());
    let mut in_literal = false;
    for line in text.lines() {
        let line = if in_literal { line.trim_start() } else { line };
        in_literal = line.ends_with('\\') && !line.ends_with("\\\\");
        let trimmed = line.trim_start();
        let comment = ["/// ", "//! ", "// ", "# "].iter().find_map(|mark| trimmed.strip_prefix(mark));
        // A command in backquotes that goes on in the next line of a comment.
        let last = result.strip_suffix('\n').unwrap_or(&result).rsplit('\n').next().unwrap_or_default();
        let is_open = last.matches('`').count() % 2 == 1;
        // A folded text of YAML goes on without a mark.
        let goes_on = if is_rust { comment } else { Some(comment.unwrap_or(trimmed)) };
        match goes_on.filter(|_| is_open) {
            Some(comment) => {
                result.pop();
                result.push(' ');
                result += comment;
            }
            None => result += line,
        }
        if in_literal {
            result.pop();
        } else {
            result.push('\n');
        }
    }
    result
}

/// The commands in backquotes, and those of lines and literals that begin with one, as the examples of a help text do.
fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in text.lines() {
        let quoted = line.split('`').skip(1).step_by(2);
        found.extend(quoted.filter_map(berth_of).map(str::to_owned));
        // As a line of its own, or as a literal.
        let begins = line.trim_start().strip_prefix("berth ").into_iter();
        let literals = line.match_indices("\"berth ").map(|(at, _)| &line[at + "\"berth ".len()..]);
        for rest in begins.chain(literals) {
            // An escaped quote is one of the command, of the same length while its end is found.
            let masked = rest.replace("\\\"", "''");
            let end = ["  ", "\"", "\\n", " #"].iter().filter_map(|end| masked.find(end)).min();
            let rest = rest[..end.unwrap_or(rest.len())].replace("\\\"", "\"");
            if Cli::command().find_subcommand(rest.split(' ').next().unwrap_or_default()).is_some() {
                found.push(format!("berth {rest}"));
            }
        }
    }
    found
}

/// The command of `berth` in a quoted one, which may run it in a pod.
fn berth_of(quoted: &str) -> Option<&str> {
    match quoted.find("-- berth ") {
        Some(at) => Some(&quoted[at + 3..]),
        None => quoted.starts_with("berth ").then_some(quoted),
    }
}

/// The words of a command, with a value in place of each placeholder.
fn words(command: &str) -> Vec<String> {
    let mut words = Vec::new();
    let command = without_templates(command);
    let mut rest = command.trim().trim_end_matches('\\').trim_end();
    while !rest.is_empty() {
        let (word, behind) = match rest.strip_prefix('\'') {
            Some(quoted) => quoted.split_once('\'').unwrap_or((quoted, "")),
            None => rest.split_once(' ').unwrap_or((rest, "")),
        };
        if [">", "|", "&&", "#"].contains(&word) {
            break;
        }
        words.extend(Some(value(word)).filter(|_| word != "[OPTIONS]"));
        rest = behind.trim_start();
    }
    words
}

/// A value in place of each `{{ ... }}` of an alert.
fn without_templates(command: &str) -> String {
    let mut text = String::new();
    let mut rest = command;
    while let Some((before, behind)) = rest.split_once("{{") {
        let Some((_, after)) = behind.split_once("}}") else { break };
        text += before;
        text.push('1');
        rest = after;
    }
    text + rest
}

fn value(word: &str) -> String {
    // Of a usage line.
    let word = word.trim_end_matches("...").trim_start_matches('<').trim_end_matches('>');
    let is_name = word.len() > 1 && word.bytes().all(|b| b.is_ascii_uppercase() || b == b'-' || b == b'_');
    match word {
        "TIME" => "1h".into(),
        _ if is_name => "1".into(),
        word => {
            // `{}`, `{gpu}` and `{0}` of a format.
            let mut text = String::new();
            let mut rest = word;
            while let Some((before, behind)) = rest.split_once('{') {
                let Some((_, after)) = behind.split_once('}') else { break };
                text += before;
                text.push('1');
                rest = after;
            }
            text + rest
        }
    }
}

/// Why the command line does not accept a command. The name of one without its arguments is accepted.
fn refused(command: &str) -> Option<String> {
    let mut words = words(command);
    let error = Cli::try_parse_from(&words).err()?;
    // A flag that is named without its value.
    if error.kind() == ErrorKind::InvalidValue && words.last().is_some_and(|last| last.starts_with("--")) {
        words.push("1".into());
        return Cli::try_parse_from(&words).err().map(|error| error.kind().to_string());
    }
    let named = Cli::command();
    let is_path = words[1..].iter().try_fold(named, |command, word| command.find_subcommand(word).cloned());
    match error.kind() {
        // The name of a group prints the help of its commands.
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => None,
        ErrorKind::MissingSubcommand | ErrorKind::MissingRequiredArgument if is_path.is_some() => None,
        kind => Some(format!(
            "{kind:?} {}",
            error.get(ContextKind::InvalidArg).map(ToString::to_string).unwrap_or_default()
        )),
    }
}

#[test]
fn every_command_that_is_printed_is_one_that_works() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for (file, text) in texts() {
        for command in commands(&text) {
            count += 1;
            wrong.extend(refused(&command).map(|why| format!("{file}: `{command}`: {why}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 100, "only {count} commands were found");
}

/// The lines of the Rust sources that are no comments, each with its file.
fn lines_of_code() -> Vec<(String, String)> {
    let sources = texts().into_iter().filter(|(file, _)| file.ends_with(".rs"));
    let lines = sources.flat_map(|(file, text)| {
        let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        lines.map(|line| (file.clone(), line.to_owned())).collect::<Vec<_>>()
    });
    lines.collect()
}

/// Otherwise the test above would not find it.
#[test]
fn a_command_within_a_sentence_is_in_backquotes() {
    let root = Cli::command();
    let mut wrong = Vec::new();
    for (file, line) in lines_of_code() {
        let outside: Vec<&str> = line.split('`').step_by(2).collect();
        for part in outside {
            let sentences = part.match_indices(" berth ").filter(|(at, _)| {
                // Examples of a help text are lines of their own.
                !part[..*at].trim().is_empty()
            });
            let first =
                sentences.map(|(at, found)| part[at + found.len()..].split(' ').next().unwrap_or_default());
            let known = first.filter(|word| root.find_subcommand(word).is_some());
            wrong.extend(known.map(|word| format!("{file}: berth {word}: {}", line.trim())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn flags(command: &Command, into: &mut BTreeSet<String>) {
    let long = |arg: &clap::Arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long().into_iter().chain(aliases).map(|long| format!("--{long}")).collect::<Vec<_>>()
    };
    into.extend(command.get_arguments().flat_map(long));
    command.get_subcommands().for_each(|inner| flags(inner, into));
}

#[test]
fn every_flag_that_is_printed_exists() {
    let mut root = Cli::command();
    root.build();
    let mut known = BTreeSet::new();
    flags(&root, &mut known);
    let mut wrong = Vec::new();
    for (file, line) in lines_of_code() {
        // Only in literals: `--` is an operator nowhere.
        let named = line.match_indices("--").filter_map(|(at, _)| {
            let before = line[..at].chars().next_back();
            let rest = &line[at + 2..];
            let end =
                rest.find(|c: char| !c.is_ascii_lowercase() && c != '-' && c != '.').unwrap_or(rest.len());
            let flag = rest[..end].trim_end_matches(['-', '.']);
            let is_flag = flag.starts_with(|c: char| c.is_ascii_lowercase());
            (is_flag && before.is_none_or(|c| c != '-' && !c.is_ascii_alphanumeric()))
                .then(|| format!("--{flag}"))
        });
        let unknown = named.filter(|flag| !known.contains(flag) && !NOT_OF_BERTH.contains(&flag.as_str()));
        wrong.extend(unknown.map(|flag| format!("{file}: {flag}: {}", line.trim())));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
