//! A node in which everything goes wrong, one seed a run: the product's keeper, kernel, stack and
//! store code among a made-up disk, clock, kubelet, GPUs, policies and operator.
//!
//! One thread a run, no real time, no randomness but the seed's. The made-up kubelet's books are
//! the truth; after every turn of the keeper its ledger is held against them.

pub(crate) mod event;
pub(crate) mod generate;
pub(crate) mod run;
pub(crate) mod shrink;
pub(crate) mod violation;
pub(crate) mod world;

pub(crate) mod answers;
mod checks;
mod claims;
mod clock;
mod containers;
mod daemon;
mod disk;
mod ends;
mod evictions;
mod kubelet;
mod lies;
mod limits;
mod machine;
mod marks;
mod operator;
mod people;
mod pods;
mod policies;
pub(crate) mod rng;
mod sources;
pub(crate) mod state;
mod views;
