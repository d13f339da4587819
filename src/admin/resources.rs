//! The handlers of the API, one file for each resource, and what they share.

pub(crate) mod allocations;
pub(crate) mod author;
pub(crate) mod call_records;
pub(crate) mod comparisons;
pub(crate) mod decisions;
pub(crate) mod drain_progress;
pub(crate) mod drain_tag;
pub(crate) mod drains;
pub(crate) mod events;
pub(crate) mod explanation;
pub(crate) mod gpu_view;
pub(crate) mod gpus;
pub(crate) mod livez;
pub(crate) mod metrics;
pub(crate) mod node;
pub(crate) mod page;
pub(crate) mod policies;
pub(crate) mod problems;
pub(crate) mod processes;
pub(crate) mod stack;
pub(crate) mod stack_entries;
pub(crate) mod stack_history;
pub(crate) mod swagger;
pub(crate) mod trials;
