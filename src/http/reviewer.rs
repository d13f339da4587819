//! The API server as a reviewer of tokens and rights, which the daemon provides.

use futures_util::future::BoxFuture;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A user of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterUser {
    /// Such as `system:serviceaccount:monitoring:grafana`.
    pub name: String,
    /// Distinguishes users with the same name over time.
    pub uid: Option<String>,
    /// The user's groups.
    pub groups: Vec<String>,
    /// Further attributes of the user.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// The API server gave no answer.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ReviewerError(pub String);

/// The client of the API server, which the daemon provides. A review begins when its future is first polled, and ends
/// when that is dropped; the caller counts concurrent ones.
pub trait Reviewer: Send + Sync {
    /// The user of a token; `None` if the token is invalid.
    fn authenticate(&self, token: String) -> BoxFuture<'static, Result<Option<ClusterUser>, ReviewerError>>;
    /// Whether the user may do `verb` (an HTTP method in lower case) at this non-resource path.
    fn authorize(
        &self,
        user: Arc<ClusterUser>,
        verb: &'static str,
        path: String,
    ) -> BoxFuture<'static, Result<bool, ReviewerError>>;
}
