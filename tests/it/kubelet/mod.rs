//! The device plugin against the stand-in kubelet, and the DRA driver against a client of its sockets.

pub(crate) mod allocation;
pub(crate) mod claim_policies;
pub(crate) mod claims;
pub(crate) mod clients;
pub(crate) mod floods;
pub(crate) mod guard;
pub(crate) mod pods_api;
pub(crate) mod policies;
pub(crate) mod reconcile;
pub(crate) mod registration;
pub(crate) mod reuse;
pub(crate) mod sources;
pub(crate) mod traps;
