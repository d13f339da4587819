//! The REST API, its listeners, and what it shows.

pub(crate) mod access;
pub(crate) mod audit;
pub(crate) mod common;
pub(crate) mod conditions;
pub(crate) mod decisions;
pub(crate) mod events;
pub(crate) mod flood;
pub(crate) mod history;
pub(crate) mod large_responses;
pub(crate) mod lists;
pub(crate) mod livez;
pub(crate) mod malformed;
pub(crate) mod metrics;
pub(crate) mod openapi;
pub(crate) mod page;
pub(crate) mod policies;
pub(crate) mod processes;
pub(crate) mod protocol;
pub(crate) mod queries;
pub(crate) mod reviews;
pub(crate) mod rights;
pub(crate) mod routes;
pub(crate) mod tls;
pub(crate) mod traces;
pub(crate) mod versions;
