//! The present token: the content of its file, read again when the file changes, so a rotated token is valid at once
//! and without a restart.

use crate::failure::Failure;
use crate::settings::{AdminError, NamedToken, Right, TokenSource};
use actix_web::http::header::{AUTHORIZATION, HeaderMap};
use berth_api::Kind;
use berth_files::{self, Exposure, Links, USABLE_BY_OTHERS, WRITABLE_BY_OTHERS};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::fs::{DirBuilder, File, OpenOptions, metadata, rename, symlink_metadata};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// Identifies one version of the file: device, inode, size and time of change.
type Stamp = (u64, u64, u64, i64, i64);

/// A token and its file.
struct Token {
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
    reported: Option<String>,
}

impl Token {
    /// Reads the token, or creates one.
    ///
    /// # Errors
    /// As [`read_or_create`].
    fn open(path: &Path) -> Result<Self, AdminError> {
        Ok(Self::of(path, false, read_or_create(path)?))
    }

    /// Reads the token of a file that the daemon does not create.
    ///
    /// # Errors
    /// As [`read`].
    fn open_given(path: &Path) -> Result<Self, AdminError> {
        Ok(Self::of(path, true, read(path)?))
    }

    fn of(path: &Path, given: bool, hash: TokenHash) -> Self {
        // Its stamp is taken after the read, so a change in between would be missed: the first request reads the file
        // once more.
        let known = LoadedTokens { stamp: None, hash: Some(hash), reported: None };
        Self { path: path.into(), given, loaded: Mutex::new(known) }
    }

