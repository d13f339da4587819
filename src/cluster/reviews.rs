//! Authenticates tokens and authorizes their users through the API server: TokenReview and SubjectAccessReview.
//! Needs the rights of the ClusterRole berth-review, or of system:auth-delegator.

use super::client::{self, ConnectError};
use super::settings::Settings;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::OnceCell;

/// Timeout of one review. The API server answers within milliseconds if it calls no webhook.
const REVIEW_MAX: Duration = Duration::from_secs(4);

/// There is no result of a review.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// No connection to the API server.
    #[error("the API server cannot be reached to check a token")]
    Connect(#[source] Box<ConnectError>),
    /// The request failed, or has an error status.
    #[error("the {review} at the API server failed{hint}")]
    Request {
        /// TokenReview or SubjectAccessReview.
        review: &'static str,
        /// What to do, or empty.
        hint: &'static str,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// No answer to a TokenReview or SubjectAccessReview within the timeout of a review, 4 s.
    #[error("the API server did not answer a {0} within {seconds} s", seconds = REVIEW_MAX.as_secs())]
    Timeout(&'static str),
    /// A TokenReview does not show whether the token is for an audience of this daemon.
    #[error(
        "the API server could not check a token: the TokenReview has none of the requested audiences in its status"
    )]
    NoAudience,
}

/// A user as a TokenReview identifies it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// Such as `system:serviceaccount:monitoring:grafana`.
    pub name: String,
    /// Distinguishes users that had the same name at different times.
    pub uid: Option<String>,
    /// The groups of the user.
    pub groups: Vec<String>,
    /// Further attributes from the cluster's authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Sends reviews to the API server. It connects with the first one.
pub struct Reviews {
    settings: Settings,
    audiences: Vec<String>,
    client: OnceCell<Client>,
}

impl Reviews {
    /// A token must be issued for one of the audiences; without audiences, for the API server itself.
    #[must_use]
    pub fn new(settings: Settings, audiences: Vec<String>) -> Self {
        Self { settings, audiences, client: OnceCell::new() }
    }

    /// The client, connected with the first call; after a failure the next call connects again.
    async fn client(&self, review: &'static str) -> Result<Client, ReviewError> {
        let connect = self.client.get_or_try_init(|| client::connect(&self.settings));
        let connected = tokio::time::timeout(REVIEW_MAX, connect).await;
        let client = connected.map_err(|_| ReviewError::Timeout(review))?;
        client.cloned().map_err(|error| ReviewError::Connect(Box::new(error)))
    }

    /// Authenticates a token; `None` if it is invalid or not issued for the audiences of this daemon.
    ///
    /// # Errors
    /// If there is no result of the review.
    pub async fn who(&self, token: String) -> Result<Option<User>, ReviewError> {
        const REVIEW: &str = "TokenReview";
        let api: Api<TokenReview> = Api::all(self.client(REVIEW).await?);
        let audiences = Some(self.audiences.clone()).filter(|a| !a.is_empty());
        let spec = TokenReviewSpec { token, audiences };
        let review = TokenReview { spec, ..TokenReview::default() };
        let status = create(&api, &review, REVIEW).await?.status.unwrap_or_default();
        if status.authenticated != Some(true) {
            // Some releases set an error for a token that is merely invalid.
            return Ok(None);
        }
        // An API server without support for audiences returns none: the token may be issued for any of them.
        let issued_for = status.audiences.unwrap_or_default();
        if !self.audiences.is_empty() && !issued_for.iter().any(|a| self.audiences.contains(a)) {
            return Err(ReviewError::NoAudience);
        }
        let user = status.user.unwrap_or_default();
        Ok(user.username.map(|name| User {
            name,
            uid: user.uid,
            groups: user.groups.unwrap_or_default(),
            extra: user.extra.unwrap_or_default(),
        }))
    }

    /// Whether the user is allowed `verb` at this path.
    ///
    /// # Errors
    /// If there is no result of the review.
    pub async fn may(&self, user: User, verb: &'static str, path: String) -> Result<bool, ReviewError> {
        const REVIEW: &str = "SubjectAccessReview";
        let api: Api<SubjectAccessReview> = Api::all(self.client(REVIEW).await?);
        let spec = SubjectAccessReviewSpec {
            user: Some(user.name),
            uid: user.uid,
            groups: Some(user.groups),
            extra: Some(user.extra),
            non_resource_attributes: Some(NonResourceAttributes {
                path: Some(path),
                verb: Some(verb.into()),
            }),
            resource_attributes: None,
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let status = create(&api, &review, REVIEW).await?.status.unwrap_or_default();
        // An explicit denial overrides `allowed`.
        Ok(status.allowed && status.denied != Some(true))
    }
}

async fn create<K>(api: &Api<K>, review: &K, name: &'static str) -> Result<K, ReviewError>
where
    K: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    let parameters = PostParams::default();
    let answer = tokio::time::timeout(REVIEW_MAX, api.create(&parameters, review)).await;
    answer.map_err(|_| ReviewError::Timeout(name))?.map_err(|source| ReviewError::Request {
        review: name,
        hint: match &source {
            kube::Error::Api(status) if status.code == 403 => {
                " (it needs: create tokenreviews and subjectaccessreviews; ClusterRole berth-review, see \
                 deploy/cluster-role.yaml)"
            }
            _ => "",
        },
        source: Box::new(source),
    })
}
