//! The version of a policy that a name in a stack stands for.

use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::version::PolicyVersion;
use std::sync::Arc;

/// Error of [`resolve_version`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// This node has no such version; an upload may add it.
    #[error("{0}")]
    Missing(String),
    /// The digest is invalid or belongs to another policy, or several versions match.
    #[error("{0}")]
    Invalid(String),
}

/// Most characters of a name or digest that an error shows: a request's may be long.
const SHOWN_CHARACTERS_MAX: usize = 80;
/// Shortest prefix of a digest that names a version: the length that tables show.
const DIGEST_PREFIX_MIN: usize = 12;

/// The version that a name stands for: the one whose digest is, or begins with, the given one; without a digest the
/// newest that came with the daemon, else the only one. `name` may be `name@digest` instead.
///
/// # Errors
/// If there is no such version, it has another name, the digest is given twice, or several versions match.
pub fn resolve_version(
    ledger: &Ledger,
    name: &str,
    digest: Option<&str>,
) -> Result<Arc<PolicyVersion>, ResolveError> {
    let (name, digest) = match (name.split_once('@'), digest) {
        (None, digest) => (name, digest),
        (Some((name, inside)), None) => (name, Some(inside)),
        (Some((name, _)), Some(_)) => {
            let name = beginning(name);
            let rule = format!("policy {name} has a digest after `@` and in `digest`: give it only once");
            return Err(ResolveError::Invalid(rule));
        }
    };
    if let Some(text) = digest {
        let hex = text.strip_prefix("sha256:").unwrap_or(text);
        let well_formed =
            (DIGEST_PREFIX_MIN..=64).contains(&hex.len()) && hex.bytes().all(|b| b.is_ascii_hexdigit());
        if !well_formed {
            let given = beginning(text);
            let rule = format!("{given:?} is not a digest: {DIGEST_PREFIX_MIN} to 64 lower-case hex digits");
            return Err(ResolveError::Invalid(rule));
        }
        let mut hits = ledger.policies.values().filter(|v| v.digest.as_str().starts_with(hex));
        return match (hits.next(), hits.next()) {
            (None, _) => Err(ResolveError::Missing(format!(
                "this node has no policy with digest {hex}: upload it first"
            ))),
            (Some(_), Some(_)) => {
                Err(ResolveError::Invalid(format!("several policies have a digest that begins with {hex}")))
            }
            (Some(version), None) if version.name != name => Err(ResolveError::Invalid(format!(
                "digest {} is of policy {}, not {name}",
                version.digest.short(),
                version.name
            ))),
            (Some(version), None) => Ok(Arc::clone(version)),
        };
    }
    let named = || ledger.policies.values().filter(|v| v.name == name);
    // Versions of the same moment are in the order of their digests, so that the result is always the same.
    let age = |v: &&Arc<PolicyVersion>| (v.since_wall_ms, v.digest.clone());
    if let Some(version) = named().filter(|v| v.shipped).max_by_key(age) {
        return Ok(Arc::clone(version));
    }
    let mut uploaded = named();
    match (uploaded.next(), uploaded.next()) {
        (None, _) => {
            let mut known: Vec<&str> = ledger.policies.values().map(|v| v.name.as_str()).collect();
            known.sort_unstable();
            known.dedup();
            let meant = berth_files::yaml::nearest(name, known.iter().copied());
            let meant = meant.map_or_else(String::new, |meant| format!("; did you mean `{meant}`?"));
            let (name, known) = (beginning(name), known.join(", "));
            Err(ResolveError::Missing(format!(
                "this node has no policy {name:?}: upload it first; it has {known}{meant}"
            )))
        }
        (Some(only), None) => Ok(Arc::clone(only)),
        (Some(_), Some(_)) => {
            let mut all: Vec<_> = named().collect();
            all.sort_unstable_by_key(|v| std::cmp::Reverse(age(v)));
            let marked = |(place, version): (usize, &&Arc<PolicyVersion>)| {
                let active = ledger.stack.has(&version.digest);
                let marks = [(place == 0).then_some("newest"), active.then_some("active")];
                let marks: Vec<_> = marks.into_iter().flatten().collect();
                let marks = if marks.is_empty() { String::new() } else { format!(" ({})", marks.join(", ")) };
                format!("{}{marks}", version.digest.short())
            };
            let digests: Vec<_> = all.iter().enumerate().map(marked).collect();
            Err(ResolveError::Invalid(format!(
                "policy {name} has several versions: {}; write {name}@DIGEST, or `digest:` in a stack file",
                digests.join(", ")
            )))
        }
    }
}

