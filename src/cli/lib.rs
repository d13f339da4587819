//! The client half of the command line: it uses a running daemon's admin API, and knows only what the
//! API returns.

mod age;
mod allocation;
pub mod arguments;
pub mod client;
pub mod command;
mod comparison;
mod complete;
mod confirm;
mod decision;
mod drain;
mod driver;
pub mod endpoint;
mod event;
mod gpu;
mod history;
mod named_gpu;
mod names;
pub mod node;
pub mod output;
pub mod parameters;
pub mod policy;
mod policy_version;
mod process;
mod stack;
pub mod stack_change;
mod terminal;
mod top;
mod trial;
pub mod upload;
pub mod usage;
mod via;

pub use command::{DaemonCommand, not_watched, run};
