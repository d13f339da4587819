//! The configuration file: read once, kept for the lines of what turns out to be wrong with it.

use super::{BadSetting, BadSettings, Config, ConfigError, FileConfig, ServeArgs};
use crate::yaml::{Document, Problem, Problems};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest configuration file, bytes: what a ConfigMap holds at most.
pub const CONFIG_BYTES_MAX: u64 = 1024 * 1024;

/// A configuration file.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    document: Document,
}

impl Source {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, is too large or is not YAML.
    pub fn read(path: &Path) -> Result<Arc<Self>, ConfigError> {
        let unreadable = |source| ConfigError::Unreadable { path: path.into(), source };
        let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
        if bytes > CONFIG_BYTES_MAX {
            return Err(ConfigError::TooLarge { path: path.into(), bytes });
        }
        let text = std::fs::read_to_string(path).map_err(unreadable)?;
        let document = Document::parse(&text)
            .map_err(|problems| ConfigError::Wrong { path: path.into(), problems })?;
        Ok(Arc::new(Self { path: path.into(), document }))
    }

    /// The settings, with flags over them, and all that is wrong with the file. Settings that cannot be used are left
    /// out, so that what depends on the others can be checked too; `None` if too little remains.
    #[must_use]
    pub fn settings(self: &Arc<Self>, args: &ServeArgs) -> (Option<Config>, Problems) {
        let of_this = |config: Config| Config { source: Some(Arc::clone(self)), ..config };
        let (file, mut problems) = self.document.read::<FileConfig>(&[]);
        let Some(file) = file else { return (None, problems) };
        // Where the API may listen depends on `admin.tls`, which may be what could not be read.
        let admin_unknown = problems.iter().any(|problem| problem.key.starts_with("admin"));
        let BadSettings(bad) = match Config::merge(args, file) {
            Ok(config) => return (Some(of_this(config)), problems),
            Err(bad) => bad,
        };
        let keys: Vec<String> = bad.iter().map(|bad| bad.setting.clone()).collect();
        for bad in bad.into_iter().filter(|bad| !(admin_unknown && bad.setting == "adminListen")) {
            problems.push(self.locate(bad, args));
        }
        let (rest, _) = self.document.read::<FileConfig>(&keys);
        let config = rest.and_then(|rest| Config::merge(args, rest).ok());
        (config.map(of_this), problems)
    }

    /// What is wrong with a setting, with its place in the file unless a flag gave it.
    #[must_use]
    pub fn locate(&self, bad: BadSetting, args: &ServeArgs) -> Problem {
        let place = if args.gives(&bad.setting) { None } else { self.document.place(&bad.setting) };
        Problem { place, key: bad.setting, what: bad.what }
    }

    /// The error that lists what is wrong with this file.
    #[must_use]
    pub fn wrong(&self, problems: Problems) -> ConfigError {
        ConfigError::Wrong { path: self.path.clone(), problems }
    }
}
