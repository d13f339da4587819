//! A disk that is full or read-only, at any moment and without root.
//!
//! The library is preloaded (`LD_PRELOAD`) into a program. It stands before the C library's functions
//! that write, and lets those fail that concern a file below one folder, for as long as a file says
//! so. [`Faults`] is how a test writes that file.
//!
//! Covered is what the standard library and sled write with on Linux. Not covered: `mmap`, io_uring,
//! direct system calls, `copy_file_range` (a copy fails when it makes its target).
//!
//! It also gives a program a clock before 1970 ([`wrong_clock`]).
//!
//! A test that uses [`Faults`] has these functions linked into itself. Without the two variables in its
//! own environment they only do the system call.

mod calls;
mod clock;
mod control;

pub use clock::wrong_clock;
pub use control::{Fault, Faults};
