//! Generated from `wit/policy.wit`.
#![allow(missing_docs, unsafe_code, clippy::all, clippy::pedantic, clippy::unwrap_used)]

wit_bindgen::generate!({
    path: "../wit",
    world: "policy",
    pub_export_macro: true,
    export_macro_name: "__export_world",
    default_bindings_module: "berth_policy_sdk::bindings",
    // As JSON a question can be written down, and asked of a policy again.
    additional_derives: [PartialEq, serde::Serialize],
    // It holds flags, which can derive nothing further.
    additional_derives_ignore: ["description"],
});
