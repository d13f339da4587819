//! Generated from `wit/policy.wit`.
#![allow(missing_docs, unsafe_code, clippy::all, clippy::pedantic, clippy::unwrap_used)]

wit_bindgen::generate!({
    path: "../wit",
    world: "policy",
    pub_export_macro: true,
    export_macro_name: "__export_world",
    default_bindings_module: "berth_policy_sdk::bindings",
    // So that the input of a call can be recorded as JSON and the call repeated.
    additional_derives: [PartialEq, serde::Serialize],
    // It contains flags, for which nothing can be derived.
    additional_derives_ignore: ["description"],
});
