//! The policies that are shipped with the daemon. The outputs of `policies-wasm/build.sh` are embedded, so that
//! building the daemon requires no WebAssembly toolchain.
//!
//! Their descriptions are embedded as well, so that a node lists the policies without compiling them. A policy is
//! compiled when a stack, a replay or a shadow first uses it.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;

use berth_kernel::ids::names::Digest;
use berth_kernel::ids::time::Now;
use berth_kernel::policy::hooks::Hook;
use berth_kernel::policy::version::PolicyVersion;

/// Names and components. A test compares them with their sources by the manifest in the same folder.
const SHIPPED: &[(&str, &[u8])] = &[
    ("exclusive", include_bytes!("../../policies-wasm/prebuilt/exclusive.wasm")),
    ("timeslice", include_bytes!("../../policies-wasm/prebuilt/timeslice.wasm")),
    ("mixed", include_bytes!("../../policies-wasm/prebuilt/mixed.wasm")),
    ("binpack", include_bytes!("../../policies-wasm/prebuilt/binpack.wasm")),
    ("spread", include_bytes!("../../policies-wasm/prebuilt/spread.wasm")),
    ("topology", include_bytes!("../../policies-wasm/prebuilt/topology.wasm")),
    ("memory", include_bytes!("../../policies-wasm/prebuilt/memory.wasm")),
    ("quota", include_bytes!("../../policies-wasm/prebuilt/quota.wasm")),
    ("triage-xid", include_bytes!("../../policies-wasm/prebuilt/triage-xid.wasm")),
];

/// The answers to `describe`, by name. A test compares them with the policies' answers.
const DESCRIPTIONS: &str = include_str!("../../policies-wasm/prebuilt/described.json");

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Description {
    /// sha256 of the component. Computing it at every start would read all components into memory.
    digest: String,
    version: String,
    summary: String,
    hooks: Vec<String>,
    /// The unchanged text of the policy.
    parameters_schema: String,
}

/// Whether a shipped policy has this name, which then selects that policy in a stack.
#[must_use]
pub fn is_shipped_name(name: &str) -> bool {
    SHIPPED.iter().any(|(shipped, _)| *shipped == name)
}

struct Shipped {
    version: PolicyVersion,
    component: &'static [u8],
}

fn all() -> &'static [Shipped] {
    static ALL: OnceLock<Vec<Shipped>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut descriptions: BTreeMap<String, Description> = serde_json::from_str(DESCRIPTIONS)
            .unwrap_or_else(|error| {
                // Cannot happen: a test reads the embedded text.
                tracing::error!("cannot read the descriptions of the shipped policies: {error}");
                BTreeMap::new()
            });
        let shipped = |&(name, component): &(&str, &'static [u8])| {
            let description = descriptions.remove(name)?;
            let digest = Digest::parse(&description.digest).ok()?;
            let version = PolicyVersion {
                name: name.to_owned(),
                version: description.version,
                summary: description.summary,
                hooks: description.hooks.iter().filter_map(|hook| Hook::parse(hook)).collect(),
                parameters_schema: description.parameters_schema,
                digest: digest.clone(),
                artifact: digest,
                bytes: component.len() as u64,
                shipped: true,
                since_wall_ms: 0,
                origin: berth_kernel::policy::version::Origin::default(),
            };
            Some(Shipped { version, component })
        };
        SHIPPED.iter().filter_map(shipped).collect()
    })
}

/// The shipped component with this digest.
pub(super) fn component(digest: &Digest) -> Option<&'static [u8]> {
    all().iter().find(|shipped| shipped.version.digest == *digest).map(|shipped| shipped.component)
}

/// The versions of all shipped policies. None of them is compiled.
pub(super) fn versions(now: Now) -> Vec<PolicyVersion> {
    let version = |shipped: &Shipped| PolicyVersion { since_wall_ms: now.wall_ms, ..shipped.version.clone() };
    all().iter().map(version).collect()
}
