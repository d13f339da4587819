//! The stack: the ordered list of active policies with their permissions.

use crate::ids::names::{Digest, RESOURCE_BYTES_MAX, Resource};
use crate::policy::decider::Decider;
use crate::policy::hooks::ENVIRONMENT_KEY_BYTES_MAX;
use crate::policy::reserved_environment::reserved_for;
use crate::sharing::offer::SHARES_PER_PART_MAX;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The effect of a policy's fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFault {
    /// Counts as `pass`.
    #[default]
    Skip,
    /// Denies `admit`. Other hooks are as with `Skip`, since denying them would fail pods or withdraw GPUs
    /// for a policy's bug.
    Deny,
}

/// The permissions of a stack entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// Whether it may deny an Allocate.
    pub deny: bool,
    /// Most devices of one resource that it may offer on one part.
    pub share_max: u32,
    /// Resources that it may offer: exact names, or prefixes ending in `*`.
    pub resources: Vec<String>,
    /// Environment keys that it may set: exact names, or prefixes ending in `*`; never a reserved one
    /// ([`crate::policy::reserved_environment`]).
    pub environment: Vec<String>,
}

impl Default for Permissions {
    fn default() -> Self {
        Self {
            deny: true,
            share_max: SHARES_PER_PART_MAX,
            resources: ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*"]
                .map(String::from)
                .into(),
            environment: Vec::new(),
        }
    }
}

/// Most patterns in one list of permissions: an entry is one record of at most 16 KiB, of which parameters may take 6
/// KiB twice.
const PATTERNS_MAX: usize = 16;
/// Most bytes of all patterns of an entry, for the same reason.
const PATTERNS_BYTES_MAX: usize = 3 * 1024;
/// Most characters of a pattern that an error shows.
const SHOWN_CHARACTERS_MAX: usize = 80;

impl Permissions {
    /// Checks the limits of the permissions.
    ///
    /// # Errors
    /// The field and the rule.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=SHARES_PER_PART_MAX).contains(&self.share_max) {
            return Err(format!("permissions.shareMax: 1 to {SHARES_PER_PART_MAX}, not {}", self.share_max));
        }
        for (list, name, longest) in [
            (&self.resources, "resources", RESOURCE_BYTES_MAX),
            (&self.environment, "environment", ENVIRONMENT_KEY_BYTES_MAX),
        ] {
            if list.len() > PATTERNS_MAX {
                return Err(format!("permissions.{name}: at most {PATTERNS_MAX} patterns"));
            }
            let pattern_fits = |p: &String| {
                let text = p.strip_suffix('*').unwrap_or(p);
                !p.is_empty()
                    && text.len() <= longest
                    && !text.contains('*')
                    && text.bytes().all(|b| b.is_ascii_graphic())
            };
            if let Some(bad) = list.iter().find(|p| !pattern_fits(p)) {
                let shown: String = bad.chars().take(SHOWN_CHARACTERS_MAX).collect();
                return Err(format!(
                    "permissions.{name}: {shown:?} is not a name, exact or ending in `*`, of at most {longest} bytes"
                ));
            }
        }
        let lists = self.resources.iter().chain(&self.environment);
        let bytes: usize = lists.map(String::len).sum();
        if bytes > PATTERNS_BYTES_MAX {
            return Err(format!("permissions: {bytes} bytes of patterns; at most {PATTERNS_BYTES_MAX}"));
        }
        Ok(())
    }

    /// Whether the entry may offer this resource.
    #[must_use]
    pub fn allows_resource(&self, resource: &Resource) -> bool {
        self.resources.iter().any(|pattern| matches(pattern, resource.as_str()))
    }

    /// Whether the entry may set this environment key. Reserved keys are never allowed.
    #[must_use]
    pub fn allows_environment(&self, key: &str) -> bool {
        is_settable_environment_key(key) && self.environment.iter().any(|pattern| matches(pattern, key))
    }
}

fn matches(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => text.starts_with(prefix),
        None => pattern == text,
    }
}

/// Whether a policy may set this key at all: it is well formed, and not reserved.
#[must_use]
pub fn is_settable_environment_key(key: &str) -> bool {
    let first = |b: u8| b.is_ascii_uppercase() || b == b'_';
    let well_formed = key.len() <= ENVIRONMENT_KEY_BYTES_MAX
        && key.bytes().next().is_some_and(first)
        && key.bytes().all(|b| first(b) || b.is_ascii_digit());
    well_formed && reserved_for(key).is_none()
}

/// One policy of the active stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackEntry {
    /// Name of the policy.
    pub name: String,
    /// Its version.
    pub digest: Digest,
    /// Its parameters, JSON.
    pub parameters: String,
    /// Its permissions.
    pub permissions: Permissions,
    /// The effect of a fault.
    pub on_fault: OnFault,
}

impl Stack {
    /// Whether it is the configuration file's.
    #[must_use]
    pub fn is_of_file(&self) -> bool {
        self.origin == StackOrigin::File
    }

    /// Whether it is a stack of the GPUNode that has settled.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        matches!(self.origin, StackOrigin::Fleet { is_settled: true, .. })
    }

    /// Whether a caller has activated it for a while in place of the stack of the GPUNode.
    #[must_use]
    pub fn is_break_glass(&self) -> bool {
        matches!(self.origin, StackOrigin::BreakGlass { .. })
    }

    /// Whether one of its entries has this policy version.
    #[must_use]
    pub fn has(&self, digest: &Digest) -> bool {
        self.entries.iter().any(|entry| entry.digest == *digest)
    }
}

impl StackEntry {
    /// `name@` and the first twelve digits of the digest.
    #[must_use]
    pub fn label(&self) -> String {
        format!("{}@{}", self.name, self.digest.short())
    }

