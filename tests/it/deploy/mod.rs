//! The files that users deploy or read.

pub(crate) mod documents;
pub(crate) mod files;
pub(crate) mod pods;
