//! Checks of settings. Errors are collected, so that one run reports all of them.

use berth_files::yaml::{Problems, nearest, shown};
use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Longest path, bytes: Linux's `PATH_MAX` without the NUL.
pub(super) const PATH_BYTES_MAX: usize = 4095;
/// The rule for paths.
pub(super) const PLAIN_PATH: &str = "a path of at most 4095 bytes without control characters";

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

pub(super) fn bad(setting: impl Into<String>, value: &str, rule: impl Into<String>) -> BadSetting {
    let rule = rule.into();
    BadSetting {
        setting: setting.into(),
        what: format!("{} is not allowed; expected {rule}", shown(value)),
        rule,
    }
}

/// As [`bad`], with the reason instead of the expected value.
pub(super) fn invalid_because(setting: impl Into<String>, value: &str, reason: &str) -> BadSetting {
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

pub(super) fn address(setting: &str, text: &str) -> Result<SocketAddr, BadSetting> {
    text.parse().map_err(|_| bad(setting, text, "an IP address and a port, such as 127.0.0.1:9470"))
}

pub(super) fn in_range<T: PartialOrd + fmt::Debug + fmt::Display>(
    setting: impl Into<String>,
    number: T,
    range: RangeInclusive<T>,
) -> Result<T, BadSetting> {
    if range.contains(&number) {
        return Ok(number);
    }
    Err(bad(setting, &number.to_string(), format!("{:?} to {:?}", range.start(), range.end())))
}

/// A clap parser that checks the value of a flag or variable by the rule of the file. The value stays text, as in the
/// file.
pub(super) fn by_rule<T>(
    check: impl Fn(&str) -> Result<T, BadSetting> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<String, String> + Clone + Send + Sync + 'static {
    move |text| match check(text) {
        Ok(_) => Ok(text.to_owned()),
        // clap adds the flag and the value.
        Err(bad) => Err(format!("expected {}", bad.rule)),
    }
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

/// Why the settings cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The file is invalid.
    #[error("the configuration {path} is invalid: {problems}")]
    Wrong {
        /// The file.
        path: PathBuf,
        /// Its errors.
        problems: Problems,
    },
    /// Flags are invalid.
    #[error(transparent)]
    Settings(#[from] BadSettings),
}

impl ConfigError {
    /// The error of this setting, if it is the only error.
    #[must_use]
    pub fn sole_error(&self, setting: &str) -> Option<String> {
        let errors: Vec<(&str, &str)> = match self {
            Self::Settings(BadSettings(bad)) => {
                bad.iter().map(|bad| (bad.setting.as_str(), bad.what.as_str())).collect()
            }
            Self::Wrong { problems, .. } => {
                problems.iter().map(|problem| (problem.key.as_str(), problem.what.as_str())).collect()
            }
            Self::Unreadable { .. } => return None,
        };
        match errors.as_slice() {
            [(key, what)] if *key == setting => Some((*what).to_owned()),
            _ => None,
        }
    }
}

/// Collects errors of settings.
#[derive(Default)]
pub(crate) struct Checks(Vec<BadSetting>);

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
