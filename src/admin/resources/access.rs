//! `/access`: who the caller is, and what it may do.

use actix_web::HttpRequest;
use berth_api::{Access, AccessRight};
use berth_http::{Caller, HandlerResult, Right, etag};

/// Get the caller's access
///
/// Returns who the caller is for the daemon and what it may do, so that a client can leave out what would be refused. A user
/// of the cluster has no right here: the API server decides about each of its requests.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "The caller and its right", body = Access)))]
pub(crate) async fn show(caller: Caller, request: HttpRequest) -> HandlerResult {
    let right = match caller.right() {
        Some(Right::Read) => AccessRight::Read,
        Some(Right::Change) => AccessRight::Change,
        None => AccessRight::Reviewed,
    };
    etag::fresh(&request, &Access { caller: caller.key(), right })
}
