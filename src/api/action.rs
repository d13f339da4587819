//! What a client can do about a problem: an operation of this API.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// An operation of this API that helps with a problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Action {
    /// The operation.
    pub operation: Operation,
    /// Its parameters of path and query, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(example = json!({"id": "5eed0001-17"}))]
    pub parameters: BTreeMap<String, String>,
    /// Its method and path, with the parameters filled in.
    #[schema(example = "DELETE /api/v1/allocations/5eed0001-17")]
    pub request: String,
}

/// The operations that problems name, by their ids in the API's description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Operation {
    /// Lists the GPUs.
    ListGpus,
    /// Shows a GPU with its marks: `uuid`.
    GetGpu,
    /// Lists the allocations.
    ListAllocations,
    /// Ends an allocation: `id`, and `force` to end it although its pod runs.
    EndAllocation,
    /// Lists the policies.
    ListPolicies,
    /// Uploads a policy.
    UploadPolicy,
    /// Shows the active stack.
    GetStack,
    /// Activates a stack.
    ActivateStack,
    /// Lists the earlier stacks.
    ListActivations,
    /// Lists the shadows.
    ListShadows,
    /// Ends a shadow: `id`.
    EndShadow,
}

impl Operation {
    /// All kinds.
    pub const ALL: &[Self] = &[
        Self::ListGpus,
        Self::GetGpu,
        Self::ListAllocations,
        Self::EndAllocation,
        Self::ListPolicies,
        Self::UploadPolicy,
        Self::GetStack,
        Self::ActivateStack,
        Self::ListActivations,
        Self::ListShadows,
        Self::EndShadow,
    ];

    /// Its method and path in the API's description.
    #[must_use]
    pub fn route(self) -> (&'static str, &'static str) {
        match self {
            Self::ListGpus => ("GET", "/api/v1/gpus"),
            Self::GetGpu => ("GET", "/api/v1/gpus/{uuid}"),
            Self::ListAllocations => ("GET", "/api/v1/allocations"),
            Self::EndAllocation => ("DELETE", "/api/v1/allocations/{id}"),
            Self::ListPolicies => ("GET", "/api/v1/policies"),
            Self::UploadPolicy => ("POST", "/api/v1/policies"),
            Self::GetStack => ("GET", "/api/v1/stack"),
            Self::ActivateStack => ("PUT", "/api/v1/stack"),
            Self::ListActivations => ("GET", "/api/v1/stack/history"),
            Self::ListShadows => ("GET", "/api/v1/shadows"),
            Self::EndShadow => ("DELETE", "/api/v1/shadows/{id}"),
        }
    }
}

impl From<Operation> for Action {
    fn from(operation: Operation) -> Self {
        Self::new(operation, &[])
    }
}

impl Action {
    /// This operation with these parameters. A parameter that the path does not name is one of the query.
    #[must_use]
    pub fn new(operation: Operation, parameters: &[(&str, &str)]) -> Self {
        let (method, path) = operation.route();
        let (mut path, mut separator) = (path.to_owned(), '?');
        for (name, value) in parameters {
            let placeholder = format!("{{{name}}}");
            if path.contains(&placeholder) {
                path = path.replace(&placeholder, value);
            } else {
                path += &format!("{separator}{name}={value}");
                separator = '&';
            }
        }
        let parameters = parameters.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Self { operation, parameters: parameters.collect(), request: format!("{method} {path}") }
    }

    /// The value of a parameter.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.get(name).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_its_parameters_in_path_and_query() {
        assert_eq!(Action::from(Operation::ListGpus).request, "GET /api/v1/gpus");
        let forced = Action::new(Operation::EndAllocation, &[("id", "7-1"), ("force", "true")]);
        assert_eq!(forced.request, "DELETE /api/v1/allocations/7-1?force=true");
        let text = serde_json::to_string(&Action::new(Operation::EndShadow, &[("id", "3")])).unwrap();
        let expected =
            r#"{"operation":"endShadow","parameters":{"id":"3"},"request":"DELETE /api/v1/shadows/3"}"#;
        assert_eq!(text, expected);
    }
}
