//! A grant as an annotation of its container, by which it travels with the container: the kubelet copies the annotations
//! of an Allocate response to the container at the container runtime, keeps them in its checkpoint, and repeats them
//! when the container restarts (`pkg/kubelet/kuberuntime/labels.go`, `newContainerAnnotations`). A pod's author cannot
//! set them, unlike environment variables: the author can only set annotations of the pod.
//! The grant of a claim travels as the path of a mounted file instead ([`folders`]).

use crate::evidence::part_use::limits_of;
use crate::grants::allocation::Allocation;
use crate::ids::names::{AllocationId, PartId, Resource};
use crate::node::ledger::Ledger;
use std::fmt;
use std::path::{Path, PathBuf};

/// The beginning of the annotation's key. The resource follows, since the kubelet merges the annotations of a
/// container's resources by key.
const PREFIX: &str = "berth.dev/grant.";

/// The beginning of the variable that has the allocation's id in the container's environment. The kubelet's checkpoint
/// stores it with the pod's UID.
pub const ALLOCATION_VARIABLE: &str = "BERTH_ALLOCATION_ID_";

/// What the annotation says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantAnnotation {
    /// The allocation.
    pub allocation: AllocationId,
    /// The parts of its devices, each with the MiB of memory that the container may use of it; `None`: all of it.
    pub parts: Vec<(PartId, Option<u64>)>,
}

/// Why an annotation with the key of a grant cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadAnnotation {
    /// Its value, cut to 80 characters.
    pub value: String,
}

impl fmt::Display for BadAnnotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a grant: it does not begin with an allocation id, as in `0000002a-7 GPU-1=4096`",
            self.value
        )
    }
}

impl std::error::Error for BadAnnotation {}

/// The annotation's key for a grant of this resource.
#[must_use]
pub fn key(resource: &Resource) -> String {
    format!("{PREFIX}{}", resource.as_str().replace('/', "_"))
}

/// Whether a grant has this key.
#[must_use]
pub fn is_key(key: &str) -> bool {
    key.starts_with(PREFIX)
}

impl GrantAnnotation {
    /// What the annotation of this allocation says, by the ledger in which it is live.
    #[must_use]
    pub fn of(ledger: &Ledger, allocation: &Allocation) -> Self {
        // A limit of the part's whole memory is no limit. A part whose memory is not known has 0.
        let limit = |part: &PartId| {
            let all_mib = ledger.part(part).map_or(u64::MAX, |state| state.part.memory_mib);
            limits_of(ledger, allocation, part).memory_mib.filter(|mib| all_mib == 0 || *mib < all_mib)
        };
        let parts = allocation.parts().into_iter().map(|part| (part.clone(), limit(part))).collect();
        Self { allocation: allocation.id, parts }
    }

    /// Parses the value of an annotation. Words that are no parts are passed over: a later release may add some.
    ///
    /// # Errors
    /// If it does not begin with an allocation id.
    pub fn parse(value: &str) -> Result<Self, BadAnnotation> {
        let parse = || {
            let mut words = value.split(' ');
            let allocation = AllocationId::parse(words.next()?).ok()?;
            let parts = words.filter_map(|word| {
                let (part, limit) = match word.split_once('=') {
                    Some((part, mib)) => (part, Some(mib.parse().ok()?)),
                    None => (word, None),
                };
                Some((PartId::parse(part).ok()?, limit))
            });
            Some(Self { allocation, parts: parts.collect() })
        };
        parse().ok_or_else(|| BadAnnotation { value: value.chars().take(80).collect() })
    }
}

/// The folders that name a grant. The runtime mounts a file below them into the containers of the claim, so the grant
/// travels with these containers: the kubelet gives them no annotations, but CDI gives them mounts, and the runtime shows the
/// source of each mount to its plugins. A pod's author can mount a file of the node only by a volume of the type `hostPath`.
/// The slashes in ids of MIG instances become underscores.
#[must_use]
pub fn folders(grant: &GrantAnnotation) -> PathBuf {
    grant.to_string().split(' ').map(|word| word.replace('/', "_")).collect()
}

/// The grant that such folders name; `None` for others.
#[must_use]
pub fn of_folders(path: &Path) -> Option<GrantAnnotation> {
    let words: Vec<String> = path.iter().map(|name| name.to_string_lossy().replace('_', "/")).collect();
    GrantAnnotation::parse(&words.join(" ")).ok()
}

impl fmt::Display for GrantAnnotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.allocation)?;
        self.parts.iter().try_for_each(|(part, limit)| match limit {
            Some(mib) => write!(f, " {part}={mib}"),
            None => write!(f, " {part}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_parsed_as_it_was_written() {
        for text in ["0000002a-7", "0000002a-7 GPU-1=4096", "0000002a-7 GPU-1=4096 MIG-GPU-9/1/0 GPU-2"] {
            assert_eq!(GrantAnnotation::parse(text).unwrap().to_string(), text);
        }
        let two = GrantAnnotation::parse("0000002a-7 GPU-1=4096 GPU-2").unwrap();
        let part = |name| PartId::parse(name).unwrap();
        assert_eq!(two.allocation, AllocationId { store: 42, number: 7 });
        assert_eq!(two.parts, [(part("GPU-1"), Some(4096)), (part("GPU-2"), None)]);
    }

    #[test]
    fn the_grant_of_folders_is_the_one_that_was_written() {
        for (grant, path) in [
            ("0000002a-7", "0000002a-7"),
            ("0000002a-7 GPU-1=4096 MIG-GPU-9/1/0", "0000002a-7/GPU-1=4096/MIG-GPU-9_1_0"),
        ] {
            let grant = GrantAnnotation::parse(grant).unwrap();
            assert_eq!(folders(&grant), Path::new(path));
            assert_eq!(of_folders(Path::new(path)), Some(grant));
        }
        assert_eq!(of_folders(Path::new("x/../GPU-1=4096")), None);
        assert_eq!(of_folders(Path::new("")), None);
    }

    #[test]
    fn another_value_is_an_error_that_shows_it() {
        for text in ["", "7", "GPU-1=4096", "0000002a", " 0000002a-7"] {
            let error = GrantAnnotation::parse(text).unwrap_err();
            assert_eq!(error.value, text);
        }
        assert_eq!(GrantAnnotation::parse(&"x".repeat(1000)).unwrap_err().value.len(), 80);
    }

    #[test]
    fn what_a_later_release_adds_is_passed_over() {
        let text = "0000002a-7 GPU-1=4096 compute:50 GPU-2=many GPU-3";
        assert_eq!(GrantAnnotation::parse(text).unwrap().to_string(), "0000002a-7 GPU-1=4096 GPU-3");
    }

    #[test]
    fn the_key_has_the_resource_without_its_slash() {
        let key = key(&Resource::parse("nvidia.com/gpu.shared").unwrap());
        assert_eq!(key, "berth.dev/grant.nvidia.com_gpu.shared");
        assert!(is_key(&key) && !is_key("berth.dev/granted"));
    }
}
