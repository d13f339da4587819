//! The policies that come with the daemon: what `policies-wasm/build.sh` made, embedded, so that
//! building the daemon needs no WebAssembly toolchain.
//!
//! What they say of themselves is written down beside them, so that a node lists all of them without
//! compiling one: each is compiled when a stack, a replay or a shadow first names it.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;

use berth_kernel::names::Digest;
use berth_kernel::policy::{Hook, PolicyVersion};
use berth_kernel::time::Now;

/// Their names and components. A test holds them equal to their sources by the manifest beside them.
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

/// What each answers to `describe`, by name. A test holds it equal to what they do answer.
const DESCRIBED: &str = include_str!("../../policies-wasm/prebuilt/described.json");

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Described {
    /// sha256 of the component: computed at every start it would bring all of them into memory.
    digest: String,
    version: String,
    summary: String,
    hooks: Vec<String>,
    /// Exactly as the policy writes it.
    parameters_schema: String,
}

struct Shipped {
    digest: Digest,
    component: &'static [u8],
    name: &'static str,
    described: Described,
}

fn all() -> &'static [Shipped] {
    static ALL: OnceLock<Vec<Shipped>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut described: BTreeMap<String, Described> =
            serde_json::from_str(DESCRIBED).unwrap_or_else(|error| {
                // It is part of the program, and a test reads it.
                tracing::error!("what the shipped policies say of themselves cannot be read: {error}");
                BTreeMap::new()
            });
        let shipped = |&(name, component): &(&'static str, &'static [u8])| {
            let described = described.remove(name)?;
            let digest = Digest::parse(&described.digest).ok()?;
            Some(Shipped { digest, component, name, described })
        };
        SHIPPED.iter().filter_map(shipped).collect()
    })
}

/// The component with this digest, if it came with this release.
pub(super) fn component(wanted: &Digest) -> Option<&'static [u8]> {
    all().iter().find(|shipped| shipped.digest == *wanted).map(|shipped| shipped.component)
}

/// All of them, as versions that were not compiled yet.
pub(super) fn versions(now: Now) -> Vec<PolicyVersion> {
    all().iter().map(|shipped| shipped.version(now)).collect()
}

impl Shipped {
    fn version(&self, now: Now) -> PolicyVersion {
        PolicyVersion {
            name: self.name.to_owned(),
            version: self.described.version.clone(),
            summary: self.described.summary.clone(),
            hooks: self.described.hooks.iter().filter_map(|hook| Hook::parse(hook)).collect(),
            parameters_schema: self.described.parameters_schema.clone(),
            digest: self.digest.clone(),
            artifact: self.digest.clone(),
            bytes: self.component.len() as u64,
            shipped: true,
            since_wall_ms: now.wall_ms,
            origin: berth_kernel::trust::Origin::default(),
        }
    }
}
