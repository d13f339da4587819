//! The one integration-test binary: crates against their ports, and the whole daemon.

// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cli;
mod cluster;
mod config;
mod daemon;
mod deploy;
mod gpus;
mod kubelet;
mod policies;
mod rest;
mod store;
mod support;
