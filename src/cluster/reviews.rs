//! Who has a token and what they may do, by the API server's word: TokenReview and SubjectAccessReview.
//! It needs the rights of the ClusterRole berth-review, or of system:auth-delegator.

use super::Settings;
use super::client::{self, ConnectError};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::OnceCell;

/// Longest wait for one review. The API server answers within milliseconds where it does not ask others.
const REVIEW_MAX: Duration = Duration::from_secs(4);

/// The API server did not say.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// It cannot be connected to.
    #[error("the API server cannot be reached to check a token")]
    Connect {
        /// Why.
        #[source]
        source: Box<ConnectError>,
    },
    /// It does not answer as it should.
    #[error("the API server refuses a {review}{hint}")]
    Ask {
        /// TokenReview or SubjectAccessReview.
        review: &'static str,
        /// What to do, if that is known.
        hint: &'static str,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// It takes too long.
    #[error("the API server did not answer a {review} within {} s", REVIEW_MAX.as_secs())]
    Slow {
        /// TokenReview or SubjectAccessReview.
        review: &'static str,
    },
    /// It answers without an answer.
    #[error("the API server could not check a token: {words}")]
    Unjudged {
        /// What it says.
        words: String,
    },
}

/// A user as the API server knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// Such as `system:serviceaccount:monitoring:grafana`.
    pub name: String,
    /// Tells apart users who had the same name.
    pub uid: Option<String>,
    /// Groups they are in.
    pub groups: Vec<String>,
    /// Whatever else the cluster knows.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Asks, over a connection that is made with the first question.
pub struct Reviews {
    settings: Settings,
    audiences: Vec<String>,
    client: OnceCell<Client>,
}

impl Reviews {
    /// A token must be meant for one of the audiences; none: for the API server itself.
    #[must_use]
    pub fn new(settings: Settings, audiences: Vec<String>) -> Self {
        Self { settings, audiences, client: OnceCell::new() }
    }

    /// Connects once it can; what failed is tried anew with the next question.
    async fn client(&self, review: &'static str) -> Result<Client, ReviewError> {
        let connect = self.client.get_or_try_init(|| client::connect(&self.settings));
        let connected = tokio::time::timeout(REVIEW_MAX, connect).await;
        let client = connected.map_err(|_| ReviewError::Slow { review })?;
        client.cloned().map_err(|source| ReviewError::Connect { source: Box::new(source) })
    }

    /// Whose token it is; `None`: nobody's, or not meant for this daemon.
    ///
    /// # Errors
    /// If the API server does not say.
    pub async fn who(&self, token: String) -> Result<Option<User>, ReviewError> {
        const REVIEW: &str = "TokenReview";
        let api: Api<TokenReview> = Api::all(self.client(REVIEW).await?);
        let audiences = Some(self.audiences.clone()).filter(|a| !a.is_empty());
        let spec = TokenReviewSpec { token, audiences };
        let review = TokenReview { spec, ..TokenReview::default() };
        let status = create(&api, &review, REVIEW).await?.status.unwrap_or_default();
        if status.authenticated != Some(true) {
            // A token that is merely wrong comes with an error, too, in some releases: it is nobody's.
            return Ok(None);
        }
        // A server that knows no audiences names none: then the token was not meant for us alone.
        let meant = status.audiences.unwrap_or_default();
        if !self.audiences.is_empty() && !meant.iter().any(|a| self.audiences.contains(a)) {
            let words = "it does not say for whom a token is meant (no audiences in its TokenReview)".into();
            return Err(ReviewError::Unjudged { words });
        }
        let user = status.user.unwrap_or_default();
        Ok(user.username.map(|name| User {
            name,
            uid: user.uid,
            groups: user.groups.unwrap_or_default(),
            extra: user.extra.unwrap_or_default(),
        }))
    }

    /// Whether the user may do `verb` at this path.
    ///
    /// # Errors
    /// If the API server does not say.
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
        // An explicit no wins over a yes.
        Ok(status.allowed && status.denied != Some(true))
    }
}

async fn create<K>(api: &Api<K>, review: &K, name: &'static str) -> Result<K, ReviewError>
where
    K: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    let parameters = PostParams::default();
    let asked = tokio::time::timeout(REVIEW_MAX, api.create(&parameters, review)).await;
    asked.map_err(|_| ReviewError::Slow { review: name })?.map_err(|source| ReviewError::Ask {
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
