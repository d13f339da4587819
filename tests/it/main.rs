//! The one integration-test binary: rooms against their ports, and the daemon in-process.

mod house;
