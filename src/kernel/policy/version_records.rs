//! Decides what becomes of a policy version's record when it is uploaded, loaded, shipped with another release, or
//! deleted, and whether it may be activated.

use crate::ids::names::Digest;
use crate::node::change::Change;
use crate::node::ledger::Ledger;
use crate::node::refusal::Refusal;
use crate::policy::hooks::VERSIONS_MAX;
use crate::policy::stack::{StackEntry, StackOrigin, before_break_glass, last_settled};
use crate::policy::version::{Origin, PolicyVersion, TrustedKey};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The changes of an upload. A version that is known keeps its first record, with the new artifact, and with the new
/// signature unless only the old one is verified.
pub(crate) fn record_upload(ledger: &Ledger, uploaded: &PolicyVersion) -> Result<Vec<Change>, Refusal> {
    let Some(known) = ledger.policies.get(&uploaded.digest) else {
        if ledger.policies.len() >= VERSIONS_MAX {
            return Err(Refusal::TooManyVersions { limit: VERSIONS_MAX });
        }
        return Ok(vec![Change::PolicyAdded(PolicyVersion { shipped: false, ..uploaded.clone() })]);
    };
    let mut merged = PolicyVersion { artifact: uploaded.artifact.clone(), ..PolicyVersion::clone(known) };
    // Of two unverified signatures the newer one is kept.
    let replaces = uploaded.origin.signed_by.is_some() || merged.origin.signed_by.is_none();
    if replaces && uploaded.origin.signature.is_some() {
        merged.origin.signature = uploaded.origin.signature;
        merged.origin.signed_by.clone_from(&uploaded.origin.signed_by);
    }
    Ok(update(known, merged))
}

/// Changes only the artifact: the version's signature may have changed meanwhile, or the version may be gone.
pub(crate) fn record_artifact(
    ledger: &Ledger,
    digest: &Digest,
    artifact: &Digest,
) -> Result<Vec<Change>, Refusal> {
    let known = find(ledger, digest)?;
    Ok(update(known, PolicyVersion { artifact: artifact.clone(), ..PolicyVersion::clone(known) }))
}

/// The changes after a version was made callable at a start: the digest of its artifact, and the key that made its
/// signature. An upload may have replaced the signature meanwhile; the key is then that of another signature. A version
/// that was deleted meanwhile stays deleted.
pub(crate) fn record_loaded(ledger: &Ledger, loaded: &PolicyVersion) -> Vec<Change> {
    let Some(known) = ledger.policies.get(&loaded.digest) else { return Vec::new() };
    let mut recorded = PolicyVersion { artifact: loaded.artifact.clone(), ..PolicyVersion::clone(known) };
    if recorded.origin.signature == loaded.origin.signature {
        recorded.origin.signed_by.clone_from(&loaded.origin.signed_by);
    }
    update(known, recorded)
}

/// The changes of a start: the versions that are built into the daemon, which are few and are always recorded. Those of
/// another release become like uploaded ones, so that a name selects the version of this release.
pub(crate) fn record_shipped(ledger: &Ledger, shipped: &[PolicyVersion]) -> Vec<Change> {
    let mut changes = Vec::new();
    for version in shipped {
        match ledger.policies.get(&version.digest) {
            None => changes.push(Change::PolicyAdded(PolicyVersion { shipped: true, ..version.clone() })),
            // It was uploaded, or an earlier release recorded it.
            Some(known) => {
                changes.extend(update(known, PolicyVersion { shipped: true, ..PolicyVersion::clone(known) }));
            }
        }
    }
    let present: BTreeSet<&Digest> = shipped.iter().map(|version| &version.digest).collect();
    for old in ledger.policies.values().filter(|old| old.shipped && !present.contains(&old.digest)) {
        let origin = Origin { once_shipped: true, ..old.origin.clone() };
        changes.extend(update(old, PolicyVersion { shipped: false, origin, ..PolicyVersion::clone(old) }));
    }
    changes
}

pub(crate) fn delete(ledger: &Ledger, digest: &Digest) -> Result<Vec<Change>, Refusal> {
    let version = find(ledger, digest)?;
    // A rollback needs the versions of the stack that has settled, and the end of a break-glass those of the stack before it, too.
    let is_unsettled = matches!(ledger.stack.origin, StackOrigin::Fleet { is_settled: false, .. });
    let is_break_glass = ledger.stack.is_break_glass();
    let settled = last_settled(&ledger.past_stacks).filter(|_| is_unsettled || is_break_glass);
    let before = before_break_glass(&ledger.past_stacks).filter(|_| is_break_glass);
    let is_needed = settled.into_iter().chain(before).any(|stack| stack.has(digest));
    if ledger.stack.has(digest) || is_needed {
        return Err(Refusal::PolicyInUse { digest: digest.clone() });
    }
    if version.shipped {
        return Err(Refusal::PolicyShipped { digest: digest.clone() });
    }
    Ok(vec![Change::PolicyDeleted(digest.clone())])
}

