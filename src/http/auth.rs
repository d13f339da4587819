//! Bearer tokens: one is created at the first start, others are configured. No log or URL contains a token.

use super::error::AdminError;
use super::failure::Failure;
use actix_web::http::header::{AUTHORIZATION, HeaderMap};
use berth_api::Kind;
use berth_files::{self, Links};
use sha2::{Digest, Sha256};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use subtle::ConstantTimeEq;

/// Random bytes of a token: 256 bits, as many as its hash has.
const TOKEN_BYTES: usize = 32;
/// Shortest token that is accepted from an existing file: 128 bits as hex.
const TOKEN_CHARS_MIN: usize = 32;
/// Longest token, so that a header with one is always read completely.
const TOKEN_CHARS_MAX: usize = 512;
/// The author of changes made with the token.
pub(super) const OPERATOR: &str = "admin";

/// The hash of a token. No token is kept in memory.
#[derive(Clone)]
pub(super) struct TokenHash([u8; 32]);

impl TokenHash {
    pub(super) fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }

    /// A hash from the configuration.
    pub(super) const fn given(hash: [u8; 32]) -> Self {
        Self(hash)
    }

    /// Whether it is the hash of the same token. Hashes have the same length and are compared in constant time, so
    /// the time reveals nothing about the token.
    pub(super) fn is(&self, other: &Self) -> bool {
        bool::from(self.0.ct_eq(&other.0))
    }
}

/// The bearer token in the headers, if there is one.
///
/// # Errors
/// If an Authorization header has no bearer token, or there are two such headers.
pub(super) fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Failure> {
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
pub(super) fn no_token() -> Failure {
    refused("the request has no token", "Bearer")
}

/// The error of a request with an unknown token.
pub(super) fn wrong_token() -> Failure {
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
pub(super) fn token(path: &Path) -> Result<TokenHash, AdminError> {
    let bad = |rule, source| AdminError::Token { path: path.into(), rule, source };
    match read(path) {
        Err(AdminError::Token { source: Some(error), .. }) if error.kind() == ErrorKind::NotFound => {
            make(path).map_err(|e| {
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
pub(super) fn read(path: &Path) -> Result<TokenHash, AdminError> {
    let bad = |rule, source| AdminError::Token { path: path.into(), rule, source };
    let unreadable = |e| bad("it cannot be read", Some(e));
    let file = berth_files::open(path, Links::Follow).map_err(unreadable)?;
    let about = file.metadata().map_err(unreadable)?;
    match about.permissions().mode() {
        mode if mode & 0o022 != 0 => {
            return Err(bad("others may write to it: chmod 600, and write a new token if in doubt", None));
        }
        mode if mode & 0o044 != 0 => {
            tracing::warn!(path = %path.display(), "others may read the token file: chmod 600");
        }
        _ => {}
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
fn make(path: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder(path))?;
    draft(path, |draft, _| match std::fs::hard_link(draft, path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    })
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes a new token next to `path`, passes it to `put`, which moves it into place, and makes that durable.
pub(super) fn draft(
    path: &Path,
    put: impl FnOnce(&Path, &File) -> std::io::Result<()>,
) -> std::io::Result<()> {
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
        let first = token(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.trim().len(), 64);
        assert_eq!(token(&path).unwrap().0, first.0);
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
            assert!(matches!(token(&path), Err(AdminError::Token { .. })), "{content}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
        std::fs::write(&path, "x".repeat(64)).unwrap();
        let mode = std::fs::Permissions::from_mode(0o622);
        std::fs::set_permissions(&path, mode).unwrap();
        assert!(matches!(token(&path), Err(AdminError::Token { .. })));
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
