//! Policies: their versions, the stack of active ones, the questions to them and the answers.

pub mod compare;
pub mod decider;
pub mod decision;
pub mod describe;
pub mod hooks;
pub mod judge_again;
pub mod reserved_environment;
pub mod stack;
pub mod version;
pub mod version_records;
