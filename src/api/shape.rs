//! Examples of each body: one for the error of another body, and named ones for the API's description.

use crate::comparison::Candidate;
use crate::drain::{Cordon, DrainOrder, MarkHealthy};
use crate::node::ReleaseOrder;
use crate::stack::{NewStack, Rollback};
use crate::trial::NewTrial;
use crate::via::ViaOrder;
use serde::de::DeserializeOwned;

/// A JSON request body with an example.
pub trait Shape: DeserializeOwned {
    /// A valid body. Its first key is the most important one.
    const EXAMPLE: &'static str;
    /// Further valid bodies by name, for the description. Swagger UI fills in the one whose name is first in order, so that
    /// one has to work on any node, without an API server and with the shipped policies.
    const NAMED_EXAMPLES: &'static [(&'static str, &'static str)] = &[];
}

impl Shape for Candidate {
    const EXAMPLE: &'static str = r#"{"policy": "binpack", "parameters": {}}"#;
}

impl Shape for Cordon {
    const EXAMPLE: &'static str = r#"{"reason": "fan replacement"}"#;
}

impl Shape for DrainOrder {
    const EXAMPLE: &'static str = r#"{"reason": "fan replacement", "evict": false, "deadlineSeconds": 600}"#;
    const NAMED_EXAMPLES: &'static [(&'static str, &'static str)] = &[
        ("Drain until its pods have ended", r#"{"reason": "tried from Swagger UI"}"#),
        (
            "Evict its pods, delete them after ten minutes",
            r#"{"reason": "tried from Swagger UI", "evict": true, "deadlineSeconds": 600, "atDeadline": "delete"}"#,
        ),
        (
            "Give up after ten minutes",
            r#"{"reason": "tried from Swagger UI", "deadlineSeconds": 600, "atDeadline": "giveUp"}"#,
        ),
    ];
}

impl Shape for MarkHealthy {
    const EXAMPLE: &'static str = r#"{"state": "healthy", "reason": "reseated"}"#;
}

impl Shape for ViaOrder {
    const EXAMPLE: &'static str = r#"{"api": "dra", "reason": "new jobs use claims"}"#;
    const NAMED_EXAMPLES: &'static [(&'static str, &'static str)] = &[
        ("By the device plugin API", r#"{"api": "devicePlugin", "reason": "tried from Swagger UI"}"#),
        ("By claims", r#"{"api": "dra", "reason": "tried from Swagger UI"}"#),
    ];
}

impl Shape for NewStack {
    const EXAMPLE: &'static str =
        r#"{"entries": [{"policy": "mixed", "parameters": {"replicas": 4}}], "reason": "shares"}"#;
    const NAMED_EXAMPLES: &'static [(&'static str, &'static str)] = &[
        (
            "GPUs whole or in four shares",
            r#"{"entries": [{"policy": "mixed", "parameters": {"replicas": 4}}], "reason": "shares for notebooks"}"#,
        ),
        (
            "Shares, at most four of each namespace",
            r#"{"entries": [{"policy": "quota", "parameters": {"default": {"devices": 4}}, "permissions": {"deny": true}}, {"policy": "timeslice", "parameters": {"replicas": 10}}]}"#,
        ),
        ("Whole GPUs only", r#"{"entries": [{"policy": "exclusive"}], "reason": "no shares"}"#),
    ];
}

impl Shape for NewTrial {
    const EXAMPLE: &'static str =
        r#"{"policy": "binpack", "parameters": {}, "request": {"resource": "nvidia.com/gpu", "count": 2}}"#;
    const NAMED_EXAMPLES: &'static [(&'static str, &'static str)] = &[
        ("Four shares of each GPU", r#"{"policy": "timeslice", "parameters": {"replicas": 4}}"#),
        (
            "Where two shares would be placed",
            r#"{"policy": "binpack", "request": {"resource": "nvidia.com/gpu.shared", "count": 2, "namespace": "team-a"}}"#,
        ),
    ];
}

impl Shape for ReleaseOrder {
    const EXAMPLE: &'static str = r#"{"reason": "driver upgrade", "forSeconds": 1800, "force": false}"#;
    const NAMED_EXAMPLES: &'static [(&'static str, &'static str)] = &[
        ("If no pod holds a GPU", r#"{"reason": "tried from Swagger UI", "forSeconds": 60}"#),
        ("While pods hold GPUs", r#"{"reason": "tried from Swagger UI", "forSeconds": 60, "force": true}"#),
    ];
}

impl Shape for Rollback {
    const EXAMPLE: &'static str = r#"{"revision": 3, "reason": "back to before"}"#;
    const NAMED_EXAMPLES: &'static [(&'static str, &'static str)] = &[
        ("To the stack before", r#"{"reason": "back to before"}"#),
        ("To the stack of a revision", r#"{"revision": 3, "reason": "back to before"}"#),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named<T: Shape>() {
        for (name, body) in T::NAMED_EXAMPLES {
            let parsed = serde_json::from_str::<T>(body);
            assert!(parsed.is_ok(), "{name}: {body}");
            // The name in `by` is recorded with the change: an example that is executed as it stands must not have one.
            assert!(!body.contains("\"by\""), "{name}");
        }
    }

    #[test]
    fn named_examples_are_valid_and_name_no_person() {
        named::<DrainOrder>();
        named::<NewStack>();
        named::<NewTrial>();
        named::<ReleaseOrder>();
        named::<Rollback>();
        named::<Candidate>();
    }
}
