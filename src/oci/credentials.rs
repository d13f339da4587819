//! Credentials of registries, as Docker's `config.json` and a Secret of the type `kubernetes.io/dockerconfigjson` have them.

use crate::reference::Repository;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// Largest file, bytes: that of a Secret.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Credentials by registry.
#[derive(Clone, Default)]
pub struct Credentials(BTreeMap<String, Login>);

/// A user's name and password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    auths: BTreeMap<String, Auth>,
}

#[derive(Deserialize)]
struct Auth {
    username: Option<String>,
    password: Option<String>,
    /// `username:password` in base64.
    auth: Option<String>,
}

impl Credentials {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, or is not of that form. Credentials are never shown.
    pub fn read(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let bytes = berth_files::read(path, FILE_BYTES_MAX)
            .map_err(|error| format!("the credentials of registries cannot be read: {shown}: {error}"))?;
        Self::parse(&bytes).map_err(|why| format!("{shown}: {why}"))
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        // Without the error's text, which may quote a password.
        let file: File = serde_json::from_slice(bytes).map_err(|error| {
            format!(
                "not a config.json of Docker, such as `docker login` or `kubectl create secret docker-registry` writes: line {}, \
                 column {}",
                error.line(),
                error.column()
            )
        })?;
        let mut logins = BTreeMap::new();
        for (key, Auth { username, password, auth }) in file.auths {
            let login = match (username, password, auth) {
                (Some(user), Some(password), _) => Login { user, password },
                (_, _, Some(auth)) if !auth.is_empty() => {
                    let text =
                        BASE64.decode(auth.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
                    let pair = text.as_deref().and_then(|text| text.split_once(':'));
                    let (user, password) =
                        pair.ok_or_else(|| format!("auths.{key}.auth is not USER:PASSWORD in base64"))?;
                    Login { user: user.to_owned(), password: password.trim_end_matches('\0').to_owned() }
                }
                // The password is in a credential helper, which Berth does not run.
                _ => continue,
            };
            logins.insert(registry_of(&key), login);
        }
        Ok(Self(logins))
    }

    /// The credentials for a repository: those with the longest key that is a beginning of its name, as the kubelet chooses them.
    pub(crate) fn of(&self, repository: &Repository) -> Option<&Login> {
        let name = repository.to_string();
        let applies = |key: &&String| {
            name.strip_prefix(key.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.0.keys().filter(applies).max_by_key(|key| key.len()).and_then(|key| self.0.get(key))
    }
}

/// The registry, or the beginning of a repository's name, that a key names; older tools write a URL.
fn registry_of(key: &str) -> String {
    let name = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let name = name.trim_end_matches('/');
    let name = name.strip_suffix("/v1").or_else(|| name.strip_suffix("/v2")).unwrap_or(name);
    match name {
        "index.docker.io" | "registry-1.docker.io" => "docker.io".to_owned(),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    fn user_of(credentials: &str, repository: &str) -> Option<String> {
        let credentials = Credentials::parse(credentials.as_bytes()).unwrap();
        credentials.of(&repository.parse().unwrap()).map(|login| format!("{}/{}", login.user, login.password))
    }

    #[test]
    fn the_longest_name_of_a_repository_decides() {
        let file = r#"{"auths": {
            "reg.example": {"username": "all", "password": "p:w"},
            "https://reg.example/team/": {"auth": "dGVhbTpwOnc="},
            "https://index.docker.io/v1/": {"auth": "aHViOnB3"},
            "helper.example": {}
        }, "credsStore": "secretservice"}"#;
        assert_eq!(user_of(file, "reg.example/other/a").as_deref(), Some("all/p:w"));
        assert_eq!(user_of(file, "reg.example/team/a").as_deref(), Some("team/p:w"));
        assert_eq!(user_of(file, "reg.example/teams/a").as_deref(), Some("all/p:w"));
        assert_eq!(user_of(file, "docker.io/library/a").as_deref(), Some("hub/pw"));
        assert_eq!(user_of(file, "reg.example:5000/a"), None);
        assert_eq!(user_of(file, "helper.example/a"), None);
        assert_eq!(user_of("{}", "reg.example/a"), None);
    }

    #[test]
    fn an_error_shows_no_password() {
        for bad in
            [r#"{"auths": {"a": {"auth": "c2VjcmV0"}}}"#, r#"{"auths": {"a": {"password": ["secret"]}}}"#]
        {
            let error = Credentials::parse(bad.as_bytes()).unwrap_err();
            assert!(!error.contains("c2VjcmV0") && !error.contains("secret\""), "{error}");
        }
        let file = r#"{"auths": {"a": {"username": "u", "password": "secret"}}}"#;
        assert!(!format!("{:?}", Credentials::parse(file.as_bytes()).unwrap()).contains("secret"));
    }

    /// A pull would wait for its writer, and the next pulls for that one.
    #[test]
    fn a_fifo_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let error = Credentials::read(&path).unwrap_err();
        assert!(error.contains("a FIFO"), "{error}");
        let error = crate::registry::Registry::new(false, Credentials::default(), Some(&path)).err().unwrap();
        assert!(error.contains("a FIFO"), "{error}");
    }
}
