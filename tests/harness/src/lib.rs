//! Programs that try to break Berth from outside, and one that measures it. `just` lists them with what they take;
//! the integration tests call the same code for short runs, and the fuzz targets call [`fuzz`].

// The output is for people.
#![allow(clippy::print_stdout)]

pub mod bench;
pub mod bench_dra;
pub mod bench_peer;
pub mod fleet_plan;
pub mod flood_admin;
pub mod fuzz;
pub mod hostile;
pub mod kill;
pub mod load_admin;
mod resources;
pub mod same_answers;
pub mod sim;
pub mod soak;
