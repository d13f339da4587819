//! `berth policy new`: creates a folder for a new policy. Its files are embedded in the program (`build.rs` lists the
//! templates, the SDK and the contract of `policies-wasm`).

use anyhow::{Context, bail};
use berth_cli::output::Out;
use berth_cli::usage::BadUsage;
use clap::{Args, ValueEnum};
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

/// `berth policy new`.
#[derive(Args, Clone, Debug)]
pub struct NewPolicy {
    /// Its name: a DNS label such as `fill-first`
    pub name: String,
    /// Its programming language
    #[arg(long, value_enum, default_value_t)]
    pub lang: Lang,
    /// The new folder, which must not exist [default: the policy's name]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Languages of `berth policy new`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Lang {
    /// The smallest and fastest, with an SDK and native tests
    #[default]
    Rust,
    /// With wit-bindgen and clang
    C,
    /// With componentize-qjs
    Js,
    /// With componentize-py
    Python,
}

/// Creates the folder.
///
/// # Errors
/// If the name is not one for a policy, or the folder exists or cannot be written.
pub fn run(new: &NewPolicy, out: &mut Out) -> anyhow::Result<()> {
    check_name(&new.name).map_err(BadUsage)?;
    if berth_wasm::is_shipped_name(&new.name) {
        return Err(BadUsage(format!(
            "{0} is the name of a shipped policy, and in a stack the name alone selects that one: choose another name, such \
             as my-{0}",
            new.name
        ))
        .into());
    }
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
        steps: steps(readme),
    };
    out.answer(&created, |created| {
        let CreatedPolicy { folder, files, steps, .. } = created;
        let lines = |step: &NewStep| {
            let commands: String = step.commands.iter().map(|command| format!("  {command}\n")).collect();
            format!("  # {}\n{commands}", step.title)
        };
        let steps: String = steps.iter().map(lines).collect();
        format!(
            "created {folder} with {} files; README.md describes them:\n  cd {folder}\n{steps}",
            files.len()
        )
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
    /// From the tools to the active policy, run in the folder.
    steps: Vec<NewStep>,
}

/// A step of the way from the sources to the active policy.
#[derive(Debug, Serialize)]
struct NewStep {
    title: String,
    commands: Vec<String>,
}

/// The numbered sections of a README with their commands, so that what is printed is what is documented.
fn steps(readme: &str) -> Vec<NewStep> {
    let mut steps: Vec<NewStep> = Vec::new();
    let mut is_step = false;
    for line in readme.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            let numbered = title.split_once(". ").filter(|(number, _)| number.parse::<u8>().is_ok());
            is_step = numbered.is_some();
            steps
                .extend(numbered.map(|(_, title)| NewStep { title: title.to_owned(), commands: Vec::new() }));
        } else if let (true, Some(command), Some(step)) =
            (is_step, line.strip_prefix("    "), steps.last_mut())
        {
            step.commands.push(command.to_owned());
        }
    }
    steps
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
            let steps = steps(readme);
            assert_eq!(steps.len(), 3, "{lang:?}: tools, build and test, upload: {steps:?}");
            let commands: Vec<String> = steps.into_iter().flat_map(|step| step.commands).collect();
            let commands = commands.join("\n");
            for part in ["check ", "test ", "push ", "try fill-first", "activate stack.yaml", "stack"] {
                assert!(commands.contains(&format!("berth policy {part}")), "{lang:?}: {part}: {commands}");
            }
            assert_eq!(commands.contains("cargo build"), lang == Lang::Rust);
            assert_eq!(commands.contains("npm install"), lang == Lang::Js);
        }
        assert!(files(Lang::Rust, "x").iter().any(|(path, _)| path == "sdk/src/lib.rs"));
    }
}
