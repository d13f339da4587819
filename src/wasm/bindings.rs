//! Generated from `policies-wasm/wit/policy.wit`.
#![allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub)]

wasmtime::component::bindgen!({
    path: "../../policies-wasm/wit",
    world: "policy",
    additional_derives: [PartialEq, serde::Serialize, serde::Deserialize],
});
