//! The version of a policy that a user names.

use crate::client::{Client, escaped};
use crate::names::name_with_digest;
use crate::output::note;
use anyhow::bail;
use berth_api::{Policy, PolicyList};

/// The digest of the version that is named by a digest, the beginning of one, or `name@` and that; by a name alone the
/// newest version, with a note if there are several. For commands that change nothing.
pub(crate) fn resolve_newest(client: &Client, given: &str) -> anyhow::Result<String> {
    let PolicyList { items, .. } = client.get("/policies")?;
    let version = match newest_of_several(&items, given) {
        Some(newest) => newest.clone(),
        None => find_in(&items, given)?,
    };
    Ok(escaped(&version.digest))
}

/// The newest of several versions that have this name, which is noted.
pub(crate) fn newest_of_several<'p>(versions: &'p [Policy], name: &str) -> Option<&'p Policy> {
    let named = || versions.iter().filter(|policy| policy.name == name);
    // All times are UTC and of one length, so their texts are in order.
    let newest = named().max_by(|a, b| (&a.since, &a.digest).cmp(&(&b.since, &b.digest)))?;
    let count = named().count();
    if count > 1 {
        let label = name_with_digest(newest);
        note(&format!("{label} is the newest of {count} versions; `berth policy list` shows the others"));
    }
    (count > 1).then_some(newest)
}

/// The version that is named by a digest, the beginning of one, `name@` and that, or a name that only one version has.
pub(crate) fn find(client: &Client, given: &str) -> anyhow::Result<Policy> {
    let PolicyList { items, .. } = client.get("/policies")?;
    find_in(&items, given)
}

fn find_in(items: &[Policy], given: &str) -> anyhow::Result<Policy> {
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
        name_with_digest(policy) + &marks
    };
    versions.iter().enumerate().map(mark).collect::<Vec<_>>().join(", ")
}
