//! The handlers of the API, one file for each resource, and what they share.

pub(crate) mod access;
pub(crate) mod allocations;
pub(crate) mod comparisons;
pub(crate) mod decisions;
pub(crate) mod drains;
pub(crate) mod driver;
pub(crate) mod events;
pub(crate) mod gpus;
pub(crate) mod health;
pub(crate) mod history;
pub(crate) mod node;
pub(crate) mod pages;
pub(crate) mod pod_rules;
pub(crate) mod policies;
pub(crate) mod processes;
pub(crate) mod stack;
pub(crate) mod stack_entries;
pub(crate) mod trials;
pub(crate) mod via;
