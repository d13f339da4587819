//! The policies that come with the daemon: what `policies-wasm/build.sh` made, embedded, so that
//! building the daemon needs no WebAssembly toolchain.

use std::sync::OnceLock;

use super::artifacts::digest;
use crate::kernel::names::Digest;

/// Their components. A test holds them equal to their sources by the manifest beside them.
const SHIPPED: &[&[u8]] = &[
    include_bytes!("../../policies-wasm/prebuilt/exclusive.wasm"),
    include_bytes!("../../policies-wasm/prebuilt/timeslice.wasm"),
    include_bytes!("../../policies-wasm/prebuilt/mixed.wasm"),
    include_bytes!("../../policies-wasm/prebuilt/binpack.wasm"),
    include_bytes!("../../policies-wasm/prebuilt/spread.wasm"),
    include_bytes!("../../policies-wasm/prebuilt/topology.wasm"),
    include_bytes!("../../policies-wasm/prebuilt/memory.wasm"),
    include_bytes!("../../policies-wasm/prebuilt/quota.wasm"),
    include_bytes!("../../policies-wasm/prebuilt/triage-xid.wasm"),
];

/// Each with its digest.
pub(super) fn all() -> &'static [(Digest, &'static [u8])] {
    static ALL: OnceLock<Vec<(Digest, &[u8])>> = OnceLock::new();
    ALL.get_or_init(|| SHIPPED.iter().map(|component| (digest(component), *component)).collect())
}

/// The component with this digest, if it came with this release.
pub(super) fn component(wanted: &Digest) -> Option<&'static [u8]> {
    let found = all().iter().find(|(digest, _)| digest == wanted);
    found.map(|(_, component)| *component)
}
