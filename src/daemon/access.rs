//! Who may use the admin API: the settings of its room, and the API server's word where it is asked.

use super::Progress;
use crate::admin::{self, ReviewError, Reviewer, User};
use crate::cluster;
use crate::config::{ApiServer, Config};
use futures_util::future::BoxFuture;
use std::sync::Arc;
use tokio::runtime::Handle;

/// What the admin room is told.
pub(super) fn settings(config: &Config, progress: &Arc<Progress>) -> admin::Settings {
    let told = Arc::clone(progress);
    admin::Settings {
        listen: config.admin_listen,
        health_listen: config.health_listen,
        token_file: config.token_file.clone(),
        access: config.admin.clone(),
        reviewer: reviewer(config),
        tls_look: admin::TLS_LOOK,
        facts: Arc::new(move || told.facts()),
    }
}

/// Asks the API server where the configuration says so and there is one.
fn reviewer(config: &Config) -> Option<Arc<dyn Reviewer>> {
    let wanted = config.admin.kubernetes.as_ref()?;
    if config.api_server == ApiServer::Off {
        tracing::warn!(
            "admin.kubernetes is set, but there is no API server (--kubeconfig, or a pod's service account): only the \
             daemon's own tokens and certificates open the admin API"
        );
        return None;
    }
    let settings = cluster::Settings::new(config.api_server.clone(), config.node_name.clone());
    let reviews = Arc::new(cluster::Reviews::new(settings, wanted.audiences.clone()));
    Some(Arc::new(Asking { reviews, runtime: Handle::current() }))
}

/// The port of the admin room over the cluster room. Asked on the daemon's own runtime: connections to the
/// API server must not belong to a worker of the admin API, which may end first.
struct Asking {
    reviews: Arc<cluster::Reviews>,
    runtime: Handle,
}

impl Asking {
    fn spawn<T: Send + 'static>(
        &self,
        ask: impl Future<Output = Result<T, cluster::ReviewError>> + Send + 'static,
    ) -> BoxFuture<'static, Result<T, ReviewError>> {
        let asked = self.runtime.spawn(ask);
        Box::pin(async move {
            match asked.await {
                Ok(answer) => answer.map_err(|error| ReviewError(cluster::words(&error))),
                Err(error) => Err(ReviewError(error.to_string())),
            }
        })
    }
}

impl Reviewer for Asking {
    fn who(&self, token: String) -> BoxFuture<'static, Result<Option<User>, ReviewError>> {
        let reviews = Arc::clone(&self.reviews);
        self.spawn(async move {
            let found = reviews.who(token).await?;
            Ok(found.map(|cluster::User { name, uid, groups, extra }| User { name, uid, groups, extra }))
        })
    }

    fn may(
        &self,
        user: Arc<User>,
        verb: &'static str,
        path: String,
    ) -> BoxFuture<'static, Result<bool, ReviewError>> {
        let reviews = Arc::clone(&self.reviews);
        self.spawn(async move {
            let User { name, uid, groups, extra } = (*user).clone();
            reviews.may(cluster::User { name, uid, groups, extra }, verb, path).await
        })
    }
}