    /// The valid token, if there is one. One `stat` for each request.
    fn current(&self) -> Option<TokenHash> {
        let stamp = stamp(&self.path);
        let mut known = self.loaded.lock();
        if (stamp.is_some() || self.given) && (known.stamp != stamp || stamp.is_none()) {
            // The stamp is taken before the read, so that a change meanwhile is read next time.
            known.stamp = stamp;
            match read(&self.path) {
                Ok(hash) => {
                    if known.hash.as_ref().is_none_or(|before| !before.is(&hash)) {
                        let file = self.path.display();
                        tracing::info!(%file, "the file has another token, which is valid from now on");
                    }
                    (known.hash, known.reported) = (Some(hash), None);
                }
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
        if known.reported.as_ref() != Some(&words) {
            let becomes = match self.given {
                true => "the token of this file is no longer accepted",
                false => "the changed token file is not used; the previous token stays valid",
            };
            tracing::error!(error = words, "{becomes}");
            known.reported = Some(words);
        }
    }
}

/// The daemon's own tokens, with their names and rights.
pub(crate) struct Tokens {
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
    pub(crate) fn open(path: &Path, named: &[NamedToken]) -> Result<Self, AdminError> {
        let mut all = vec![("admin".into(), Right::Change, Source::File(Token::open(path)?))];
        for NamedToken { name, right, source } in named {
            let source = match source {
                TokenSource::File(path) => Source::File(Token::open_given(path)?),
                TokenSource::Sha256(hash) => Source::Hash(TokenHash(*hash)),
            };
            all.push((name.as_str().into(), *right, source));
        }
        Ok(Self { all })
    }

    /// The name and right of a token. It is compared with all of them, so that the time does not show which one
    /// matched. If two are the same token, the lesser right counts.
    pub(crate) fn find(&self, token: &str) -> Option<(Arc<str>, Right)> {
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
pub(crate) fn check_given(token: &NamedToken) -> Result<(), AdminError> {
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
    read(path)?;
    let about = symlink_metadata(path).map_err(|e| bad("it cannot be inspected", Some(e)))?;
    if about.is_symlink() {
        return Err(bad("it is a link: name the file that it points to", None));
    }
    let replaced = write_draft(path, |draft: &Path, file: &File| {
        fchown(file, Some(about.uid()), Some(about.gid()))?;
        rename(draft, path)
    });
    replaced.map_err(|e| bad("the new one cannot be written; the old token stays valid", Some(e)))
}

/// Random bytes of a token: 256 bits, as many as its hash has.
const TOKEN_BYTES: usize = 32;
/// Shortest token that is accepted from an existing file: 128 bits as hex.
const TOKEN_CHARS_MIN: usize = 32;
/// Longest token, so that a header with one is always read completely.
const TOKEN_CHARS_MAX: usize = 512;

/// The hash of a token. No token is kept in memory.
#[derive(Clone)]
struct TokenHash([u8; 32]);

impl TokenHash {
    fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }

    /// Whether it is the hash of the same token. Hashes have the same length and are compared in constant time, so
    /// the time reveals nothing about the token.
    fn is(&self, other: &Self) -> bool {
        bool::from(self.0.ct_eq(&other.0))
    }
}

/// The bearer token in the headers, if there is one.
///
/// # Errors
/// If an Authorization header has no bearer token, or there are two such headers.
pub(crate) fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Failure> {
    let mut given = headers.get_all(AUTHORIZATION);
    let (first, second) = (given.next(), given.next());
    let token = match (first.map(|v| v.to_str()), second) {
        (None, _) => return Ok(None),
        (Some(Ok(text)), None) => after_scheme(text),
        (Some(_), _) => None,
    };
    token.map(Some).ok_or_else(|| refused("the Authorization header is not `Bearer TOKEN`", "Bearer"))
}

/// The error of a request without a token.
pub(crate) fn no_token() -> Failure {
    refused("the request has no token", "Bearer")
}

/// The error of a request with an unknown token.
pub(crate) fn wrong_token() -> Failure {
    refused("the token is not one that this daemon accepts", "Bearer error=\"invalid_token\"")
}

/// The scheme's name is case-insensitive (RFC 9110, 11.1).
fn after_scheme(header: &str) -> Option<&str> {
    let (scheme, token) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

fn refused(detail: &str, challenge: &'static str) -> Failure {
    Failure::new(Kind::Unauthorized, detail).challenge(challenge).hint(
        "send the content of the daemon's token file as `Authorization: Bearer TOKEN`; by default the file is /var/lib/berth/token",
    )
}

/// Reads the token, or creates one.
///
/// # Errors
/// If the file can be neither read nor created, or contains no token; it is never overwritten.
fn read_or_create(path: &Path) -> Result<TokenHash, AdminError> {
    let bad = |rule, source| AdminError::Token { path: path.into(), rule, source };
    match read(path) {
        Err(AdminError::Token { source: Some(error), .. }) if error.kind() == ErrorKind::NotFound => {
            create(path).map_err(|e| {
                bad("it could not be created; is its folder writable? (--state-dir)", Some(e))
            })?;
            tracing::info!(path = %path.display(), "created the admin API's token");
            read(path)
        }
        other => other,
    }
}

/// Checks whether the daemon would accept the token file, or create it.
///
/// # Errors
/// If it would not, with the reason.
pub fn check_token_file(path: &Path) -> Result<(), AdminError> {
    match read(path) {
        Err(AdminError::Token { source: Some(error), .. }) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other.map(drop),
    }
}

/// Reads the token of an existing file.
///
/// # Errors
/// If the file is missing, is writable for others than its owner, or contains no token.
fn read(path: &Path) -> Result<TokenHash, AdminError> {
    let bad = |rule, source| AdminError::Token { path: path.into(), rule, source };
    let unreadable = |e| bad("it cannot be read", Some(e));
    let file = berth_files::open(path, Links::Follow).map_err(unreadable)?;
    let about = file.metadata().map_err(unreadable)?;
    if about.permissions().mode() & WRITABLE_BY_OTHERS != 0 {
        return Err(bad("others may write to it: chmod 600, and write a new token if in doubt", None));
    }
    for Exposure { what, fix } in berth_files::exposures(path, &about, USABLE_BY_OTHERS) {
        tracing::warn!("{what}; run `{fix}`");
    }
    let mut text = String::new();
    let limit = u64::try_from(TOKEN_CHARS_MAX).unwrap_or(u64::MAX) + 2;
    file.take(limit).read_to_string(&mut text).map_err(unreadable)?;
    let token = text.trim();
    let fits = (TOKEN_CHARS_MIN..=TOKEN_CHARS_MAX).contains(&token.len());
    if !fits || !token.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(bad(
            "it holds no token (one line of 32 to 512 visible characters, as `openssl rand -hex 32` writes it)",
            None,
        ));
    }
    Ok(TokenHash::of(token))
}

/// Creates the file with its content in one step, so that a crash leaves no partial token, and does not replace a
/// file that another process has created meanwhile.
fn create(path: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder(path))?;
    write_draft(path, |draft, _| match std::fs::hard_link(draft, path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    })
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes a new token next to `path`, passes it to `put`, which moves it into place, and makes that durable.
fn write_draft(path: &Path, put: impl FnOnce(&Path, &File) -> std::io::Result<()>) -> std::io::Result<()> {
    let mut bytes = [0; TOKEN_BYTES];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    let token: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    let draft = PathBuf::from(format!("{}.{}", path.display(), std::process::id()));
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
        writeln!(file, "{token}")?;
        file.sync_all()?;
        put(&draft, &file)
    })();
    let _ = std::fs::remove_file(&draft);
    written?;
    File::open(folder(path))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::http::header::HeaderValue;
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
        let check = |path: &Path, named: &[NamedToken]| {
            check_token_file(path)?;
            named.iter().try_for_each(check_given)
        };
        let message = |checked: Result<(), AdminError>| checked.unwrap_err().to_string();
        assert!(message(check(&path, &missing)).contains("gone cannot be used"));
        assert!(check(&path, &all).is_ok());
        let elsewhere = dir.path().join("elsewhere");
        assert!(check(&elsewhere, &all).is_ok() && !elsewhere.exists(), "a start makes it, a check does not");
        let empty = file("empty", "");
        assert!(message(check(&empty, &[])).contains("openssl rand -hex 32"));
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

    fn headers(values: &[&str]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for value in values {
            map.append(AUTHORIZATION, HeaderValue::from_str(value).unwrap());
        }
        map
    }

    #[test]
    fn a_token_is_made_once_and_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/token");
        let first = read_or_create(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.trim().len(), 64);
        assert_eq!(read_or_create(&path).unwrap().0, first.0);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_is_no_token_is_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        for content in ["", "short", &"x".repeat(600), "two words of more than thirty-two bytes"] {
            std::fs::write(&path, content).unwrap();
            let mode = std::fs::Permissions::from_mode(0o600);
            std::fs::set_permissions(&path, mode).unwrap();
            assert!(matches!(read_or_create(&path), Err(AdminError::Token { .. })), "{content}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
        std::fs::write(&path, "x".repeat(64)).unwrap();
        let mode = std::fs::Permissions::from_mode(0o622);
        std::fs::set_permissions(&path, mode).unwrap();
        assert!(matches!(read_or_create(&path), Err(AdminError::Token { .. })));
    }

    #[test]
    fn only_one_bearer_header_with_the_token_opens() {
        let hash = TokenHash::of("secret");
        let opens = |values: &[&str]| match bearer(&headers(values)) {
            Ok(Some(token)) => Ok(hash.is(&TokenHash::of(token))),
            Ok(None) => Ok(false),
            Err(problem) => Err(problem),
        };
        assert!(opens(&["Bearer secret"]).unwrap());
        assert!(opens(&["bearer  secret"]).unwrap());
        for closed in [&[][..], &["Bearer "], &["Bearer secret2"], &["Bearer secre"]] {
            assert!(!opens(closed).unwrap(), "{closed:?}");
        }
        for malformed in
            [&["secret"][..], &["Basic secret"], &["Bearer"], &["Bearer secret", "Bearer secret"]]
        {
            let problem = opens(malformed).unwrap_err();
            assert_eq!(problem.problem.status, 401, "{malformed:?}");
            assert!(!problem.to_string().contains("secret"), "{malformed:?}");
        }
    }
}
