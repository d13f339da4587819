//! The one integration-test binary: rooms against their ports, and the daemon in-process.

// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod admin_bench;
mod admin_doors;
mod admin_policies;
mod admin_routes;
mod admin_twins;
mod api_server;
mod api_writes;
mod cli;
mod cluster;
mod crash;
mod daemon;
mod daemon_start;
mod demo;
mod disk_full;
mod evict;
mod evict_faults;
mod gpus_contract;
mod house;
mod kubelet_allocation;
mod kubelet_bench;
mod kubelet_floods;
mod kubelet_pods_api;
mod kubelet_policies;
mod kubelet_registration;
mod kubelet_rounds;
mod kubelet_sources;
mod kubelet_traps;
mod kubelet_twins;
mod nvml_faults;
mod openapi;
mod policies_guests;
mod policies_hostile;
mod policies_install;
mod policies_node;
mod policies_prebuilt;
mod policies_shipped;
mod processes;
mod sim_file;
mod simulation;
mod state;
mod store_contract;
mod store_size;
mod store_sled;
