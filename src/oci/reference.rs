//! Names of repositories, as `registry.example/team/policy`.

use berth_kernel::ids::names::Digest;
use std::fmt;
use std::str::FromStr;

/// Longest name, bytes.
const NAME_BYTES_MAX: usize = 255;
/// Longest tag, bytes (OCI distribution specification).
const TAG_BYTES_MAX: usize = 128;

/// A repository of a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repository {
    /// The registry's host, with a port if it is given.
    host: String,
    path: String,
}

impl Repository {
    /// The registry's host, with a port if it is given.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The name of the repository in the registry.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The host that answers the requests. For Docker Hub it differs from the host in references.
    pub(crate) fn api_host(&self) -> &str {
        match self.host.as_str() {
            "docker.io" => "registry-1.docker.io",
            host => host,
        }
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.path)
    }
}

impl FromStr for Repository {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rule = || {
            let shown: String = text.chars().take(80).collect();
            format!(
                "{shown:?} is not a repository: write HOST/PATH, such as registry.example/team/policy, in lower-case letters, \
                 digits, `.`, `-` and `_`, without a tag"
            )
        };
        let (host, path) = text.split_once('/').ok_or_else(rule)?;
        let is_good = text.len() <= NAME_BYTES_MAX && is_host(host) && path.split('/').all(is_component);
        is_good.then(|| Self { host: host.to_owned(), path: path.to_owned() }).ok_or_else(rule)
    }
}

fn is_host(host: &str) -> bool {
    let (name, port) = host.rsplit_once(':').map_or((host, None), |(name, port)| (name, Some(port)));
    let is_name = !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b".-".contains(&b));
    is_name && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
}

/// Whether it is a part of a name as the OCI distribution specification has it.
fn is_component(text: &str) -> bool {
    let is_letter = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let ends = |b: Option<&u8>| b.is_some_and(|b| is_letter(*b));
    let bytes = text.as_bytes();
    ends(bytes.first()) && ends(bytes.last()) && bytes.iter().all(|b| is_letter(*b) || b"._-".contains(b))
}

/// Repositories whose names begin with the same parts: `registry.example/team` includes `registry.example/team/policy`, but not
/// `registry.example/teams`. With `http://` before it, their registry is reached without TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepositoryPrefix {
    is_plain_http: bool,
    /// Without a `/` at the end.
    name: String,
}

impl RepositoryPrefix {
    /// Whether the repository is one of them.
    #[must_use]
    pub fn includes(&self, repository: &Repository) -> bool {
        let name = repository.to_string();
        let rest = name.strip_prefix(&self.name);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether their registry is reached without TLS.
    #[must_use]
    pub fn is_plain_http(&self) -> bool {
        self.is_plain_http
    }
}

impl fmt::Display for RepositoryPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.is_plain_http { "http://" } else { "" }, self.name)
    }
}

impl FromStr for RepositoryPrefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = text.strip_prefix("http://");
        let name = plain.or_else(|| text.strip_prefix("https://")).unwrap_or(text);
        let name = name.strip_suffix('/').unwrap_or(name);
        let is_good = is_host(name) || name.parse::<Repository>().is_ok();
        is_good.then(|| Self { is_plain_http: plain.is_some(), name: name.to_owned() }).ok_or_else(|| {
            "a registry, or the beginning of the names of its repositories, such as registry.example/team; with http:// \
             before it if the registry has no TLS"
                .to_owned()
        })
    }
}

/// Where to push: a repository and a tag, as `oci://registry.example/team/policy:1.2`. With `oci+http://` the registry is reached
/// without TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The repository.
    pub repository: Repository,
    /// The tag.
    pub tag: String,
    /// Whether the registry is reached without TLS.
    pub is_plain_http: bool,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = text.strip_prefix("oci+http://");
        let name = plain.or_else(|| text.strip_prefix("oci://"));
        let rule = "write oci://HOST/PATH:TAG, such as oci://registry.example/team/policy:1.2, or oci+http:// for a registry \
                    without TLS; HOST and PATH have lower-case letters, digits, `.`, `-` and `_`, and TAG at most 128 letters, \
                    digits, `.`, `-` and `_`, the first of them not `.` or `-`";
        let name = name.ok_or_else(|| rule.to_owned())?;
        let (name, tag) = match name.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, tag),
            _ if name.parse::<Repository>().is_ok() => {
                return Err(format!("the destination has no tag; write {text}:TAG, such as {text}:1.0"));
            }
            _ => return Err(rule.to_owned()),
        };
        let repository = name.parse().map_err(|_| rule.to_owned())?;
        if !is_tag(tag) {
            return Err(rule.to_owned());
        }
        Ok(Self { repository, tag: tag.to_owned(), is_plain_http: plain.is_some() })
    }
}

