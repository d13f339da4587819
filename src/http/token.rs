//! The present token: the content of its file, read again when the file changes, so a rotated token is valid at once
//! and without a restart.

use super::auth::{self, OPERATOR, TokenHash};
use super::error::AdminError;
use crate::settings::{NamedToken, Right, TokenSource};
use parking_lot::Mutex;
use std::fs::{File, metadata, rename, symlink_metadata};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Identifies one version of the file: device, inode, size and time of change.
type Stamp = (u64, u64, u64, i64, i64);

/// A token and its file.
pub(super) struct Token {
    path: PathBuf,
    /// Whether the configuration names the file. Then the token is invalid once the file is removed. The token of the
    /// first start stays valid: otherwise no one could authenticate, and the daemon creates it only at a start.
    given: bool,
    loaded: Mutex<LoadedTokens>,
}

/// The state of a token's file.
struct LoadedTokens {
    stamp: Option<Stamp>,
    /// `None`: no token is valid.
    hash: Option<TokenHash>,
    /// The last logged error of the file, while there is one.
    said: Option<String>,
}

impl Token {
    /// Reads the token, or creates one.
    ///
    /// # Errors
    /// As [`auth::token`].
    pub(super) fn open(path: &Path) -> Result<Self, AdminError> {
        Ok(Self::of(path, false, auth::token(path)?))
    }

    /// Reads the token of a file that the daemon does not create.
    ///
    /// # Errors
    /// As [`auth::read`].
    fn open_given(path: &Path) -> Result<Self, AdminError> {
        Ok(Self::of(path, true, auth::read(path)?))
    }

    fn of(path: &Path, given: bool, hash: TokenHash) -> Self {
        // Its stamp is taken after the read, so a change in between would be missed: the first request reads the file
        // once more.
        let known = LoadedTokens { stamp: None, hash: Some(hash), said: None };
        Self { path: path.into(), given, loaded: Mutex::new(known) }
    }

    /// The valid token, if there is one. One `stat` for each request.
    fn current(&self) -> Option<TokenHash> {
        let stamp = stamp(&self.path);
        let mut known = self.loaded.lock();
        if (stamp.is_some() || self.given) && (known.stamp != stamp || stamp.is_none()) {
            // The stamp is taken before the read, so that a change meanwhile is read next time.
            known.stamp = stamp;
            match auth::read(&self.path) {
                Ok(hash) => (known.hash, known.said) = (Some(hash), None),
                Err(error) => self.wrong(&mut known, error),
            }
        }
        known.hash.clone()
    }

    /// Logs each error once.
    fn wrong(&self, known: &mut LoadedTokens, error: AdminError) {
        // The cause of a failed read may end without a change of the file.
        if std::error::Error::source(&error).is_some() {
            known.stamp = None;
        }
        if self.given {
            known.hash = None;
        }
        let words = format!("{:#}", anyhow::Error::new(error));
        if known.said.as_ref() != Some(&words) {
            let becomes = match self.given {
                true => "the token of this file is no longer accepted",
                false => "the changed token file is not used; the previous token stays valid",
            };
            tracing::error!(error = words, "{becomes}");
            known.said = Some(words);
        }
    }
}

/// The daemon's own tokens, with their names and rights.
pub(super) struct Tokens {
    all: Vec<(Arc<str>, Right, Source)>,
}

enum Source {
    File(Token),
    Hash(TokenHash),
}

impl Tokens {
    /// The token of the first start, created if it is missing, and those of the configuration.
    ///
    /// # Errors
    /// If one of their files cannot be used.
    pub(super) fn open(path: &Path, named: &[NamedToken]) -> Result<Self, AdminError> {
        let mut all = vec![(OPERATOR.into(), Right::Change, Source::File(Token::open(path)?))];
        for NamedToken { name, right, source } in named {
            let source = match source {
                TokenSource::File(path) => Source::File(Token::open_given(path)?),
                TokenSource::Sha256(hash) => Source::Hash(TokenHash::given(*hash)),
            };
            all.push((name.as_str().into(), *right, source));
        }
        Ok(Self { all })
    }

    /// Reads the token files as a start does, and creates none.
    ///
    /// # Errors
    /// If one of them cannot be used.
    pub(super) fn check(path: &Path, named: &[NamedToken]) -> Result<(), AdminError> {
        auth::check_token_file(path)?;
        named.iter().try_for_each(check_given)
    }

    /// The name and right of a token. It is compared with all of them, so that the time does not show which one
    /// matched. If two are the same token, the lesser right counts.
    pub(super) fn find(&self, token: &str) -> Option<(Arc<str>, Right)> {
        let given = TokenHash::of(token);
        let mut found: Option<&(Arc<str>, Right, Source)> = None;
        for one in &self.all {
            let same = match &one.2 {
                Source::File(token) => token.current().is_some_and(|hash| hash.is(&given)),
                Source::Hash(hash) => hash.is(&given),
            };
            if same && found.is_none_or(|before| one.1 < before.1) {
                found = Some(one);
            }
        }
        found.map(|(name, right, _)| (Arc::clone(name), *right))
    }
}

/// Reads the file of a configured token as a start does.
///
/// # Errors
/// If it cannot be used.
pub(super) fn check_given(token: &NamedToken) -> Result<(), AdminError> {
    match &token.source {
        TokenSource::File(path) => Token::open_given(path).map(drop),
        TokenSource::Sha256(_) => Ok(()),
    }
}

