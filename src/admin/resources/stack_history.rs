//! `/stack/history`, `/stack/rollback` and `/stack/entries/{place}/suspension`: earlier stacks, rolling back, and
//! ending the suspension of a policy.

use crate::failure::IntoFailure;
use crate::resources::author;
use crate::resources::stack::{answer, if_match, swap};
use crate::state::State;
use actix_web::{HttpRequest, HttpResponse, web};
use berth_api::{Activation, ActivationList, Rollback, Stack, gone};
use berth_api::{Kind, Operation};
use berth_http::Failure;
use berth_http::body;
use berth_http::caller::Caller;
use berth_http::etag;
use berth_kernel::command;

/// List the newest activations
///
/// Lists the active stack and up to 15 before it, with the author, time and reason of each. They outlive a restart. A
/// version that only earlier stacks name may be deleted; `gone` is set then.
#[utoipa::path(get, path = "/api/v1/stack/history", tag = "stack", operation_id = "listActivations",
    responses((status = 200, description = "Newest first", body = ActivationList)))]
pub(crate) async fn list(state: web::Data<State>, request: HttpRequest) -> Result<HttpResponse, Failure> {
    let ledger = state.kernel.snapshot();
    let past = ledger.past_stacks.values().rev();
    let items = std::iter::once(&ledger.stack).chain(past);
    let items = items.map(|stack| Activation::of(&ledger, stack)).collect();
    etag::fresh(&request, &ActivationList { items })
}

/// Roll back to an earlier activation
///
/// Activates the stack of a revision of the history again, or the one before the active one, with the checks of any
/// activation: every policy is called on this node, and nothing changes if one fails. The new stack has a revision of
/// its own, and takes precedence over the configuration file's. Rolling back twice without a revision returns to the
/// initial stack.
#[utoipa::path(post, path = "/api/v1/stack/rollback", tag = "stack", operation_id = "rollBackStack",
    params(("If-Match" = Option<String>, Header, description = "Only if the active stack is still at this revision", example = "\"3\"")),
    request_body(content = Rollback, description = "The revision; optional"),
    responses(
        (status = 200, description = "The stack, active", body = Stack, headers(("ETag" = String, description = "The new revision"))),
        (status = 400, description = "A malformed body or If-Match"),
        (status = 403, description = "No trusted key signed one of its policies"),
        (status = 404, description = "The history has no such revision"),
        (status = 408, description = "The body was not received in time"),
        (status = 409, description = "The revision is active, there is no earlier one, or versions of it were deleted; the detail names them"),
        (status = 412, description = "Another client activated a stack first"),
        (status = 413, description = "The body is too large"),
        (status = 415, description = "The body is not application/json"),
        (status = 422, description = "An unknown key, or a policy of it fails on this node"),
    ))]
pub(crate) async fn roll_back(
    caller: Caller,
    state: web::Data<State>,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, Failure> {
    let expected = if_match(&request, &state.kernel.snapshot())?;
    let Rollback { revision, by, reason } = body::json_or_default(&request, payload).await?;
    let by = author::checked(&caller, by, &reason)?;
    let ledger = state.kernel.snapshot();
    let active = ledger.stack.revision;
    if revision == Some(active) {
        return Err(Failure::new(Kind::State, format!("revision {active} is active already")));
    }
    let wanted = match revision {
        Some(revision) => ledger.past_stacks.get(&revision).ok_or_else(|| {
            Failure::new(Kind::UnknownRevision, format!("the history has no revision {revision}"))
                .hint("list the earlier stacks")
                .action(Operation::ListActivations)
        })?,
        None => ledger.past_stacks.values().next_back().ok_or_else(|| {
            Failure::new(Kind::State, format!("nothing was active before revision {active}"))
        })?,
    };
    let gone = gone(&ledger, wanted);
    if !gone.is_empty() {
        let detail = format!("versions of revision {} were deleted: {}", wanted.revision, gone.join(", "));
        return Err(Failure::new(Kind::State, detail)
            .hint("the active stack is unchanged; upload the modules again, or roll back to another revision")
            .action(Operation::UploadPolicy));
    }
    let why = if reason.is_empty() { format!("rolled back to revision {}", wanted.revision) } else { reason };
    let stack = command::NewStack { from_api: true, by, why, entries: wanted.entries.clone() };
    // The stack before the active one must not change between this read and the activation.
    let expected = expected.or_else(|| revision.is_none().then_some(active));
    swap(&state, stack, expected).await
}

/// End the suspension of a policy
///
/// The entry of the active stack is called again, without another activation; its counts stay. An entry that is not
/// suspended is not changed.
#[utoipa::path(delete, path = "/api/v1/stack/entries/{place}/suspension", tag = "stack", operation_id = "endSuspension",
    params(
        ("place" = usize, Path, description = "Index of the entry in the active stack, from 0", example = 0),
        ("If-Match" = Option<String>, Header, description = "Only if the active stack is still at this revision", example = "\"3\""),
    ),
    responses(
        (status = 200, description = "The stack", body = Stack, headers(("ETag" = String, description = "Its revision"))),
        (status = 400, description = "A malformed index or If-Match"),
        (status = 404, description = "The active stack has no such entry"),
        (status = 412, description = "Another client activated a stack first"),
    ))]
pub(crate) async fn end_suspension(
    state: web::Data<State>,
    path: web::Path<usize>,
    request: HttpRequest,
) -> Result<HttpResponse, Failure> {
    let place = path.into_inner();
    let ledger = state.kernel.snapshot();
    let expected = if_match(&request, &ledger)?.unwrap_or(ledger.stack.revision);
    let entries = ledger.stack.entries.len();
    if place >= entries && expected == ledger.stack.revision {
        let detail = format!("the active stack has {entries} entries, and none with the index {place}");
        return Err(Failure::new(Kind::UnknownEntry, detail).hint("indices start at 0"));
    }
    state.kernel.unsuspend(place, expected).await.map_err(IntoFailure::into_failure)?;
    Ok(answer(&state, &state.kernel.snapshot()))
}
