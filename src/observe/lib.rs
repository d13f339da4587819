//! What shows a running daemon: the counters behind its metrics, the spans of its traces and their export, its log, and
//! the load of the GPUs over the last day.

pub mod counters;
pub mod gpu_history;
pub mod logs;
pub mod spans;
pub mod trace;
