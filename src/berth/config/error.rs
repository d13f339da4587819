use super::BadSettings;
use berth_files::yaml::Problems;
use std::path::PathBuf;

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
    #[error("the configuration {path} is wrong: {problems}")]
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
        match self {
            Self::Settings(BadSettings(bad)) => match bad.as_slice() {
                [bad] if bad.setting == setting => Some(bad.what.clone()),
                _ => None,
            },
            Self::Wrong { problems, .. } => {
                let mut problems = problems.iter();
                let first = problems.next().filter(|problem| problem.key == setting)?;
                problems.next().is_none().then(|| first.what.clone())
            }
            Self::Unreadable { .. } => None,
        }
    }
}
