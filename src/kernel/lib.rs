//! The kernel: the truth about a node's GPUs and the rules that nothing may break.
//!
//! Pure: the standard library only, no I/O, no clock, no logging, no wire types. In reading order:
//!
//! - [`names`], [`time`], [`gpu`]: what things are called and made of
//! - [`offer`], [`allocation`], [`policy`], [`trust`], [`stack`], [`drain`], [`health`], [`breaker`]: the nouns of the rules
//! - [`process`], [`belongs`], [`part_use`]: who uses the GPUs, by which right, and how much
//! - [`part_state`], [`ledger`], [`history`]: the truth; [`change`], [`record`], [`restore`]: how it
//!   moves, is written down and read back
//! - [`command`], [`decide`], [`refusal`]: what can be asked, and how it is answered; the long
//!   answers are [`allocate`], [`offering`], [`look`] and [`round`]
//! - [`decision`], [`compare`], [`words`]: what was asked and answered, what another policy would have
//!   said, and all of it in words
//! - [`evict`]: who is asked to leave a GPU that is emptied; [`running`]: what shows that a pod still runs
//! - [`listing`], [`placement`], [`pods`], [`asking`], [`reconcile`]: what the kubelet is told, which
//!   devices are near, whose pods are here, who asks next, and what the sources of truth prove

pub mod allocate;
pub mod allocation;
pub mod asking;
pub mod belongs;
pub mod breaker;
pub mod change;
pub mod command;
pub mod compare;
pub mod date;
pub mod decide;
pub mod decision;
pub mod drain;
pub mod evict;
mod evidence;
pub mod gpu;
pub mod health;
pub mod history;
pub mod ledger;
pub mod listing;
pub mod look;
pub mod mig;
pub mod names;
pub mod offer;
pub mod offering;
pub mod part_state;
pub mod part_use;
pub mod placement;
pub mod pod_bypass;
pub mod pods;
pub mod policy;
pub mod ports;
pub mod process;
pub mod reconcile;
pub mod record;
pub mod refusal;
pub mod restore;
pub mod round;
pub mod running;
pub mod stack;
pub mod steps;
pub mod stuck;
pub mod supersede;
pub mod time;
pub mod transitions;
pub mod trust;
pub mod words;

#[cfg(test)]
mod histories;
#[cfg(test)]
mod invariants;
#[cfg(test)]
mod reconcile_tests;
#[cfg(test)]
mod test_node;

// Other crates compile `test_node` for their tests, by this crate's name.
#[cfg(test)]
extern crate self as berth_kernel;