    /// It as the source of a decision.
    #[must_use]
    pub fn decider(&self) -> Decider {
        Decider::Policy(self.label().into())
    }
}

/// Who decides which stack is active. Each takes precedence over those before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StackOrigin {
    /// The configuration file.
    #[default]
    File,
    /// A caller of the admin API.
    Api,
    /// The node's GPUNode.
    Fleet {
        /// The revision of its `spec.stack`.
        revision: FleetRevision,
        /// Whether the soak has ended without a suspended policy.
        is_settled: bool,
    },
    /// A caller, for a limited time, in place of the stack that the node's GPUNode names.
    BreakGlass {
        /// The end, milliseconds since 1970.
        until_wall_ms: u64,
    },
}

/// A revision of `spec.stack` of a GPUNode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetRevision {
    /// The name of the stack, `policy` in the GPUNode.
    pub policy: String,
    /// The revision: a text that differs between stacks.
    pub revision: String,
    /// Raised to try a revision again that has failed.
    pub attempt: u32,
}

/// A revision that failed on this node during its soak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedRevision {
    /// The revision.
    pub revision: FleetRevision,
    /// Why it failed.
    pub reason: String,
}

/// The ordered list of active policies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stack {
    /// Counts activations; the API's ETag.
    pub revision: u64,
    /// Who decided that it is active.
    pub origin: StackOrigin,
    /// The revision of the GPUNode that failed last. Later stacks of the file and of callers keep it.
    pub failed: Option<Box<FailedRevision>>,
    /// The caller who activated it.
    pub by: String,
    /// The caller's reason; may be empty.
    pub why: String,
    /// When it was activated, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// The policies in the order of their calls.
    pub entries: Vec<StackEntry>,
}

/// Number of stored activations, including the active one. Each is at most 17 records of 16 KiB, so that
/// together they stay under 4.5 MiB; usually they take a few KiB.
pub const ACTIVATIONS_MAX: usize = 16;

/// Previously active stacks by revision.
pub type PastStacks = BTreeMap<u64, Arc<Stack>>;

/// Adds a stack that is no longer active, and removes the oldest beyond [`ACTIVATIONS_MAX`], but not [`last_settled`] and
/// [`before_break_glass`].
pub fn keep_past(past: &mut PastStacks, stack: Arc<Stack>) {
    past.insert(stack.revision, stack);
    while past.len() >= ACTIVATIONS_MAX {
        let kept =
            [last_settled(past), before_break_glass(past)].map(|stack| stack.map(|stack| stack.revision));
        let oldest = past.keys().find(|revision| !kept.contains(&Some(**revision))).copied();
        oldest.map(|revision| past.remove(&revision));
    }
}

/// The newest of these stacks that was a GPUNode's and has settled, to which a rollback returns.
#[must_use]
pub fn last_settled(past: &PastStacks) -> Option<&Arc<Stack>> {
    past.values().rev().find(|stack| stack.is_settled())
}

/// The newest of these stacks that is not of a break-glass, to which the end of one returns.
#[must_use]
pub fn before_break_glass(past: &PastStacks) -> Option<&Arc<Stack>> {
    past.values().rev().find(|stack| !stack.is_break_glass())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stack_before_a_break_glass_is_kept_however_often_it_is_renewed() {
        let mut past = PastStacks::new();
        keep_past(&mut past, Arc::new(Stack { revision: 7, ..Stack::default() }));
        for revision in 8..40 {
            let origin = StackOrigin::BreakGlass { until_wall_ms: 1 };
            keep_past(&mut past, Arc::new(Stack { revision, origin, ..Stack::default() }));
        }
        assert_eq!(before_break_glass(&past).unwrap().revision, 7);
    }

    #[test]
    fn the_oldest_activations_are_removed_first() {
        let mut past = PastStacks::new();
        for revision in 0..40 {
            keep_past(&mut past, Arc::new(Stack { revision, ..Stack::default() }));
            assert!(past.len() < ACTIVATIONS_MAX);
        }
        assert_eq!(past.keys().copied().collect::<Vec<_>>(), (25..40).collect::<Vec<_>>());
    }

    #[test]
    fn the_stack_of_a_gpu_node_that_settled_last_is_kept() {
        let mut past = PastStacks::new();
        for revision in 0..40 {
            let (policy, text) = ("team".to_owned(), format!("{revision:012x}"));
            let of_fleet = FleetRevision { policy, revision: text, attempt: 1 };
            let is_settled = [3, 7].contains(&revision);
            let origin = StackOrigin::Fleet { revision: of_fleet, is_settled };
            keep_past(&mut past, Arc::new(Stack { revision, origin, ..Stack::default() }));
        }
        let kept: Vec<u64> = past.keys().copied().collect();
        assert_eq!(kept, std::iter::once(7).chain(26..40).collect::<Vec<_>>());
        assert_eq!(last_settled(&past).map(|stack| stack.revision), Some(7));
    }

    #[test]
    fn reserved_environment_keys_are_denied_whatever_is_permitted() {
        let permissions = Permissions { environment: vec!["*".into()], ..Permissions::default() };
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
            "NODE_OPTIONS",
        ] {
            assert!(!permissions.allows_environment(key), "{key}");
        }
        assert!(permissions.allows_environment("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"));
        assert!(!Permissions::default().allows_environment("MY_KEY"));
    }

    #[test]
    fn patterns_are_exact_or_a_prefix() {
        let permissions = Permissions::default();
        let allows = |name: &str| permissions.allows_resource(&Resource::parse(name).unwrap());
        assert!(allows("nvidia.com/gpu") && allows("nvidia.com/mig-1g.10gb"));
        assert!(!allows("nvidia.com/gpus") && !allows("amd.com/gpu"));
    }
}
