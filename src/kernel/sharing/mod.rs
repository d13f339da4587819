//! What each part of a GPU is offered as, which devices follow from it, and how many of them are free.

pub mod breaker;
pub mod capacity;
pub mod listing;
mod nvlink_groups;
pub mod offer;
pub mod part_state;
pub mod placement;
pub mod publish;
pub mod reoffer;
pub mod via;
