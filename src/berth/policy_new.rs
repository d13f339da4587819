//! `berth policy new`: a folder to begin a policy in. What it holds is embedded (build.rs lists
//! policies-wasm/templates, the kit and the contract), so that this program alone is enough.

use crate::args::{Lang, NewPolicy};
use anyhow::{Context, bail};
use berth_cli::output::Out;
use berth_cli::usage::BadUsage;
use clap::ValueEnum;
use serde::Serialize;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

include!(concat!(env!("OUT_DIR"), "/policy_files.rs"));

/// What the templates call their policy, as a name, an identifier and a type.
const NAME: &str = "my-policy";
const IDENTIFIER: &str = "my_policy";
const TYPE: &str = "MyPolicy";

/// Longest name: a DNS label.
const NAME_BYTES_MAX: usize = 63;

pub(super) fn run(new: &NewPolicy, out: &mut Out) -> anyhow::Result<()> {
    check_name(&new.name).map_err(BadUsage)?;
    let folder = new.dir.clone().unwrap_or_else(|| PathBuf::from(&new.name));
    if folder.symlink_metadata().is_ok() {
        bail!("{} is there already: name another folder with --dir", folder.display());
    }
    let files = files(new.lang, &new.name);
    // Under another name first: a folder that is there is whole.
    let draft = draft(&folder)?;
    let written = write_all(&draft, &files).and_then(|()| {
        fs::rename(&draft, &folder).with_context(|| format!("cannot make {}", folder.display()))
    });
    if written.is_err() {
        let _ = fs::remove_dir_all(&draft);
    }
    written?;
    let readme = files.iter().find(|(path, _)| path == "README.md").map_or("", |(_, text)| text.as_str());
    let made = Made {
        name: new.name.clone(),
        lang: new.lang.to_possible_value().map(|lang| lang.get_name().to_owned()).unwrap_or_default(),
        folder: folder.display().to_string(),
        files: files.iter().map(|(path, _)| path.clone()).collect(),
        commands: commands(readme),
    };
    out.answer(&made, |made| {
        let Made { folder, files, commands, .. } = made;
        let commands: String = commands.iter().map(|command| format!("  {command}\n")).collect();
        format!("{folder} has {} files; begin with README.md:\n  cd {folder}\n{commands}", files.len())
    })
}

/// What `berth policy new` answers.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Made {
    name: String,
    lang: String,
    folder: String,
    /// Paths in the folder.
    files: Vec<String>,
    /// How it is built, checked and tested, to be run in the folder.
    commands: Vec<String>,
}

/// The first block of commands of a README: how it is built, checked and tested.
fn commands(readme: &str) -> Vec<String> {
    let from = readme.lines().skip_while(|line| !line.starts_with("    "));
    let block = from.take_while(|line| line.starts_with("    "));
    block.map(|line| line.trim_start().to_owned()).collect()
}

/// A DNS label, as the contract wants it.
fn check_name(name: &str) -> Result<(), String> {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let dashed = name.starts_with('-') || name.ends_with('-') || name.contains("--");
    let letter = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase());
    if name.len() > NAME_BYTES_MAX || dashed || !letter || !name.bytes().all(inner) {
        return Err(format!(
            "{name:?} is no name for a policy: lower-case letters, digits and single dashes, a letter first, at \
             most {NAME_BYTES_MAX} characters, such as fill-first"
        ));
    }
    Ok(())
}

/// Path and text of each file of the folder.
fn files(lang: Lang, name: &str) -> Vec<(String, String)> {
    let folder = match lang {
        Lang::Rust => "templates/rust/",
        Lang::C => "templates/c/",
        Lang::Js => "templates/js/",
        Lang::Python => "templates/python/",
    };
    let named = |text: &str| {
        let camel: String = name.split('-').map(capital).collect();
        text.replace(NAME, name).replace(IDENTIFIER, &name.replace('-', "_")).replace(TYPE, &camel)
    };
    let mut files = Vec::new();
    for (path, text) in POLICY_FILES {
        if let Some(path) = path.strip_prefix(folder) {
            // Under its own name it would hide files of this repository.
            let path = if path == "gitignore" { ".gitignore".to_owned() } else { named(path) };
            files.push((path, named(text)));
        } else if path.starts_with("wit/") || (path.starts_with("sdk/") && lang == Lang::Rust) {
            files.push(((*path).to_owned(), (*text).to_owned()));
        }
    }
    files
}

fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or(String::new(), |first| first.to_ascii_uppercase().to_string() + letters.as_str())
}

/// A folder beside the one that is wanted, which is not there yet.
fn draft(folder: &Path) -> anyhow::Result<PathBuf> {
    let name = folder.file_name().ok_or_else(|| BadUsage("--dir names no folder".into()))?.to_string_lossy();
    let draft = folder.with_file_name(format!(".{name}.draft-{}", std::process::id()));
    if let Some(parent) = folder.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    }
    fs::create_dir(&draft).with_context(|| format!("cannot make {}", draft.display()))?;
    Ok(draft)
}

fn write_all(folder: &Path, files: &[(String, String)]) -> anyhow::Result<()> {
    for (path, text) in files {
        let path = folder.join(path);
        let writing = || format!("cannot write {}", path.display());
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).with_context(writing)?;
        }
        let mut file = fs::File::create_new(&path).with_context(writing)?;
        file.write_all(text.as_bytes()).with_context(writing)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_dns_labels() {
        for good in ["a", "fill-first", "x2"] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", "-a", "a-", "a--b", "A", "a_b", "2x", "a/b", "..", &"x".repeat(64)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn no_file_keeps_the_templates_name_and_all_languages_have_the_contract() {
        for lang in [Lang::Rust, Lang::C, Lang::Js, Lang::Python] {
            let files = files(lang, "fill-first");
            let has = |path: &str| files.iter().any(|(p, _)| p == path);
            for path in ["README.md", "stack.yaml", ".gitignore", "wit/policy.wit"] {
                assert!(has(path), "{lang:?}: {path}");
            }
            assert!(files.iter().any(|(path, _)| path.starts_with("scenarios/")), "{lang:?}");
            for (path, text) in files.iter().filter(|(path, _)| !path.starts_with("sdk/")) {
                for word in [NAME, IDENTIFIER, TYPE] {
                    assert!(!path.contains(word) && !text.contains(word), "{lang:?} {path}: {word}");
                }
            }
            let readme = &files.iter().find(|(path, _)| path == "README.md").unwrap().1;
            let commands = commands(readme).join("\n");
            assert!(commands.contains("berth policy test "), "{lang:?}: {commands}");
            assert_eq!(commands.contains("cargo build"), lang == Lang::Rust);
        }
        assert!(files(Lang::Rust, "x").iter().any(|(path, _)| path == "sdk/src/lib.rs"));
    }
}
