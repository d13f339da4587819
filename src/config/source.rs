//! The configuration file: read once, and kept for the line numbers of later errors.

use super::args::ServeArgs;
use super::checks::{BadSetting, BadSettings, ConfigError};
use super::file::FileConfig;
use super::{Config, nvidia};
use berth_files::yaml::{Document, LeftOut, Problem, Problems, ReadResult, RootType};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest configuration file, bytes: the limit of a ConfigMap.
const CONFIG_BYTES_MAX: u64 = 1024 * 1024;

/// Most attempts to build the settings, each without the values that were invalid before.
const ATTEMPTS_MAX: usize = 4;

/// Reads the text of a configuration file.
///
/// # Errors
/// If it cannot be read, or is larger than any ConfigMap.
fn read_text(path: &Path) -> Result<String, ConfigError> {
    berth_files::read_text(path, CONFIG_BYTES_MAX)
        .map_err(|source| ConfigError::Unreadable { path: path.into(), source })
}

/// As `read_text`; `-` is standard input.
///
/// # Errors
/// As for `read_text`.
pub fn read_text_or_input(path: &Path) -> Result<String, ConfigError> {
    if path != Path::new("-") {
        return read_text(path);
    }
    let mut text = String::new();
    let read = std::io::stdin().take(CONFIG_BYTES_MAX + 1).read_to_string(&mut text);
    let is_too_large = text.len() as u64 > CONFIG_BYTES_MAX;
    let too_large =
        || std::io::Error::other(format!("it is larger than the limit of {CONFIG_BYTES_MAX} bytes"));
    match read.and_then(|_| if is_too_large { Err(too_large()) } else { Ok(()) }) {
        Ok(()) => Ok(text),
        Err(source) => Err(ConfigError::Unreadable { path: "standard input".into(), source }),
    }
}

/// The key of the file's first level in a path such as `stack[0].policy`.
fn top_level_key(path: &str) -> &str {
    path.split(['.', '[']).next().unwrap_or(path)
}

/// A configuration file.
#[derive(Clone, Debug)]
pub struct Source {
    path: PathBuf,
    document: Document,
    /// Invalid values, which are left out.
    left_out: LeftOut,
    /// Notices on settings of an NVIDIA file that are ignored; `None` for a Berth file. For NVIDIA files the document
    /// is the translation, so its line numbers do not apply.
    nvidia: Option<Vec<String>>,
}

impl Source {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, is too large or is not YAML, or is NVIDIA's with settings that Berth does not support.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(path, &read_text(path)?)
    }

    /// As [`Self::read`], of a text; `path` is for errors.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let error = |problems| ConfigError::Wrong { path: path.into(), problems };
        let mut document = Document::parse(text).map_err(error)?;
        let mut notices = None;
        if nvidia::is_nvidia(&document) {
            let translated = nvidia::translate(&document).map_err(error)?;
            if !translated.refusal.is_empty() {
                return Err(error(translated.refusal));
            }
            document = Document::parse(&translated.yaml).map_err(error)?;
            notices = Some(translated.findings.iter().map(ToString::to_string).collect());
        }
        Ok(Self { path: path.into(), document, left_out: LeftOut::default(), nvidia: notices })
    }

    /// The settings, with the flags' precedence, and all errors of the file. Invalid settings are left out, so that
    /// checks that need the others can run; `None` if too little remains.
    #[must_use]
    pub fn settings(&self, args: &ServeArgs) -> (Option<Config>, Problems) {
        self.settings_with_base(None, args)
    }

    /// As [`Self::settings`], with the keys of `base` that this file lacks, without the invalid ones.
    pub(super) fn settings_with_base(
        &self,
        base: Option<&Self>,
        args: &ServeArgs,
    ) -> (Option<Config>, Problems) {
        let sources = base.into_iter().chain([self]);
        let notices: Vec<String> =
            sources.flat_map(|source| source.nvidia.iter().flatten().cloned()).collect();
        let base = base.and_then(|base| base.document.read::<FileConfig>(LeftOut::default()).value);
        let base = base.unwrap_or_default();
        let ReadResult { value: mut file, mut problems, mut left_out } =
            self.document.read::<FileConfig>(LeftOut::default());
        // The rule for `adminListen` depends on `admin.tls`, which may be unreadable.
        let is_admin_unreadable = problems.iter().any(|problem| problem.key.starts_with("admin"));
        // Errors of later attempts may only result from left out values, so they are not reported.
        for attempt in 0..ATTEMPTS_MAX {
            let Some(read) = file else { break };
            let base = base.clone();
            let read = if self.nvidia.is_some() { read.overlay_translated(base) } else { read.overlay(base) };
            let source = Self { left_out: left_out.clone(), ..self.clone() };
            let BadSettings(bad) = match Config::merge(args, read) {
                Ok(mut config) => {
                    config.loaded.notices.extend(notices);
                    config.loaded.source = Some(Arc::new(source));
                    return (Some(config), problems);
                }
                Err(bad) => bad,
            };
            for bad in bad {
                self.document.leave_out(&bad.setting, &mut left_out);
                if attempt == 0 && !(is_admin_unreadable && bad.setting == "adminListen") {
                    problems.push(source.locate(bad, args));
                }
            }
            ReadResult { value: file, left_out, .. } = self.document.read(left_out);
        }
        (None, problems)
    }

    /// The values of the file with the keys of `base` that it lacks, by their paths.
    pub(super) fn values(&self, base: Option<&Self>) -> BTreeMap<String, String> {
        let own = self.document.scalars();
        let keys = match self.document.root_type() {
            RootType::Map(keys) => keys,
            _ => Vec::new(),
        };
        // As `overlay` and `overlay_translated`.
        let is_translated_edit =
            |path: &str| self.nvidia.is_some() && top_level_key(path) == "containerEdits";
        let is_replaced = |path: &String| keys.contains(&top_level_key(path)) && !is_translated_edit(path);
        let base = base.map(|base| base.document.scalars()).unwrap_or_default();
        let mut values: BTreeMap<_, _> = base.into_iter().filter(|(path, _)| !is_replaced(path)).collect();
        values.extend(own);
        values
    }

    /// The error of a setting, with its line in the file unless a flag sets it.
    #[must_use]
    pub fn locate(&self, bad: BadSetting, args: &ServeArgs) -> Problem {
        if args.overrides(&bad.setting) || self.nvidia.is_some() {
            return Problem { place: None, key: bad.setting, what: bad.what };
        }
        self.document.locate(bad.setting, bad.what, &self.left_out)
    }

    /// The error that lists this file's problems.
    #[must_use]
    pub fn error(&self, problems: Problems) -> ConfigError {
        ConfigError::Wrong { path: self.path.clone(), problems }
    }
}
