//! Settings that cannot be used. All of them are collected, so that one run names them all.

use berth_files::yaml::{nearest, shown};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// A setting that cannot be used: which, why, and what could be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting}: {what}")]
pub struct BadSetting {
    /// By its key in the file, such as `admin.tokens[1].name`.
    pub setting: String,
    /// What was given and what is wrong with it.
    pub what: String,
    /// What it should be.
    pub rule: String,
}

impl BadSetting {
    /// What is wrong with a setting that was given well formed.
    #[must_use]
    pub fn new(setting: impl Into<String>, what: impl Into<String>) -> Self {
        let what = what.into();
        Self { setting: setting.into(), rule: what.clone(), what }
    }
}

/// What a check of a configuration leaves out, since it is on the node and not on this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Without {
    /// The files of tokens and of TLS, and policies that were uploaded.
    pub files: bool,
    /// The GPUs.
    pub gpus: bool,
}

/// What a check of a configuration found.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// What would keep the daemon from starting, or from offering GPUs.
    pub errors: Vec<BadSetting>,
    /// What cannot be known without the node, in sentences.
    pub notes: Vec<String>,
}

pub(super) fn bad(setting: impl Into<String>, given: &str, rule: impl Into<String>) -> BadSetting {
    let rule = rule.into();
    BadSetting {
        setting: setting.into(),
        what: format!("{} is not allowed; expected {rule}", shown(given)),
        rule,
    }
}

/// As [`bad`], where the rule says what is wrong and not what is expected.
pub(super) fn bad_because(setting: impl Into<String>, given: &str, why: &str) -> BadSetting {
    BadSetting::new(setting, format!("{} is not allowed: {why}", shown(given)))
}

/// The value of a keyword; an error names the known one that was probably meant.
pub(super) fn parse_keyword<T: Copy>(
    setting: &str,
    word: &str,
    known: &[(&str, T)],
) -> Result<T, BadSetting> {
    if let Some((_, value)) = known.iter().find(|(name, _)| *name == word) {
        return Ok(*value);
    }
    let words = || known.iter().map(|(name, _)| *name);
    let mut rule = words().collect::<Vec<_>>().join(", ");
    if let Some(at) = rule.rfind(", ") {
        rule.replace_range(at..at + 2, " or ");
    }
    let mut bad = bad(setting, word, rule);
    if let Some(meant) = nearest(word, words()) {
        bad.what += &format!("; did you mean `{meant}`?");
    }
    Err(bad)
}

/// All settings that cannot be used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BadSettings(pub Vec<BadSetting>);

impl From<BadSetting> for BadSettings {
    fn from(bad: BadSetting) -> Self {
        Self(vec![bad])
    }
}

impl fmt::Display for BadSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [one] => one.fmt(f),
            several => {
                write!(f, "{} settings cannot be used", several.len())?;
                several.iter().try_for_each(|bad| write!(f, "\n  {bad}"))
            }
        }
    }
}

impl std::error::Error for BadSettings {}

/// Collects what is wrong.
#[derive(Default)]
pub(super) struct Checks(Vec<BadSetting>);

impl Checks {
    pub(super) fn add(&mut self, bad: BadSetting) {
        self.0.push(bad);
    }

    /// The value, unless it cannot be used.
    pub(super) fn take<T>(&mut self, result: Result<T, BadSetting>) -> Option<T> {
        result.map_err(|bad| self.add(bad)).ok()
    }

    /// As [`Self::take`], for a value that is taken out of the result after [`Self::done`].
    pub(super) fn see<T>(&mut self, result: Result<T, BadSetting>) -> Result<T, BadSetting> {
        result.inspect_err(|bad| self.add(bad.clone()))
    }

    /// A number between two others.
    pub(super) fn within(&mut self, setting: &str, number: f64, least: f64, most: f64) {
        if !(least..=most).contains(&number) {
            self.add(bad(setting, &number.to_string(), format!("{least:?} to {most:?}")));
        }
    }

    /// A list that is not too long. `what` is what is in it.
    pub(super) fn at_most(&mut self, setting: &str, count: usize, most: usize, what: &str) {
        if count > most {
            self.add(bad(setting, &count.to_string(), format!("at most {most} {what}")));
        }
    }

    /// A path without control characters: with a NUL no system call takes it, and a line end breaks what lists it.
    pub(super) fn plain(&mut self, setting: &str, path: PathBuf) -> PathBuf {
        let bytes = path.as_os_str().as_bytes();
        if bytes.len() > PATH_BYTES_MAX || bytes.iter().any(u8::is_ascii_control) {
            self.add(bad(setting, &path.to_string_lossy(), PLAIN_PATH));
        }
        path
    }

    /// As [`Self::plain`], and absolute, so that every user of the setting means the same folder, names it in full,
    /// and finds its parents.
    pub(super) fn path(&mut self, setting: &str, path: PathBuf) -> PathBuf {
        let path = self.plain(setting, path);
        // Fails only for an empty path or without a current folder: whatever opens it reports that.
        std::path::absolute(&path).unwrap_or(path)
    }

    /// # Errors
    /// All that was wrong.
    pub(super) fn done(self) -> Result<(), BadSettings> {
        if self.0.is_empty() { Ok(()) } else { Err(BadSettings(self.0)) }
    }
}

/// Longest path, bytes, as in every system call of Linux (`PATH_MAX`, less its NUL).
pub(super) const PATH_BYTES_MAX: usize = 4095;
/// What a path must be.
pub(super) const PLAIN_PATH: &str = "a path of at most 4095 bytes without control characters";
