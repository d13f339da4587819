//! The commands of the built `berth`.

pub(crate) mod commands;
pub(crate) mod exit_codes;
pub(crate) mod kubectl_plugin;
pub(crate) mod output;
pub(crate) mod remedies;
pub(crate) mod terminal;
