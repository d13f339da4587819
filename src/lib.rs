//! Berth: a Kubernetes node daemon that shares and guards a node's GPUs.
//!
//! ```text
//!    main -> daemon -> everything
//!    kubelet ─┐                                  ┌─ nvml, sim   implement Gpus
//!             ├─> admission ─> keeper ─> ports <─┼─ store       implements Store, journal Journal
//!    admin  ──┤                  │               ├─ wasm        implements Policies
//!    cluster ─┘                  v               └─ procfs      implements Processes
//!                             kernel   (std only; names nobody)
//! ```
//!
//! The modules in reading order. Which may name which is held by a test that reads the sources.

pub mod figures;
pub mod files;
pub mod kernel;
pub mod labels;
pub mod ports;

pub mod yaml;

pub mod keeper;
pub mod kill_points;
pub mod spans;
pub mod trust;

pub mod admission;

pub mod kubelet;

pub mod metrics;

pub mod admin;

pub mod cluster;

pub mod journal;
pub mod nvml;
pub mod procfs;
pub mod sim;
pub mod store;
pub mod wasm;

pub mod scenario;

pub mod cli;
pub mod config;
pub mod daemon;
pub mod telemetry;
pub mod trace;
