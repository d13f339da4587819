//! What lies under every call: the state file being watched, handles, faults, and pointers from C.

pub(crate) mod call;
pub(crate) mod changes;
pub(crate) mod handle;
pub(crate) mod library;
pub(crate) mod pointer;
pub(crate) mod source;
