//! What the tests share: nodes, stand-ins, fakes, and waiting.

pub(crate) mod admin_bench;
pub(crate) mod admin_fakes;
pub(crate) mod api_reviews;
pub(crate) mod api_server;
pub(crate) mod api_writes;
pub(crate) mod batches;
pub(crate) mod child;
pub(crate) mod client;
pub(crate) mod files;
pub(crate) mod gated_daemon;
pub(crate) mod guests;
pub(crate) mod kept_compiler;
pub(crate) mod kubelet_bench;
pub(crate) mod kubelet_fakes;
pub(crate) mod policy_node;
pub(crate) mod port;
pub(crate) mod wait;