/// An artifact of a repository: `registry.example/team/policy:1.2`, or `registry.example/team/policy@sha256:` and the digest of its
/// manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The repository.
    pub repository: Repository,
    /// Which of its artifacts.
    pub version: Version,
}

/// What selects an artifact of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Version {
    /// A tag, which may be moved to another artifact.
    Tag(String),
    /// The digest of the manifest.
    Digest(Digest),
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => f.write_str(tag),
            Self::Digest(digest) => write!(f, "sha256:{digest}"),
        }
    }
}

impl FromStr for Reference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rule = || {
            let shown: String = text.chars().take(80).collect();
            format!(
                "{shown:?} is not a reference: write HOST/PATH:TAG or HOST/PATH@sha256:DIGEST, such as registry.example/team/policy:1.4"
            )
        };
        let (name, version) = if let Some((name, digest)) = text.split_once("@sha256:") {
            (name, Version::Digest(Digest::parse(digest).map_err(|_| rule())?))
        } else {
            let (name, tag) = text.rsplit_once(':').filter(|(_, tag)| is_tag(tag)).ok_or_else(rule)?;
            (name, Version::Tag(tag.to_owned()))
        };
        Ok(Self { repository: name.parse().map_err(|_| rule())?, version })
    }
}

/// Whether it is a tag as the OCI distribution specification has it.
#[must_use]
pub fn is_tag(text: &str) -> bool {
    let first = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    (1..=TAG_BYTES_MAX).contains(&text.len())
        && text.bytes().next().is_some_and(first)
        && text.bytes().all(|b| first(b) || b".-".contains(&b))
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.repository, self.tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_has_a_host_and_a_path_and_no_tag() {
        let repository: Repository = "reg.example:5000/gpu/mixed".parse().unwrap();
        assert_eq!((repository.host(), repository.path()), ("reg.example:5000", "gpu/mixed"));
        let hub: Repository = "docker.io/team/mixed".parse().unwrap();
        assert_eq!((hub.host(), hub.api_host()), ("docker.io", "registry-1.docker.io"));
        for bad in [
            "",
            "mixed",
            "/mixed",
            "reg.example/",
            "reg.example/mixed:1",
            "reg.example/mixed@sha256:aa",
            "reg.example/Mixed",
            "reg.example/a//b",
            "reg.example/../a",
            "reg.example/a?b",
            "user@reg.example/a",
            "reg.example:99999/a",
            "reg.example:0/a",
        ] {
            assert!(bad.parse::<Repository>().is_err(), "{bad}");
        }
        assert!(format!("reg.example/{}", "a".repeat(250)).parse::<Repository>().is_err());
    }

    #[test]
    fn a_prefix_includes_whole_parts_only() {
        let includes = |prefix: &str, name: &str| {
            prefix.parse::<RepositoryPrefix>().unwrap().includes(&name.parse().unwrap())
        };
        for prefix in ["reg.example", "reg.example/", "https://reg.example/gpu", "reg.example/gpu/mixed"] {
            assert!(includes(prefix, "reg.example/gpu/mixed"), "{prefix}");
        }
        for prefix in ["reg.example:5000", "reg.exampl", "reg.example/gp", "reg.example/gpu/mixed/a"] {
            assert!(!includes(prefix, "reg.example/gpu/mixed"), "{prefix}");
        }
        let plain: RepositoryPrefix = "http://localhost:5000/gpu/".parse().unwrap();
        assert!(plain.is_plain_http());
        assert_eq!(plain.to_string(), "http://localhost:5000/gpu");
        for bad in ["", "http://", "reg.example/A", "*"] {
            assert!(bad.parse::<RepositoryPrefix>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_reference_has_a_tag_or_a_digest() {
        let digest = "ab".repeat(32);
        let read = |text: &str| text.parse::<Reference>().map(|reference| reference.version.to_string());
        assert_eq!(read("reg.example:5000/gpu/mixed:1.4").unwrap(), "1.4");
        let by_digest = format!("sha256:{digest}");
        assert_eq!(read(&format!("reg.example/gpu/mixed@{by_digest}")).unwrap(), by_digest);
        for bad in [
            "reg.example/gpu",
            "reg.example:5000/gpu",
            "reg.example/gpu@sha256:ab",
            "gpu:1",
            "reg.example/gpu:-1",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_target_has_a_tag() {
        let target: Target = "oci://reg.example:5000/gpu/mixed:1.4-rc.1".parse().unwrap();
        assert_eq!((target.repository.path(), target.tag.as_str()), ("gpu/mixed", "1.4-rc.1"));
        assert!("oci+http://localhost/gpu:1".parse::<Target>().unwrap().is_plain_http);
        for bad in
            ["reg.example/gpu:1", "oci://reg.example/gpu", "oci://reg.example:5000/gpu", "oci://a/b:-1"]
        {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
    }
}
