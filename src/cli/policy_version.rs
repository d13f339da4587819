//! How a version of a policy is named on the command line.

use super::client::{Client, escaped};
use anyhow::bail;
use berth_api::{Policy, PolicyList};

/// The digest of the version that is named by a digest, the beginning of one, `name@` and that, or a name that only one
/// version has.
pub(crate) fn resolve(client: &Client, given: &str) -> anyhow::Result<String> {
    Ok(escaped(&find(client, given)?.digest))
}

/// As [`resolve`], the version itself.
pub(crate) fn find(client: &Client, given: &str) -> anyhow::Result<Policy> {
    let PolicyList { items, .. } = client.get("/policies")?;
    let (name, digest) = match given.split_once('@') {
        Some((name, digest)) => (Some(name), digest),
        None => (None, given),
    };
    let meant =
        |p: &&Policy| name.is_none_or(|n| p.name == n) && !digest.is_empty() && p.digest.starts_with(digest);
    let named = |p: &&Policy| p.name == given;
    let mut found: Vec<_> = items.iter().filter(meant).collect();
    if found.is_empty() {
        found = items.iter().filter(named).collect();
    }
    match found.as_slice() {
        [policy] => Ok((*policy).clone()),
        [] => bail!("this node has no policy {given:?}; `berth policy list` shows its policies"),
        several => {
            bail!("{given:?} matches several versions; give one of: {}", labels_with_marks(several))
        }
    }
}

/// The labels of several versions, newest first, each with what distinguishes it.
fn labels_with_marks(versions: &[&Policy]) -> String {
    let mut versions = versions.to_vec();
    // All times are UTC and of one length, so their texts are in order.
    versions.sort_unstable_by(|a, b| (&b.since, &b.digest).cmp(&(&a.since, &a.digest)));
    let of_one_name = versions.iter().all(|p| p.name == versions[0].name);
    let mark = |(place, policy): (usize, &&Policy)| {
        let marks = [
            (place == 0 && of_one_name).then_some("newest"),
            policy.active.then_some("active"),
            policy.shipped.then_some("shipped"),
        ];
        let marks: Vec<_> = marks.into_iter().flatten().collect();
        let marks = if marks.is_empty() { String::new() } else { format!(" ({})", marks.join(", ")) };
        label(policy) + &marks
    };
    versions.iter().enumerate().map(mark).collect::<Vec<_>>().join(", ")
}

/// The name of a version on the command line and in a stack file.
pub(crate) fn label(policy: &Policy) -> String {
    format!("{}@{}", policy.name, short(&policy.digest))
}

pub(crate) fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}
