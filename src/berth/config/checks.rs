//! Checks of settings. Errors are collected, so that one run reports all of them.

use berth_files::yaml::{nearest, shown};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting}: {what}")]
pub struct BadSetting {
    /// Its key in the file, such as `admin.tokens[1].name`.
    pub setting: String,
    /// The value and what is wrong with it.
    pub what: String,
    /// The rule for values.
    pub rule: String,
}

impl BadSetting {
    /// An error whose message is the rule, too.
    #[must_use]
    pub fn new(setting: impl Into<String>, what: impl Into<String>) -> Self {
        let what = what.into();
        Self { setting: setting.into(), rule: what.clone(), what }
    }
}

/// Parts of a configuration check that are skipped, since this machine is not the node.
#[derive(Clone, Copy, Debug, Default)]
pub struct SkippedChecks {
    /// Token and TLS files, and uploaded policies.
    pub files: bool,
    /// The GPUs.
    pub gpus: bool,
}

/// The result of a configuration check.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Errors with which the daemon does not start or offers no GPUs.
    pub errors: Vec<BadSetting>,
    /// Facts that only a check on the node can verify, as sentences.
    pub notes: Vec<String>,
}

pub(super) fn bad(setting: impl Into<String>, value: &str, rule: impl Into<String>) -> BadSetting {
    let rule = rule.into();
    BadSetting {
        setting: setting.into(),
        what: format!("{} is not allowed; expected {rule}", shown(value)),
        rule,
    }
}

/// As [`bad`], with the reason instead of the expected value.
pub(super) fn bad_because(setting: impl Into<String>, value: &str, reason: &str) -> BadSetting {
    BadSetting::new(setting, format!("{} is not allowed: {reason}", shown(value)))
}

/// The value of a keyword; the error suggests the nearest known keyword.
pub(super) fn parse_keyword<T: Copy>(
    setting: &str,
    keyword: &str,
    known: &[(&str, T)],
) -> Result<T, BadSetting> {
    if let Some((_, value)) = known.iter().find(|(name, _)| *name == keyword) {
        return Ok(*value);
    }
    let names = || known.iter().map(|(name, _)| *name);
    let mut rule = names().collect::<Vec<_>>().join(", ");
    if let Some(at) = rule.rfind(", ") {
        rule.replace_range(at..at + 2, " or ");
    }
    let mut bad = bad(setting, keyword, rule);
    if let Some(meant) = nearest(keyword, names()) {
        bad.what += &format!("; did you mean `{meant}`?");
    }
    Err(bad)
}

/// All invalid settings.
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
            [bad] => bad.fmt(f),
            list => {
                write!(f, "{} settings cannot be used", list.len())?;
                list.iter().try_for_each(|bad| write!(f, "\n  {bad}"))
            }
        }
    }
}

impl std::error::Error for BadSettings {}

/// Collects errors of settings.
#[derive(Default)]
pub(super) struct Checks(Vec<BadSetting>);

impl Checks {
    pub(super) fn add(&mut self, bad: BadSetting) {
        self.0.push(bad);
    }

    /// The value; an error is collected.
    pub(super) fn ok<T>(&mut self, result: Result<T, BadSetting>) -> Option<T> {
        result.map_err(|bad| self.add(bad)).ok()
    }

    /// Collects an error and returns the result, whose value is needed after [`Self::finish`].
    pub(super) fn record_error<T>(&mut self, result: Result<T, BadSetting>) -> Result<T, BadSetting> {
        result.inspect_err(|bad| self.add(bad.clone()))
    }

    /// Checks that a number is `min` to `max`.
    pub(super) fn in_range(&mut self, setting: &str, number: f64, min: f64, max: f64) {
        if !(min..=max).contains(&number) {
            self.add(bad(setting, &number.to_string(), format!("{min:?} to {max:?}")));
        }
    }

    /// Checks a list's length; `items` names its entries in the error.
    pub(super) fn at_most(&mut self, setting: &str, count: usize, max: usize, items: &str) {
        if count > max {
            self.add(bad(setting, &count.to_string(), format!("at most {max} {items}")));
        }
    }

    /// Checks that a path has no control characters: system calls refuse NUL, and a line end breaks listings.
    pub(super) fn plain_path(&mut self, setting: &str, path: PathBuf) -> PathBuf {
        let bytes = path.as_os_str().as_bytes();
        if bytes.len() > PATH_BYTES_MAX || bytes.iter().any(u8::is_ascii_control) {
            self.add(bad(setting, &path.to_string_lossy(), PLAIN_PATH));
        }
        path
    }

    /// As [`Self::plain_path`], made absolute, so that messages show it in full and its parents can be found.
    pub(super) fn absolute_path(&mut self, setting: &str, path: PathBuf) -> PathBuf {
        let path = self.plain_path(setting, path);
        // Fails only for an empty path or without a current folder; opening the path reports that.
        std::path::absolute(&path).unwrap_or(path)
    }

    /// # Errors
    /// All collected errors.
    pub(super) fn finish(self) -> Result<(), BadSettings> {
        if self.0.is_empty() { Ok(()) } else { Err(BadSettings(self.0)) }
    }
}

/// Longest path, bytes: Linux's `PATH_MAX` without the NUL.
pub(super) const PATH_BYTES_MAX: usize = 4095;
/// The rule for paths.
pub(super) const PLAIN_PATH: &str = "a path of at most 4095 bytes without control characters";
