//! Policies: the runtime, the shipped ones, and the commands of their authors.

pub(crate) mod author;
pub(crate) mod fuzz_corpus;
pub(crate) mod hostile;
pub(crate) mod install;
pub(crate) mod memory;
pub(crate) mod misbehaving;
pub(crate) mod pod_rules;
pub(crate) mod prebuilt;
pub(crate) mod prepared;
pub(crate) mod rules;
pub(crate) mod same;
pub(crate) mod shipped;
pub(crate) mod topology;
pub(crate) mod trial;
