//! The state of the node as one value, the commands that change it, and how it is stored.

pub mod change;
pub mod command;
pub mod decide;
pub mod ledger;
pub mod ports;
pub mod record;
pub mod refusal;
pub mod restore;
pub mod revision;
pub mod rules;
pub mod scan;
pub mod steps;
pub mod tick;
pub mod transitions;

#[cfg(test)]
mod histories;
#[cfg(test)]
mod invariants;
#[cfg(test)]
pub(crate) mod test_node;