/// `None` without a file.
fn stamp(path: &Path) -> Option<Stamp> {
    let about = metadata(path).ok()?;
    Some((about.dev(), about.ino(), about.size(), about.ctime(), about.ctime_nsec()))
}

/// Writes a new token to the file, in one step, with the same owner. A running daemon accepts it with its next
/// request, and the old one no longer.
///
/// # Errors
/// If there is no token file, or the new one cannot be written; the old token stays valid then.
pub fn rotate_token(path: &Path) -> Result<(), AdminError> {
    let bad = |rule, source| AdminError::Token { path: path.into(), rule, source };
    auth::read(path)?;
    let about = symlink_metadata(path).map_err(|e| bad("it cannot be inspected", Some(e)))?;
    if about.is_symlink() {
        return Err(bad("it is a link: name the file that it points to", None));
    }
    let replaced = auth::draft(path, |draft: &Path, file: &File| {
        fchown(file, Some(about.uid()), Some(about.gid()))?;
        rename(draft, path)
    });
    replaced.map_err(|e| bad("the new one cannot be written; the old token stays valid", Some(e)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::Digest;
    use std::fs::{read_dir, read_to_string, write};
    use std::os::unix::fs::PermissionsExt;

    fn opens(token: &Token, text: &str) -> bool {
        token.current().is_some_and(|hash| hash.is(&TokenHash::of(text.trim())))
    }

    #[test]
    fn each_token_has_its_name_and_right_and_the_lesser_right_counts() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            path
        };
        let (reads, both) = ("r".repeat(40), "b".repeat(40));
        let named = |name: &str, right, source| NamedToken { name: name.into(), right, source };
        let all = [
            named("grafana", Right::Read, TokenSource::File(file("grafana", &reads))),
            named("ci", Right::Change, TokenSource::Sha256(sha2::Sha256::digest(&both).into())),
            named("also", Right::Read, TokenSource::Sha256(sha2::Sha256::digest(&both).into())),
        ];
        let path = dir.path().join("token");
        let tokens = Tokens::open(&path, &all).unwrap();
        let found = |text: &str| tokens.find(text.trim()).map(|(name, right)| (name.to_string(), right));
        assert_eq!(found(&read_to_string(&path).unwrap()), Some(("admin".into(), Right::Change)));
        assert_eq!(found(&reads), Some(("grafana".into(), Right::Read)));
        assert_eq!(found(&both), Some(("also".into(), Right::Read)));
        assert_eq!((found(""), found("x"), found("grafana")), (None, None, None));
        // The daemon does not create a token that the configuration names.
        let missing = [named("gone", Right::Read, TokenSource::File(dir.path().join("gone")))];
        assert!(Tokens::open(&path, &missing).is_err());
        let said = |checked: Result<(), AdminError>| checked.unwrap_err().to_string();
        assert!(said(Tokens::check(&path, &missing)).contains("gone cannot be used"));
        assert!(Tokens::check(&path, &all).is_ok());
        let elsewhere = dir.path().join("elsewhere");
        assert!(
            Tokens::check(&elsewhere, &all).is_ok() && !elsewhere.exists(),
            "a start makes it, a check does not"
        );
        let empty = file("empty", "");
        assert!(said(Tokens::check(&empty, &[])).contains("openssl rand -hex 32"));
        assert!(!dir.path().join("gone").exists());
    }

    #[test]
    fn a_configured_token_is_valid_while_its_file_exists() {
        let dir = tempfile::tempdir().unwrap();
        let (path, text) = (dir.path().join("grafana"), "g".repeat(40));
        let put = |text: &str| {
            write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        };
        put(&text);
        let token = Token::open_given(&path).unwrap();
        assert!(opens(&token, &text));
        for gone in [None, Some(""), Some("short"), Some("\n")] {
            match gone {
                None => std::fs::remove_file(&path).unwrap(),
                Some(wrong) => put(wrong),
            }
            assert!(!opens(&token, &text) && !opens(&token, ""), "{gone:?}");
            assert!(!opens(&token, &text), "and it stays so: {gone:?}");
            put(&text);
            assert!(opens(&token, &text), "{gone:?}");
        }
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o622)).unwrap();
        assert!(!opens(&token, &text), "anybody may have written it");
    }

    #[test]
    fn a_rotated_token_is_valid_at_once_and_the_old_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        assert!(rotate_token(&path).is_err(), "there is none yet");
        let token = Token::open(&path).unwrap();
        let old = read_to_string(&path).unwrap();
        assert!(opens(&token, &old));
        rotate_token(&path).unwrap();
        let new = read_to_string(&path).unwrap();
        assert!(new != old && opens(&token, &new) && !opens(&token, &old));
        assert_eq!(metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(read_dir(dir.path()).unwrap().count(), 1, "no draft is left");
    }

    #[test]
    fn a_malformed_or_missing_file_leaves_the_token_valid() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let token = Token::open(&path).unwrap();
        let text = read_to_string(&path).unwrap();
        write(&path, "short").unwrap();
        assert!(opens(&token, &text) && !opens(&token, "short"));
        assert!(rotate_token(&path).is_err(), "whatever this is, it is no token");
        std::fs::remove_file(&path).unwrap();
        assert!(opens(&token, &text));
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
        write(dir.path().join("elsewhere"), &text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert!(rotate_token(&path).is_err(), "a link would be replaced");
    }
}
