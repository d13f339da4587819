//! `Store` over sled, and its twin in memory.
//!
//! What is written is one record per noun ([`berth_kernel::record`]); [`codec`] turns it into
//! bytes. sled 0.34 alone promises less than an Allocate needs, so [`SledStore`] adds what is
//! missing, and says in its own words what stays undetectable. [`Deadline`] bounds how long a
//! caller waits for a disk. Nothing outside this room names sled.

mod check;
mod closed;
pub mod codec;
mod copy;
mod counter;
mod deadline;
mod dto;
mod folder;
mod handle;
pub mod journal;
mod memory;
mod reserve;
mod sled;
mod transfer;
mod trouble;

pub use codec::RECORD_BYTES_MAX;
pub use deadline::{APPEND_WAIT, Deadline, LOAD_WAIT};
pub use memory::{MemoryDisk, MemoryFault, MemoryStore};
pub use sled::SledStore;
pub use transfer::{Summary, TransferError, export, import, init, verify};
