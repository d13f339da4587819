//! Why there are no settings.

use super::BadSettings;
use berth_files::yaml::Problems;
use std::path::PathBuf;

/// Why there are no settings: what cannot be used, why, and what could be.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}")]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file holds something that cannot be used.
    #[error("the configuration {path} is wrong: {problems}")]
    Wrong {
        /// Which file.
        path: PathBuf,
        /// All of it.
        problems: Problems,
    },
    /// Flags hold something that cannot be used.
    #[error(transparent)]
    Settings(#[from] BadSettings),
}

impl ConfigError {
    /// What is wrong with this setting, if it is the only one that is wrong.
    #[must_use]
    pub fn only(&self, setting: &str) -> Option<String> {
        match self {
            Self::Settings(BadSettings(bad)) => match bad.as_slice() {
                [one] if one.setting == setting => Some(one.what.clone()),
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
