//! Who the caller is, and what it may do.

use super::values::values;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The caller of the request, as the daemon knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Access {
    /// How the caller is authenticated (`token`, `certificate`, `socket` or `kubernetes`), and its name.
    #[schema(example = "token viewer")]
    pub caller: String,
    /// What it may do.
    pub right: AccessRight,
}

values! {
    /// What a caller may do; the first two are the values of `admin.tokens[].right`.
    AccessRight {
        /// Read everything, change nothing.
        Read = "read",
        /// Read and change everything.
        Change = "change",
        /// A user of the cluster: the API server decides about each request.
        Reviewed = "reviewed",
    }
}
