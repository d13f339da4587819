//! `/stack`: the active stack; activate another one, or return to that of the configuration file.

use crate::failure::IntoFailure;
use crate::resources::author;
use crate::resources::call_records;
use crate::resources::stack_entries;
use crate::state::State;
use actix_web::http::header::ETAG;
use actix_web::{HttpRequest, HttpResponse, web};
use berth_api::Kind;
use berth_api::{FileStack, NewStack, Stack, StackEntry, StackSource, Word, rfc3339};
use berth_http::Failure;
use berth_http::body;
use berth_http::caller::Caller;
use berth_http::etag;
use berth_kernel::command;
use berth_kernel::ledger::Ledger;
use berth_kernel::refusal::Refusal;
use berth_kernel::stack as kernel;

/// Get the active stack
///
/// Returns its policies in the order of their calls, with the permissions and call statistics of each, and the stack
/// of the configuration file.
#[utoipa::path(get, path = "/api/v1/stack", tag = "stack", operation_id = "getStack",
    responses((status = 200, description = "The stack; its revision is the ETag", body = Stack,
        headers(("ETag" = String, description = "The ETag of this revision, for If-Match")))))]
pub(crate) async fn show(state: web::Data<State>) -> HttpResponse {
    answer(&state, &state.kernel.snapshot())
}

/// Activate a stack
///
/// Every policy is called for this node's offers, and its answers are checked; only then the stack replaces the
/// active one as a whole. If a policy fails, nothing changes. The stack is kept over restarts and takes precedence
/// over the configuration file's until `DELETE /api/v1/stack/override`. Existing allocations stay.
#[utoipa::path(put, path = "/api/v1/stack", tag = "stack", operation_id = "activateStack",
    params(("If-Match" = Option<String>, Header, description = "Only if the active stack is still at this revision", example = "\"3\"")),
    request_body(content = NewStack),
    responses(
        (status = 200, description = "The stack, active", body = Stack, headers(("ETag" = String, description = "The new revision"))),
        (status = 400, description = "A malformed body or If-Match"),
        (status = 403, description = "No trusted key signed one of its policies"),
        (status = 408, description = "The body was not received in time"),
        (status = 412, description = "Another client activated a stack first"),
        (status = 413, description = "The body is too large"),
        (status = 415, description = "The body is not application/json"),
        (status = 422, description = "An entry cannot be used, or its policy fails on this node"),
    ))]
pub(crate) async fn activate(
    caller: Caller,
    state: web::Data<State>,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, Failure> {
    let expected = if_match(&request, &state.kernel.snapshot())?;
    let NewStack { entries, by, reason } = body::json(&request, payload).await?;
    let stack = command::NewStack {
        from_api: true,
        by: author::checked(&caller, by, &reason)?,
        why: reason,
        entries: stack_entries::resolve(&state.kernel.snapshot(), entries)?,
    };
    swap(&state, stack, expected).await
}

/// Return to the configuration file's stack
///
/// If no stack was activated through this API, nothing changes.
#[utoipa::path(delete, path = "/api/v1/stack/override", tag = "stack", operation_id = "resetStack",
    params(Word, ("If-Match" = Option<String>, Header, description = "Only if the active stack is still at this revision", example = "\"3\"")),
    responses(
        (status = 200, description = "The file's stack, which is active now", body = Stack, headers(("ETag" = String, description = "The new revision"))),
        (status = 400, description = "A malformed If-Match, or an unknown key in the query"),
        (status = 403, description = "No trusted key signed one of its policies"),
        (status = 409, description = "The file's stack cannot be used; the detail has the reason"),
        (status = 412, description = "Another client activated a stack first"),
        (status = 422, description = "A policy of the file's stack fails on this node, or a value is not allowed"),
    ))]
pub(crate) async fn reset(
    caller: Caller,
    state: web::Data<State>,
    request: HttpRequest,
    said: web::Query<Word>,
) -> Result<HttpResponse, Failure> {
    let expected = if_match(&request, &state.kernel.snapshot())?;
    let Word { by, reason } = said.into_inner();
    let by = author::checked(&caller, by, &reason)?;
    let ledger = state.kernel.snapshot();
    if !ledger.stack.from_api {
        return Ok(answer(&state, &ledger));
    }
    let file = (state.facts)().file_stack;
    if let Some(trouble) = file.trouble {
        return Err(Failure::new(
            Kind::State,
            format!("the configuration file's stack cannot be used: {trouble}"),
        )
        .hint("fix the file's stack; the active one is unchanged"));
    }
    let stack = command::NewStack { from_api: false, by, why: reason, entries: file.entries };
    swap(&state, stack, expected).await
}

pub(crate) async fn swap(
    state: &State,
    stack: command::NewStack,
    expected: Option<u64>,
) -> Result<HttpResponse, Failure> {
    let ledger = state.kernel.activate(stack, expected).await.map_err(IntoFailure::into_failure)?;
    let labels: Vec<_> = ledger.stack.entries.iter().map(kernel::StackEntry::label).collect();
    tracing::info!(
        revision = ledger.stack.revision,
        stack = labels.join(" "),
        by = ledger.stack.by,
        why = ledger.stack.why,
        "a stack was activated"
    );
    Ok(answer(state, &ledger))
}

/// The revision that the active stack must have; `None` if any will do.
pub(crate) fn if_match(request: &HttpRequest, ledger: &Ledger) -> Result<Option<u64>, Failure> {
    let condition = etag::if_match(request)?;
    let revision = ledger.stack.revision;
    match condition.names(&format!("\"{revision}\"")) {
        _ if condition.is_any() => Ok(None),
        true => Ok(Some(revision)),
        false => Err(Refusal::StackMoved { revision }.into_failure()),
    }
}

pub(crate) fn answer(state: &State, ledger: &Ledger) -> HttpResponse {
    let stack = &ledger.stack;
    let version = |e: &kernel::StackEntry| ledger.policies.get(&e.digest).map(|v| v.version.clone());
    let entries = stack.entries.iter().enumerate();
    let file = (state.facts)().file_stack;
    let shown = Stack {
        revision: stack.revision,
        source: StackSource::of(stack),
        by: stack.by.clone(),
        why: (!stack.why.is_empty()).then(|| stack.why.clone()),
        since: (stack.since_wall_ms > 0).then(|| rfc3339(stack.since_wall_ms)),
        entries: entries
            .map(|(place, e)| {
                StackEntry::of(e, version(e), Some(call_records::record(&state.kernel.entry_stats(place, e))))
            })
            .collect(),
        warnings: state.kernel.offer_notes().reasons(),
        file_stack: FileStack {
            shadowed: stack.from_api,
            trouble: file.trouble,
            entries: file.entries.iter().map(|e| StackEntry::of(e, version(e), None)).collect(),
        },
    };
    HttpResponse::Ok().insert_header((ETAG, format!("\"{}\"", stack.revision))).json(shown)
}
