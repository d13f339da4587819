//! A valid example of each request body, which the error for an invalid one quotes.

use crate::comparison::Candidate;
use crate::drain::{Cordon, DrainOrder, MarkHealthy};
use crate::node::ReleaseOrder;
use crate::stack::{NewStack, Rollback};
use crate::trial::NewTrial;
use serde::de::DeserializeOwned;

/// A JSON request body with an example.
pub trait Shape: DeserializeOwned {
    /// A valid body. Its first key is the most important one.
    const EXAMPLE: &'static str;
}

impl Shape for Candidate {
    const EXAMPLE: &'static str = r#"{"policy": "binpack", "parameters": {}}"#;
}

impl Shape for Cordon {
    const EXAMPLE: &'static str = r#"{"reason": "fan replacement"}"#;
}

impl Shape for DrainOrder {
    const EXAMPLE: &'static str = r#"{"reason": "fan replacement", "evict": false, "deadlineSeconds": 600}"#;
}

impl Shape for MarkHealthy {
    const EXAMPLE: &'static str = r#"{"state": "healthy", "reason": "reseated"}"#;
}

impl Shape for NewStack {
    const EXAMPLE: &'static str =
        r#"{"entries": [{"policy": "mixed", "parameters": {"replicas": 4}}], "reason": "shares"}"#;
}

impl Shape for NewTrial {
    const EXAMPLE: &'static str =
        r#"{"policy": "binpack", "parameters": {}, "request": {"resource": "nvidia.com/gpu", "count": 2}}"#;
}

impl Shape for ReleaseOrder {
    const EXAMPLE: &'static str = r#"{"reason": "driver upgrade", "forSeconds": 1800, "force": false}"#;
}

impl Shape for Rollback {
    const EXAMPLE: &'static str = r#"{"revision": 3, "reason": "back to before"}"#;
}
