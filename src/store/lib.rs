//! [`berth_kernel::node::ports::Store`] on sled and in memory, and the journal of decisions.
//!
//! The store holds one record per object ([`berth_kernel::node::record`]); [`codec`] encodes it. sled 0.34
//! alone guarantees less than an Allocate needs: [`SledStore`] adds the missing checks and documents
//! what stays undetected. No other crate uses sled.

mod check;
pub mod codec;
mod counter;
mod dto;
mod errors;
mod files;
mod folder;
mod handle;
pub mod journal;
mod memory;
mod sled;
mod transfer;

pub use codec::RECORD_BYTES_MAX;
pub use memory::{MemoryDisk, MemoryFault, MemoryStore};
pub use sled::SledStore;
pub use transfer::{Summary, TransferError, export, import, init, verify};
