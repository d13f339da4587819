//! The stack: the ordered list of active policies, and what each of them may do.

use super::names::{Digest, Resource};
use super::policy::ENVIRONMENT_KEY_BYTES_MAX;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What happens when a policy of the stack fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFault {
    /// As if it had answered `pass`.
    #[default]
    Skip,
    /// `admit` is denied; the other hooks as `Skip`, since denying them would fail pods or
    /// withdraw GPUs for a policy's bug.
    Deny,
}

/// What a stack entry may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// May it deny an Allocate?
    pub deny: bool,
    /// Into how many devices of one resource it may cut a part.
    pub share_max: u32,
    /// Resources that it may name: exact, or ending in `*`.
    pub resources: Vec<String>,
    /// Environment keys that it may set: exact, or ending in `*`.
    pub environment: Vec<String>,
}

impl Default for Permissions {
    fn default() -> Self {
        Self {
            deny: true,
            share_max: super::offer::SHARES_PER_PART_MAX,
            resources: ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*"]
                .map(String::from)
                .into(),
            environment: Vec::new(),
        }
    }
}

impl Permissions {
    /// Whether the entry may offer this resource.
    #[must_use]
    pub fn allows_resource(&self, resource: &Resource) -> bool {
        self.resources.iter().any(|pattern| matches(pattern, resource.as_str()))
    }

    /// Whether the entry may set this environment key; some keys nobody may.
    #[must_use]
    pub fn allows_environment(&self, key: &str) -> bool {
        environment_key_is_open(key) && self.environment.iter().any(|pattern| matches(pattern, key))
    }
}

fn matches(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => text.starts_with(prefix),
        None => pattern == text,
    }
}

/// Whether any policy may ever set this key. The closed ones choose what a process loads, which
/// GPUs it sees, or who it says it is.
#[must_use]
pub fn environment_key_is_open(key: &str) -> bool {
    const CLOSED: [&str; 10] = [
        "LD_*",
        "PATH",
        "NVIDIA_*",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "BERTH_*",
        "PYTHON*",
        "GLIBC_*",
        "BASH_ENV",
        "ENV",
    ];
    let first = |b: u8| b.is_ascii_uppercase() || b == b'_';
    let well_formed = key.len() <= ENVIRONMENT_KEY_BYTES_MAX
        && key.bytes().next().is_some_and(first)
        && key.bytes().all(|b| first(b) || b.is_ascii_digit());
    well_formed && !CLOSED.iter().any(|pattern| matches(pattern, key))
}

/// One policy of the active stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackEntry {
    /// Name of the policy.
    pub name: String,
    /// Which version of it.
    pub digest: Digest,
    /// Its parameters, JSON.
    pub parameters: String,
    /// What it may do.
    pub permissions: Permissions,
    /// What happens when it fails.
    pub on_fault: OnFault,
}

impl StackEntry {
    /// `name@` and the first twelve digits of the digest.
    #[must_use]
    pub fn label(&self) -> String {
        format!("{}@{}", self.name, self.digest.short())
    }
}

/// The ordered list of active policies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stack {
    /// Counts activations; the API's ETag.
    pub revision: u64,
    /// Whether it was activated through the API and so wins over the file's.
    pub from_api: bool,
    /// Who activated it.
    pub by: String,
    /// Why, in their words; may be empty.
    pub why: String,
    /// When, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// The policies, first asked first.
    pub entries: Vec<StackEntry>,
}

/// How many activations are kept, the active one among them. Each is at most 17 records of 16 KiB, so
/// all of them together stay under 4.5 MiB; as a rule they are a few KiB.
pub const ACTIVATIONS_MAX: usize = 16;

/// Stacks that were active once, by revision.
pub type PastStacks = BTreeMap<u64, Arc<Stack>>;

/// Keeps a stack that is no longer active, and lets the oldest go.
pub fn keep_past(past: &mut PastStacks, stack: Arc<Stack>) {
    past.insert(stack.revision, stack);
    while past.len() >= ACTIVATIONS_MAX {
        past.pop_first();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_activations_leave_first() {
        let mut past = PastStacks::new();
        for revision in 0..40 {
            keep_past(&mut past, Arc::new(Stack { revision, ..Stack::default() }));
            assert!(past.len() < ACTIVATIONS_MAX);
        }
        assert_eq!(past.keys().copied().collect::<Vec<_>>(), (25..40).collect::<Vec<_>>());
    }

    #[test]
    fn keys_that_choose_code_or_gpus_are_closed_whatever_is_permitted() {
        let all = Permissions { environment: vec!["*".into()], ..Permissions::default() };
        for key in [
            "LD_PRELOAD",
            "PATH",
            "NVIDIA_VISIBLE_DEVICES",
            "BERTH_X",
            "CUDA_VISIBLE_DEVICES",
            "a",
            "",
            "A-B",
            "1A",
            "PYTHONPATH",
        ] {
            assert!(!all.allows_environment(key), "{key}");
        }
        assert!(all.allows_environment("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"));
        assert!(!Permissions::default().allows_environment("MY_KEY"));
    }

    #[test]
    fn patterns_are_exact_or_a_prefix() {
        let p = Permissions::default();
        let may = |name: &str| p.allows_resource(&Resource::parse(name).unwrap());
        assert!(may("nvidia.com/gpu") && may("nvidia.com/mig-1g.10gb"));
        assert!(!may("nvidia.com/gpus") && !may("amd.com/gpu"));
    }
}
