//! Access to the admin API: the settings of its server, and reviews by the API server.

use berth_cluster::ApiServer;
use berth_config::Config;
use berth_http::{ClusterUser, Reviewer, ReviewerError};
use berth_kernel::drain::eviction::EvictionOutcome;
use berth_kernel::evidence::pods::Pod;
use futures_util::future::BoxFuture;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// The settings of the admin API.
pub(super) fn settings(config: &Config) -> berth_http::Settings {
    berth_http::Settings {
        listen: config.admin.listen,
        health_listen: config.admin.health_listen,
        token_file: config.admin.token_file.clone(),
        access: config.admin.access.clone(),
        reviewer: reviewer(config),
        tls_poll_interval: berth_http::TLS_POLL_INTERVAL,
    }
}

/// Reviews by the API server, if they are configured and there is an API server.
fn reviewer(config: &Config) -> Option<Arc<dyn Reviewer>> {
    let kubernetes = config.admin.access.kubernetes.as_ref()?;
    if config.cluster.api_server == ApiServer::Off {
        tracing::warn!(
            "admin.kubernetes is set, but there is no API server (--kubeconfig, or a pod's service account): the \
             admin API accepts only the daemon's own tokens and certificates"
        );
        return None;
    }
    let settings = berth_cluster::Settings::new(config.cluster.api_server.clone(), config.node.name.clone());
    let reviews = Arc::new(berth_cluster::Reviews::new(settings, kubernetes.audiences.clone()));
    Some(Arc::new(ApiServerReviewer { reviews, runtime: Handle::current() }))
}

/// Asks the API server about evictions, if there is one.
pub(super) fn eviction_dry_run(config: &Config) -> Option<berth_admin::EvictionDryRun> {
    if config.cluster.api_server == ApiServer::Off {
        return None;
    }
    let settings = berth_cluster::Settings::new(config.cluster.api_server.clone(), config.node.name.clone());
    let check = Arc::new(berth_cluster::EvictionCheck::new(settings));
    let runtime = Handle::current();
    Some(Arc::new(move |pod: Arc<Pod>| {
        let (check, runtime) = (Arc::clone(&check), runtime.clone());
        // The request runs on the daemon's runtime, for the reason given at [`ApiServerReviewer`].
        Box::pin(async move {
            let mut task = AbortOnDrop(runtime.spawn(async move { check.outcome(&pod).await }));
            (&mut task.0).await.unwrap_or_else(|error| EvictionOutcome::Failed(error.to_string()))
        })
    }))
}

/// [`Reviewer`] by the API server. Requests run on the daemon's runtime: connections to the API server must not belong
/// to a worker of the admin API, which may end first.
struct ApiServerReviewer {
    reviews: Arc<berth_cluster::Reviews>,
    runtime: Handle,
}

impl ApiServerReviewer {
    fn spawn<T: Send + 'static>(
        &self,
        review: impl Future<Output = Result<T, berth_cluster::ReviewError>> + Send + 'static,
    ) -> BoxFuture<'static, Result<T, ReviewerError>> {
        let runtime = self.runtime.clone();
        Box::pin(async move {
            // Started at the first poll, since the caller limits concurrent reviews, and aborted if the caller drops
            // it.
            let mut task = AbortOnDrop(runtime.spawn(review));
            match (&mut task.0).await {
                Ok(answer) => answer.map_err(|error| ReviewerError(berth_cluster::error_chain(&error))),
                Err(error) => Err(ReviewerError(error.to_string())),
            }
        })
    }
}

/// A task that is aborted when its handle is dropped.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Reviewer for ApiServerReviewer {
    fn authenticate(&self, token: String) -> BoxFuture<'static, Result<Option<ClusterUser>, ReviewerError>> {
        let reviews = Arc::clone(&self.reviews);
        self.spawn(async move {
            let user = reviews.who(token).await?;
            Ok(user.map(|user| {
                let berth_cluster::User { name, uid, groups, extra } = user;
                ClusterUser { name, uid, groups, extra }
            }))
        })
    }

    fn authorize(
        &self,
        user: Arc<ClusterUser>,
        verb: &'static str,
        path: String,
    ) -> BoxFuture<'static, Result<bool, ReviewerError>> {
        let reviews = Arc::clone(&self.reviews);
        self.spawn(async move {
            let ClusterUser { name, uid, groups, extra } = (*user).clone();
            reviews.may(berth_cluster::User { name, uid, groups, extra }, verb, path).await
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    /// Counts reviews in flight, as the API server would see them.
    struct InFlight(Arc<AtomicUsize>);

    impl InFlight {
        fn start(count: &Arc<AtomicUsize>) -> Self {
            count.fetch_add(1, Ordering::SeqCst);
            Self(Arc::clone(count))
        }
    }

    impl Drop for InFlight {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_review_starts_at_the_first_poll_and_ends_when_it_is_dropped() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let settings = berth_cluster::Settings::new(ApiServer::Off, "n".into());
        let reviews = Arc::new(berth_cluster::Reviews::new(settings, Vec::new()));
        let reviewer = ApiServerReviewer { reviews, runtime: runtime.handle().clone() };
        let count = Arc::new(AtomicUsize::new(0));
        let review = || {
            let count = Arc::clone(&count);
            reviewer.spawn(async move {
                let _in_flight = InFlight::start(&count);
                std::future::pending::<Result<bool, berth_cluster::ReviewError>>().await
            })
        };
        let reviews: Vec<_> = (0..20).map(|_| review()).collect();
        runtime.block_on(async { tokio::task::yield_now().await });
        // A started task would be counted within this time.
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(count.load(Ordering::SeqCst), 0, "no review starts before it is polled");
        runtime.block_on(async {
            for review in reviews {
                let result = tokio::time::timeout(Duration::from_millis(20), review);
                assert!(result.await.is_err(), "no review is answered");
            }
        });
        let end = Instant::now() + Duration::from_secs(20);
        while count.load(Ordering::SeqCst) > 0 {
            assert!(Instant::now() < end, "dropped reviews are still running");
            std::thread::yield_now();
        }
    }
}