/// The beginning of a text of a request or file, for an error.
fn beginning(text: &str) -> &str {
    text.char_indices().nth(SHOWN_CHARACTERS_MAX).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::ids::names::Digest;
    use berth_kernel::policy::stack::{OnFault, Permissions, Stack, StackEntry};
    use berth_kernel::policy::version::Origin;

    /// Versions as (name, first digit of the digest, shipped, since).
    fn node(versions: &[(&str, char, bool, u64)]) -> Ledger {
        let version = |(name, digit, shipped, since): &(&str, char, bool, u64)| {
            let digest = Digest::parse(&digit.to_string().repeat(64)).unwrap();
            let version = PolicyVersion {
                name: (*name).into(),
                version: "1.0.0".into(),
                summary: String::new(),
                hooks: Vec::new(),
                parameters_schema: "{}".into(),
                artifact: digest.clone(),
                digest: digest.clone(),
                bytes: 1,
                shipped: *shipped,
                since_wall_ms: *since,
                origin: Origin::default(),
            };
            (digest, Arc::new(version))
        };
        Ledger { policies: Arc::new(versions.iter().map(version).collect()), ..Ledger::default() }
    }

    #[test]
    fn a_name_selects_the_shipped_version_and_a_digest_any() {
        // After an upgrade: the last release shipped `a`, this one ships `b`, and `c` was uploaded later.
        let node = node(&[("mixed", 'a', false, 1), ("mixed", 'b', true, 2), ("mixed", 'c', false, 3)]);
        let named = |digest: Option<&str>| {
            resolve_version(&node, "mixed", digest).map(|v| v.digest.as_str()[..1].to_owned())
        };
        assert_eq!(named(None).unwrap(), "b");
        assert_eq!(named(Some(&"a".repeat(64))).unwrap(), "a");
        assert_eq!(named(Some(&format!("sha256:{}", "c".repeat(12)))).unwrap(), "c");
        assert!(named(Some(&"d".repeat(64))).unwrap_err().to_string().contains("upload it first"));
    }

    #[test]
    fn a_name_with_several_uploaded_versions_is_ambiguous() {
        let node = node(&[("own", 'a', false, 1), ("own", 'b', false, 2), ("other", 'c', false, 3)]);
        let several = resolve_version(&node, "own", None).unwrap_err().to_string();
        assert!(several.contains("bbbbbbbbbbbb (newest), aaaaaaaaaaaa; write own@DIGEST"), "{several}");
        let active = StackEntry {
            name: "own".into(),
            digest: Digest::parse(&"a".repeat(64)).unwrap(),
            parameters: "{}".into(),
            permissions: Permissions::default(),
            on_fault: OnFault::default(),
        };
        let stack = Arc::new(Stack { entries: vec![active], ..Stack::clone(&node.stack) });
        let node = Ledger { stack, ..node };
        let several = resolve_version(&node, "own", None).unwrap_err().to_string();
        assert!(several.contains("bbbbbbbbbbbb (newest), aaaaaaaaaaaa (active);"), "{several}");
        assert!(resolve_version(&node, "other", None).is_ok());
        let at = resolve_version(&node, "own@aaaaaaaaaaaa", None).unwrap();
        assert_eq!((at.name.as_str(), at.digest.short()), ("own", "aaaaaaaaaaaa"));
        for (name, digest, says) in [
            ("own@aaaaaaaaaaaa", Some("bbbbbbbbbbbb"), "only once"),
            ("own@a", None, "is not a digest"),
            ("other@aaaaaaaaaaaa", None, "is of policy own, not other"),
        ] {
            let text = resolve_version(&node, name, digest).unwrap_err().to_string();
            assert!(text.contains(says), "{name}: {text}");
        }
        let none = resolve_version(&node, "mixed", None).unwrap_err().to_string();
        assert!(none.contains("it has other, own"), "{none}");
    }
}
