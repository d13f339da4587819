//! The configuration file: read once, kept for the lines of what turns out to be wrong with it.

use super::{BadSetting, BadSettings, Config, ConfigError, FileConfig, ServeArgs, nvidia};
use berth_files::yaml::{Document, LeftOut, Problem, Problems, Reading};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest configuration file, bytes: what a ConfigMap holds at most.
pub const CONFIG_BYTES_MAX: u64 = 1024 * 1024;

/// Most attempts to build the settings, each without the values that were wrong before.
const LEAVING_OUT_MAX: usize = 4;

/// Reads the text of a configuration file.
///
/// # Errors
/// If it cannot be read, or is larger than any ConfigMap.
pub fn read_text(path: &Path) -> Result<String, ConfigError> {
    berth_files::read_text(path, CONFIG_BYTES_MAX)
        .map_err(|source| ConfigError::Unreadable { path: path.into(), source })
}

/// A configuration file.
#[derive(Clone, Debug)]
pub struct Source {
    path: PathBuf,
    document: Document,
    /// Values left out because they were wrong.
    left_out: LeftOut,
    /// Notices on settings of an NVIDIA file that are ignored; `None` for a Berth file. For NVIDIA files the document
    /// is the translation, so its line numbers do not apply.
    nvidia: Option<Vec<String>>,
}

impl Source {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, is too large or is not YAML; or if it is NVIDIA's and Berth cannot do what it asks for.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = read_text(path)?;
        let wrong = |problems| ConfigError::Wrong { path: path.into(), problems };
        let document = Document::parse(&text).map_err(wrong)?;
        if !nvidia::is_nvidia(&document) {
            return Ok(Self { path: path.into(), document, left_out: LeftOut::default(), nvidia: None });
        }
        let translated = nvidia::translate(&document).and_then(nvidia::Translated::usable).map_err(wrong)?;
        let document = Document::parse(&translated.yaml).map_err(wrong)?;
        let notices = translated.findings.iter().map(ToString::to_string).collect();
        Ok(Self { path: path.into(), document, left_out: LeftOut::default(), nvidia: Some(notices) })
    }

    /// The settings, with flags over them, and all that is wrong with the file. Settings that cannot be used are left
    /// out, so that what depends on the others can be checked too; `None` if too little remains.
    #[must_use]
    pub fn settings(&self, args: &ServeArgs) -> (Option<Config>, Problems) {
        self.settings_over(None, args)
    }

    /// The same, with the keys that only the other file has. What is wrong with that one is left out.
    pub(super) fn settings_over(&self, below: Option<&Self>, args: &ServeArgs) -> (Option<Config>, Problems) {
        let notices: Vec<String> = [below, Some(self)]
            .into_iter()
            .flatten()
            .flat_map(|source| source.nvidia.iter().flatten().cloned())
            .collect();
        let below = below.and_then(|below| below.document.read::<FileConfig>(LeftOut::default()).value);
        let below = below.unwrap_or_default();
        let Reading { value, mut problems, mut left_out } =
            self.document.read::<FileConfig>(LeftOut::default());
        // Where the API may listen depends on `admin.tls`, which may be what could not be read.
        let admin_unknown = problems.iter().any(|problem| problem.key.starts_with("admin"));
        let mut file = value;
        // What follows only from what was left out before is no problem of the file.
        for attempt in 0..LEAVING_OUT_MAX {
            let Some(read) = file else { break };
            let below = below.clone();
            let read = if self.nvidia.is_some() { read.translated_over(below) } else { read.over(below) };
            let merged = Config::merge(args, read);
            let source = Self { left_out, ..self.clone() };
            let BadSettings(bad) = match merged {
                Ok(mut config) => {
                    config.notices.extend(notices);
                    return (Some(Config { source: Some(Arc::new(source)), ..config }), problems);
                }
                Err(bad) => bad,
            };
            left_out = source.left_out.clone();
            for bad in bad {
                self.document.leave_out(&bad.setting, &mut left_out);
                if attempt == 0 && !(admin_unknown && bad.setting == "adminListen") {
                    problems.push(source.locate(bad, args));
                }
            }
            Reading { value: file, left_out, .. } = self.document.read(left_out);
        }
        (None, problems)
    }

    /// What is wrong with a setting, with its place in the file unless a flag gave it.
    #[must_use]
    pub fn locate(&self, bad: BadSetting, args: &ServeArgs) -> Problem {
        if args.gives(&bad.setting) || self.nvidia.is_some() {
            return Problem { place: None, key: bad.setting, what: bad.what };
        }
        self.document.locate(bad.setting, bad.what, &self.left_out)
    }

    /// The error that lists what is wrong with this file.
    #[must_use]
    pub fn wrong(&self, problems: Problems) -> ConfigError {
        ConfigError::Wrong { path: self.path.clone(), problems }
    }
}
