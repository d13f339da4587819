//! `/node/nvml`: releasing the GPUs' driver for its upgrade or a reset, and using it again.

use crate::failure::{IntoFailure, OrFailure};
use crate::state::State;
use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{DriverRelease, Kind, Operation, ReleaseOrder, non_empty};
use berth_core::{Release, ReleaseError};
use berth_http::{Caller, Failure, HandlerResult, body};
use berth_kernel::ids::time::rfc3339;
use std::time::Duration;

/// Release the driver
///
/// Closes NVML, so that no process of the daemon keeps the driver's device files open: an unload of the driver, a reset of
/// a GPU and a change of its MIG mode fail while one does. All GPUs are unhealthy meanwhile, and nothing is granted.
/// Refused while a GPU is held, unless forced. Allocations stay. The daemon uses the driver again after
/// `resume`, when the time is over, when another driver is loaded, or when it is started again.
#[utoipa::path(post, path = "",
    request_body(content = ReleaseOrder, description = "The settings; optional"),
    responses(
        (status = 200, description = "The driver is released", body = DriverRelease),
        (status = 409, description = "A GPU is held, or a call of the driver does not return; the driver stays in use"),
        (status = 422, description = "An unknown key, or a value that is not allowed"),
    ))]
pub(crate) async fn release(
    caller: Caller,
    state: Data<State>,
    request: HttpRequest,
    payload: Payload,
) -> HandlerResult {
    let ReleaseOrder { reason, for_seconds, force } = body::json_or_default(&request, payload).await?;
    caller.check_reason(&reason)?;
    if for_seconds == 0 || for_seconds > ReleaseOrder::SECONDS_MAX {
        let rule = format!("forSeconds: 1 to {}, not {for_seconds}", ReleaseOrder::SECONDS_MAX);
        return Err(Failure::new(Kind::Invalid, rule));
    }
    let order = berth_core::ReleaseOrder {
        by: caller.name(),
        why: reason,
        time: Duration::from_secs(for_seconds.into()),
        force,
    };
    let (driver, kernel) = (state.driver.clone(), state.kernel.clone());
    // Logged there: the client may give up before the calls of the driver have ended.
    let release = move || {
        let released = driver.release_driver(&kernel, order)?;
        let Release { by, why, .. } = &released;
        tracing::info!(by, reason = why, for_seconds, force, "the driver was released");
        Ok::<_, ReleaseError>(released)
    };
    let released = tokio::task::spawn_blocking(release).await;
    let released = released.map_err(|error| Failure::new(Kind::Internal, error))?.or_failure()?;
    Ok(HttpResponse::Ok().json(release_of(released)))
}

/// Use the driver again
///
/// Ends a release of the driver; the GPUs are scanned at once, and healthy GPUs are granted again. Idempotent.
#[utoipa::path(post, path = "",
    responses((status = 204, description = "The driver is used again, or was never released")))]
pub(crate) async fn resume(caller: Caller, state: Data<State>) -> HandlerResult {
    if state.driver.resume() {
        tracing::info!(by = caller.name(), "the driver is used again");
    }
    Ok(HttpResponse::NoContent().finish())
}

/// A release as the API shows it.
pub(crate) fn release_of(release: Release) -> DriverRelease {
    DriverRelease {
        by: release.by,
        why: non_empty(&release.why),
        since: rfc3339(release.since_wall_ms),
        until: rfc3339(release.until_wall_ms),
    }
}

impl IntoFailure for ReleaseError {
    fn into_failure(self) -> Failure {
        match &self {
            Self::NotStarted => Failure::new(Kind::NotReady, &self).retry_after(2),
            Self::Held { .. } => Failure::new(Kind::Held, &self)
                .hint("drain the GPUs first, or release it with `force`; the allocations show which pods hold GPUs")
                .action(Operation::ListAllocations),
            Self::Failed(_) => Failure::new(Kind::State, &self)
                .hint("if `nvidia-smi` hangs too, the driver can only be unloaded by a reboot of the node"),
        }
    }
}
