//! The kernel: the state of a node's GPUs and the rules that every change obeys.
//!
//! Pure: the standard library and the table of XIDs, no I/O, no clock, no logging, no wire types. The folders are subjects:
//!
//! - [`ids`]: names, PCI addresses and times
//! - [`hardware`]: GPUs and their MIG instances, processes, health
//! - [`sharing`]: what a GPU is offered as, its devices, and how many are free
//! - [`grants`]: allocations, from the request to the history
//! - [`evidence`]: what shows that a pod holds an allocation, and when the allocation ends
//! - [`drain`]: cordons, drains and evictions
//! - [`policy`]: versions, the stack, questions and answers
//! - [`node`]: the ledger, which is the whole state; commands, their decision and their changes; the store's records;
//!   the traits of the adapters
//!
//! No file imports one that imports it. Rules that read the whole state import [`node::ledger`], and the ledger imports the
//! types that it consists of.

pub mod drain;
pub mod evidence;
pub mod grants;
pub mod hardware;
pub mod ids;
pub mod node;
pub mod policy;
pub mod sharing;

// Other crates compile `test_node` for their tests, by this crate's name.
#[cfg(test)]
extern crate self as berth_kernel;
