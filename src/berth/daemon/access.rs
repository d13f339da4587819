//! Access to the admin API: the settings of its server, and reviews by the API server.

use crate::config::Config;
use berth_cluster::ApiServer;
use berth_http::{ReviewError, Reviewer, User};
use futures_util::future::BoxFuture;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// The settings of the admin API.
pub(super) fn settings(config: &Config) -> berth_http::Settings {
    berth_http::Settings {
        listen: config.admin_listen,
        health_listen: config.health_listen,
        token_file: config.token_file.clone(),
        access: config.admin.clone(),
        reviewer: reviewer(config),
        tls_look: berth_http::TLS_LOOK,
    }
}

/// The reviews of the API server, if the configuration has them and there is an API server.
fn reviewer(config: &Config) -> Option<Arc<dyn Reviewer>> {
    let wanted = config.admin.kubernetes.as_ref()?;
    if config.api_server == ApiServer::Off {
        tracing::warn!(
            "admin.kubernetes is set, but there is no API server (--kubeconfig, or a pod's service account): only the \
             daemon's own tokens and certificates open the admin API"
        );
        return None;
    }
    let settings = berth_cluster::Settings::new(config.api_server.clone(), config.node_name.clone());
    let reviews = Arc::new(berth_cluster::Reviews::new(settings, wanted.audiences.clone()));
    Some(Arc::new(Asking { reviews, runtime: Handle::current() }))
}

/// The port of `http` on `cluster`. Requests run on the daemon's own runtime: connections to the API server must not belong
/// to a worker of the admin API, which may end first.
struct Asking {
    reviews: Arc<berth_cluster::Reviews>,
    runtime: Handle,
}

impl Asking {
    fn spawn<T: Send + 'static>(
        &self,
        ask: impl Future<Output = Result<T, berth_cluster::ReviewError>> + Send + 'static,
    ) -> BoxFuture<'static, Result<T, ReviewError>> {
        let runtime = self.runtime.clone();
        Box::pin(async move {
            // Started when first polled, since the caller limits how many are polled; it ends when the caller drops it.
            let mut asked = Ended(runtime.spawn(ask));
            match (&mut asked.0).await {
                Ok(answer) => answer.map_err(|error| ReviewError(berth_cluster::error_chain(&error))),
                Err(error) => Err(ReviewError(error.to_string())),
            }
        })
    }
}

/// A task that is aborted when its handle is dropped.
struct Ended<T>(JoinHandle<T>);

impl<T> Drop for Ended<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Reviewer for Asking {
    fn who(&self, token: String) -> BoxFuture<'static, Result<Option<User>, ReviewError>> {
        let reviews = Arc::clone(&self.reviews);
        self.spawn(async move {
            let found = reviews.who(token).await?;
            Ok(found.map(|berth_cluster::User { name, uid, groups, extra }| User {
                name,
                uid,
                groups,
                extra,
            }))
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
            reviews.may(berth_cluster::User { name, uid, groups, extra }, verb, path).await
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    /// Counts questions under way, as the API server would see them.
    struct Under(Arc<AtomicUsize>);

    impl Under {
        fn way(count: &Arc<AtomicUsize>) -> Self {
            count.fetch_add(1, Ordering::SeqCst);
            Self(Arc::clone(count))
        }
    }

    impl Drop for Under {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_question_begins_when_somebody_waits_for_it_and_ends_with_them() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let settings = berth_cluster::Settings::new(ApiServer::Off, "n".into());
        let reviews = Arc::new(berth_cluster::Reviews::new(settings, Vec::new()));
        let asking = Asking { reviews, runtime: runtime.handle().clone() };
        let count = Arc::new(AtomicUsize::new(0));
        let question = || {
            let count = Arc::clone(&count);
            asking.spawn(async move {
                let _under = Under::way(&count);
                std::future::pending::<Result<bool, berth_cluster::ReviewError>>().await
            })
        };
        let waiting: Vec<_> = (0..20).map(|_| question()).collect();
        runtime.block_on(async { tokio::task::yield_now().await });
        // A task that was begun shows within this time; one that was not never does.
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(count.load(Ordering::SeqCst), 0, "it was asked before anybody waited");
        runtime.block_on(async {
            for review in waiting {
                let late = tokio::time::timeout(Duration::from_millis(20), review);
                assert!(late.await.is_err(), "nobody answers");
            }
        });
        let end = Instant::now() + Duration::from_secs(20);
        while count.load(Ordering::SeqCst) > 0 {
            assert!(Instant::now() < end, "questions that nobody waits for go on");
            std::thread::yield_now();
        }
    }
}
