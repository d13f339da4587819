//! `berth policy new`: creates a folder for a new policy. Its files are embedded in the program (`build.rs` lists the
//! templates, the SDK and the contract of `policies-wasm`).

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

/// The policy's name in the templates, as a name, an identifier and a type.
const NAME: &str = "my-policy";
const IDENTIFIER: &str = "my_policy";
const TYPE: &str = "MyPolicy";

/// Longest name: a DNS label.
const NAME_BYTES_MAX: usize = 63;

pub(super) fn run(new: &NewPolicy, out: &mut Out) -> anyhow::Result<()> {
    check_name(&new.name).map_err(BadUsage)?;
    let folder = new.dir.clone().unwrap_or_else(|| PathBuf::from(&new.name));
    if folder.symlink_metadata().is_ok() {
        bail!("{} exists already: choose another folder with --dir", folder.display());
    }
    let files = files(new.lang, &new.name);
    // Written under a temporary name, so that an existing folder is complete.
    let draft = create_draft(&folder)?;
    let written = write_all(&draft, &files).and_then(|()| {
        fs::rename(&draft, &folder).with_context(|| format!("cannot create {}", folder.display()))
    });
    if written.is_err() {
        let _ = fs::remove_dir_all(&draft);
    }
    written?;
    let readme = files.iter().find(|(path, _)| path == "README.md").map_or("", |(_, text)| text.as_str());
    let created = CreatedPolicy {
        name: new.name.clone(),
        lang: new.lang.to_possible_value().map(|lang| lang.get_name().to_owned()).unwrap_or_default(),
        folder: folder.display().to_string(),
        files: files.iter().map(|(path, _)| path.clone()).collect(),
        commands: commands(readme),
    };
    out.answer(&created, |created| {
        let CreatedPolicy { folder, files, commands, .. } = created;
        let commands: String = commands.iter().map(|command| format!("  {command}\n")).collect();
        format!("created {folder} with {} files; see README.md:\n  cd {folder}\n{commands}", files.len())
    })
}

/// The result of `berth policy new`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CreatedPolicy {
    name: String,
    lang: String,
    folder: String,
    /// Paths in the folder.
    files: Vec<String>,
    /// The commands that build, check and test it, run in the folder.
    commands: Vec<String>,
}

/// The first block of commands of a README, which builds, checks and tests the policy.
fn commands(readme: &str) -> Vec<String> {
    let from_block = readme.lines().skip_while(|line| !line.starts_with("    "));
    let block = from_block.take_while(|line| line.starts_with("    "));
    block.map(|line| line.trim_start().to_owned()).collect()
}

/// Checks that the name is a DNS label, as the contract requires.
fn check_name(name: &str) -> Result<(), String> {
    let is_allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let has_bad_dash = name.starts_with('-') || name.ends_with('-') || name.contains("--");
    let starts_with_letter = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase());
    if name.len() > NAME_BYTES_MAX || has_bad_dash || !starts_with_letter || !name.bytes().all(is_allowed) {
        return Err(format!(
            "{name:?} is not a name for a policy: lower-case letters, digits and single dashes, a letter first, at \
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
    let rename = |text: &str| {
        let camel: String = name.split('-').map(capitalize).collect();
        text.replace(NAME, name).replace(IDENTIFIER, &name.replace('-', "_")).replace(TYPE, &camel)
    };
    let mut files = Vec::new();
    for (path, text) in POLICY_FILES {
        if let Some(path) = path.strip_prefix(folder) {
            // A `.gitignore` in the templates would apply to this repository.
            let path = if path == "gitignore" { ".gitignore".to_owned() } else { rename(path) };
            files.push((path, rename(text)));
        } else if path.starts_with("wit/") || (path.starts_with("sdk/") && lang == Lang::Rust) {
            files.push(((*path).to_owned(), (*text).to_owned()));
        }
    }
    files
}

fn capitalize(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_ascii_uppercase().to_string() + letters.as_str())
}

/// Creates a temporary folder next to `folder`.
fn create_draft(folder: &Path) -> anyhow::Result<PathBuf> {
    let name = folder.file_name().ok_or_else(|| BadUsage("--dir names no folder".into()))?.to_string_lossy();
    let draft = folder.with_file_name(format!(".{name}.draft-{}", std::process::id()));
    if let Some(parent) = folder.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    fs::create_dir(&draft).with_context(|| format!("cannot create {}", draft.display()))?;
    Ok(draft)
}

fn write_all(folder: &Path, files: &[(String, String)]) -> anyhow::Result<()> {
    for (path, text) in files {
        let path = folder.join(path);
        let context = || format!("cannot write {}", path.display());
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).with_context(context)?;
        }
        let mut file = fs::File::create_new(&path).with_context(context)?;
        file.write_all(text.as_bytes()).with_context(context)?;
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
    fn the_templates_name_is_replaced_and_all_languages_have_the_contract() {
        for lang in [Lang::Rust, Lang::C, Lang::Js, Lang::Python] {
            let files = files(lang, "fill-first");
            let has = |path: &str| files.iter().any(|(p, _)| p == path);
            for path in ["README.md", "stack.yaml", ".gitignore", "wit/policy.wit"] {
                assert!(has(path), "{lang:?}: {path}");
            }
            assert!(files.iter().any(|(path, _)| path.starts_with("scenarios/")), "{lang:?}");
            for (path, text) in files.iter().filter(|(path, _)| !path.starts_with("sdk/")) {
                for name in [NAME, IDENTIFIER, TYPE] {
                    assert!(!path.contains(name) && !text.contains(name), "{lang:?} {path}: {name}");
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
