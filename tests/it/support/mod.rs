//! Code that tests share: nodes, stand-ins, fakes, and waiting (tests/README.md).

pub(crate) mod admin_fakes;
pub(crate) mod admin_node;
pub(crate) mod api_reviews;
pub(crate) mod api_server;
pub(crate) mod api_writes;
pub(crate) mod batches;
pub(crate) mod child;
pub(crate) mod claim_node;
pub(crate) mod client;
pub(crate) mod files;
pub(crate) mod gated_node;
pub(crate) mod gpus;
pub(crate) mod guard;
pub(crate) mod guests;
pub(crate) mod kept_compiler;
pub(crate) mod kubelet_fakes;
pub(crate) mod kubelet_node;
pub(crate) mod ledger_node;
pub(crate) mod nvml;
pub(crate) mod port;
pub(crate) mod process_node;
pub(crate) mod wait;
