//! The exported functions, named, numbered and laid out as in `nvml.h` (API 13). Facts come from that header.
//!
//! They are not `unsafe` to Rust, because Rust never calls them: the promises that a C caller makes about its pointers
//! are named in `runtime::pointer`.

mod absent;
mod device;
mod events;
mod fields;
mod instances;
mod layout;
mod limits;
mod links;
mod lookup;
mod mig;
mod place;
mod processes;
mod profiles;
mod readings;
mod system;

/// `NVML_FEATURE_ENABLED` or `NVML_FEATURE_DISABLED`, and every other C truth value.
fn flag(on: bool) -> std::ffi::c_uint {
    u32::from(on)
}

/// Bytes of so many MiB.
fn bytes(mib: u64) -> u64 {
    mib.saturating_mul(1024 * 1024)
}