/// The version with this digest.
pub(crate) fn find<'l>(ledger: &'l Ledger, digest: &Digest) -> Result<&'l Arc<PolicyVersion>, Refusal> {
    ledger.policies.get(digest).ok_or_else(|| Refusal::UnknownPolicy { digest: digest.clone() })
}

fn update(known: &PolicyVersion, version: PolicyVersion) -> Vec<Change> {
    if *known == version { Vec::new() } else { vec![Change::PolicyUpdated(version)] }
}

/// Whether this version may be activated with these keys. Without keys any may; versions that are or were
/// built into the daemon need no signature.
#[must_use]
pub fn may_activate(version: &PolicyVersion, keys: &[TrustedKey]) -> bool {
    let signed = || version.origin.signed_by.as_ref().is_some_and(|by| keys.iter().any(|k| k.name == *by));
    keys.is_empty() || version.shipped || version.origin.once_shipped || signed()
}

/// Checks that all entries of a stack may be activated with these keys. Unknown versions are not checked
/// here.
///
/// # Errors
/// [`Refusal::Untrusted`] with the labels of those that may not.
pub fn check_trust(ledger: &Ledger, entries: &[StackEntry], keys: &[TrustedKey]) -> Result<(), Refusal> {
    let untrusted = |e: &&StackEntry| ledger.policies.get(&e.digest).is_some_and(|v| !may_activate(v, keys));
    let policies: Vec<String> = entries.iter().filter(untrusted).map(StackEntry::label).collect();
    if policies.is_empty() { Ok(()) } else { Err(Refusal::Untrusted { policies }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::command::Command;
    use crate::node::test_node::Node;
    use crate::policy::version::{Signature, test_version};

    fn version(letter: char) -> PolicyVersion {
        let origin = Origin { by: "ann".into(), ..Origin::default() };
        PolicyVersion { since_wall_ms: 1, origin, ..test_version(letter) }
    }

    /// A version with a signature of this content, which this key made.
    fn signed(content: u8, by: Option<&str>) -> PolicyVersion {
        let signature = Some(Signature([content; 64]));
        let origin = Origin { signature, signed_by: by.map(Into::into), ..version('a').origin };
        PolicyVersion { origin, ..version('a') }
    }

    fn turn(node: &mut Node, command: &Command) -> Result<Vec<Change>, Refusal> {
        node.decide(command).map(|entry| entry.changes)
    }

    fn upload(node: &mut Node, version: PolicyVersion) -> Result<Vec<Change>, Refusal> {
        turn(node, &Command::RecordUpload(version))
    }

    fn signature(node: &Node) -> (Option<Signature>, Option<String>) {
        let origin = node.ledger.policies[&version('a').digest].origin.clone();
        (origin.signature, origin.signed_by)
    }

    #[test]
    fn of_two_uploads_of_one_module_only_the_first_adds_it() {
        let mut node = Node::new();
        assert_eq!(upload(&mut node, version('a')), Ok(vec![Change::PolicyAdded(version('a'))]));
        let second = PolicyVersion {
            since_wall_ms: 9,
            origin: Origin { by: "bob".into(), ..Origin::default() },
            ..version('a')
        };
        assert_eq!(upload(&mut node, second), Ok(Vec::new()), "the first record stays");
        let artifact = version('b').artifact;
        let recompiled = PolicyVersion { artifact: artifact.clone(), since_wall_ms: 9, ..version('a') };
        let expected = PolicyVersion { artifact, ..version('a') };
        assert_eq!(upload(&mut node, recompiled), Ok(vec![Change::PolicyUpdated(expected)]));
    }

    #[test]
    fn an_upload_replaces_a_signature_unless_only_the_old_one_is_verified() {
        let mut node = Node::new();
        for (uploaded, expected) in [
            (signed(1, None), (Some(Signature([1; 64])), None)),
            (signed(2, None), (Some(Signature([2; 64])), None)),
            (version('a'), (Some(Signature([2; 64])), None)),
            (signed(3, Some("ops")), (Some(Signature([3; 64])), Some("ops".to_owned()))),
            (signed(4, None), (Some(Signature([3; 64])), Some("ops".to_owned()))),
            (signed(5, Some("dev")), (Some(Signature([5; 64])), Some("dev".to_owned()))),
        ] {
            upload(&mut node, uploaded).unwrap();
            assert_eq!(signature(&node), expected);
        }
    }

    #[test]
    fn the_key_of_a_signature_that_was_replaced_meanwhile_is_not_recorded() {
        let mut node = Node::new();
        upload(&mut node, signed(1, None)).unwrap();
        let loaded = signed(1, Some("ops"));
        upload(&mut node, signed(2, None)).unwrap();
        assert_eq!(turn(&mut node, &Command::RecordLoaded(loaded.clone())), Ok(Vec::new()));
        upload(&mut node, signed(1, None)).unwrap();
        let artifact = version('c').artifact;
        turn(&mut node, &Command::RecordLoaded(PolicyVersion { artifact: artifact.clone(), ..loaded }))
            .unwrap();
        assert_eq!(signature(&node), (Some(Signature([1; 64])), Some("ops".to_owned())));
        assert_eq!(node.ledger.policies[&version('a').digest].artifact, artifact);
        assert_eq!(turn(&mut node, &Command::RecordLoaded(version('f'))), Ok(Vec::new()), "it was deleted");
    }

    #[test]
    fn a_start_records_the_versions_of_its_release_and_keeps_those_of_others_as_uploaded_ones() {
        let mut node = Node::new();
        let shipped = |letter| PolicyVersion { shipped: true, origin: Origin::default(), ..version(letter) };
        upload(&mut node, version('b')).unwrap();
        let command = Command::RecordShipped(vec![shipped('a'), shipped('b')]);
        let of_b = PolicyVersion { shipped: true, ..version('b') };
        let expected = vec![Change::PolicyAdded(shipped('a')), Change::PolicyUpdated(of_b)];
        assert_eq!(turn(&mut node, &command), Ok(expected));
        assert_eq!(turn(&mut node, &command), Ok(Vec::new()), "the next start of this release");
        let digest = version('a').digest;
        let delete = Command::DeletePolicy { digest: digest.clone() };
        assert_eq!(turn(&mut node, &delete), Err(Refusal::PolicyShipped { digest: digest.clone() }));
        turn(&mut node, &Command::RecordShipped(vec![shipped('b'), shipped('c')])).unwrap();
        let old = &node.ledger.policies[&digest];
        assert!(!old.shipped && old.origin.once_shipped, "{old:?}");
        assert!(node.ledger.policies[&version('c').digest].shipped);
        turn(&mut node, &delete).unwrap();
    }

    #[test]
    fn a_full_list_refuses_an_upload_but_not_what_ships_with_the_daemon() {
        let mut node = Node::new();
        let numbered =
            |n: usize| PolicyVersion { digest: Digest::parse(&format!("{n:064x}")).unwrap(), ..version('a') };
        for n in 0..VERSIONS_MAX {
            upload(&mut node, numbered(n)).unwrap();
        }
        let full = Err(Refusal::TooManyVersions { limit: VERSIONS_MAX });
        assert_eq!(upload(&mut node, version('e')), full);
        assert_eq!(upload(&mut node, numbered(0)), Ok(Vec::new()), "one that is known");
        let shipped = PolicyVersion { shipped: true, ..version('e') };
        let recorded = turn(&mut node, &Command::RecordShipped(vec![shipped.clone()]));
        assert_eq!(recorded, Ok(vec![Change::PolicyAdded(shipped)]));
    }

    fn of_origin(shipped: bool, origin: Origin) -> PolicyVersion {
        PolicyVersion { shipped, origin, ..test_version('a') }
    }

    #[test]
    fn with_keys_only_signed_or_built_in_versions_may_be_activated() {
        let keys = [TrustedKey { name: "release".into(), key: [1; 32] }];
        let signed = |by: &str| Origin { signed_by: Some(by.into()), ..Origin::default() };
        let unsigned = of_origin(false, Origin::default());
        assert!(may_activate(&unsigned, &[]) && !may_activate(&unsigned, &keys));
        assert!(may_activate(&of_origin(false, signed("release")), &keys));
        assert!(!may_activate(&of_origin(false, signed("gone")), &keys), "the key is no longer configured");
        assert!(may_activate(&of_origin(true, Origin::default()), &keys));
        let older = Origin { once_shipped: true, ..Origin::default() };
        assert!(may_activate(&of_origin(false, older), &keys));
        // A signature that is not verified does not count.
        let unchecked = Origin { signature: Some(Signature([0; 64])), ..Origin::default() };
        assert!(!may_activate(&of_origin(false, unchecked), &keys));
    }
}
