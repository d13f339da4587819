//! `/stack`: the active stack; activate another one, return to that of the configuration file or to an earlier one, and
//! end the suspension of a policy.

use crate::failure::{IntoFailure, OrFailure};
use crate::resources::{pod_rules, stack_entries, trials};
use crate::state::State;
use actix_web::http::header::ETAG;
use actix_web::web::{Data, Path, Payload, Query};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{
    Activation, ActivationList, Faults, FileStack, HookRecord, Kind, NewStack, Operation, Record, Rollback,
    Stack, StackChange, StackEntry, StackPreview, StackReset, StackSource, gone, non_empty, rfc3339,
};
use berth_core::ActivateError;
use berth_core::policies::Preview;
use berth_http::{Caller, Failure, HandlerResult, body, etag};
use berth_kernel::node::command::{self, Command};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::node::revision::Revision;
use berth_kernel::policy::stack as kernel;
use std::ops::RangeInclusive;

/// Most attempts of a reset while the configuration file is read again.
const RESETS_MAX: u32 = 3;

/// Get the active stack
///
/// Returns its policies in the order of their calls, with the permissions and call statistics of each, and the stack
/// of the configuration file.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "The stack; its revision is the ETag", body = Stack,
        headers(("ETag" = String, description = "The ETag of this revision, for If-Match")))))]
pub(crate) async fn show(state: Data<State>) -> HttpResponse {
    answer(&state, &state.kernel.snapshot(), None)
}

/// Activate a stack
///
/// Every policy is called for this node's offers, and its answers are checked; only then the stack replaces the
/// active one as a whole. If a policy fails, nothing changes. The stack is kept over restarts and takes precedence
/// over the configuration file's until `DELETE /api/v1/stack/override`. Existing allocations stay. A dry run does the
/// same, but for the replacement.
#[utoipa::path(put, path = "",
    request_body(content = NewStack),
    responses(
        (status = 200, description = "The stack, active", body = Stack, headers(("ETag" = String, description = "The new revision"))),
        (status = 400, description = "A malformed body or If-Match"),
        (status = 403, description = "No trusted key signed one of its policies"),
        (status = 409, description = "The node's GPUNode names a stack, so this API cannot activate another one"),
        (status = 422, description = "An entry cannot be used, or its policy fails on this node"),
    ))]
pub(crate) async fn activate(
    caller: Caller,
    state: Data<State>,
    request: HttpRequest,
    query: Query<StackChange>,
    payload: Payload,
) -> HandlerResult {
    let expected = if_match(&request, &state.kernel.snapshot())?;
    let NewStack { entries, by, reason, break_glass_seconds } = body::json(&request, payload).await?;
    let origin = match break_glass_seconds {
        None => {
            check_gpu_node(&state, query.dry_run)?;
            kernel::StackOrigin::Api
        }
        Some(seconds) => {
            caller.mark_forced();
            break_glass_origin(&state, seconds, &reason)?
        }
    };
    let stack = command::NewStack {
        origin,
        failed: None,
        by: caller.author(by, &reason)?,
        why: reason,
        entries: stack_entries::resolve(&state.kernel.snapshot(), entries)?,
    };
    swap(&state, stack, expected, query.dry_run).await
}

/// Return to the configuration file's stack
///
/// If no stack was activated through this API, nothing changes. If the active stack is a break-glass, it ends, and the daemon
/// then activates the stack that was active before it.
#[utoipa::path(delete, path = "",
    responses(
        (status = 200, description = "The active stack: the file's, or a break-glass that has ended and is still active until the daemon replaces it", body = Stack, headers(("ETag" = String, description = "The new revision"))),
        (status = 400, description = "A malformed If-Match, or an unknown key in the query"),
        (status = 403, description = "No trusted key signed one of its policies"),
        (status = 409, description = "The file's stack cannot be used, or the node's GPUNode names a stack; the detail has the reason"),
        (status = 422, description = "A policy of the file's stack fails on this node, or a value is not allowed"),
    ))]
pub(crate) async fn reset(
    caller: Caller,
    state: Data<State>,
    request: HttpRequest,
    query: Query<StackReset>,
) -> HandlerResult {
    let expected = if_match(&request, &state.kernel.snapshot())?;
    let StackReset { by, reason, dry_run } = query.into_inner();
    let by = caller.author(by, &reason)?;
    let ledger = state.kernel.snapshot();
    if ledger.stack.is_of_file() {
        return Ok(answer(&state, &ledger, None));
    }
    if ledger.stack.is_break_glass() {
        if dry_run {
            return Ok(answer(&state, &ledger, None));
        }
        let revision = ledger.stack.revision;
        let command = Command::EndBreakGlass { revision }.expecting(expected.map(Revision::Stack));
        let applied = state.kernel.execute(command).await.or_failure()?;
        tracing::info!(by, reason, "the break-glass was ended");
        return Ok(answer(&state, &applied.snapshot, None));
    }
    check_gpu_node(&state, dry_run)?;
    let mut attempts_left = RESETS_MAX;
    loop {
        attempts_left -= 1;
        let file = state.policies.file_stack();
        if let Some(error) = &file.error {
            return Err(Failure::new(
                Kind::State,
                format!("the configuration file's stack cannot be used: {error}"),
            )
            .hint("fix the file's stack; the active one is unchanged"));
        }
        let (by, why, entries) = (by.clone(), reason.clone(), file.entries.clone());
        let stack = command::NewStack { origin: kernel::StackOrigin::File, failed: None, by, why, entries };
        if dry_run {
            return preview(&state, stack, expected).await;
        }
        match state.policies.activate(stack, expected).await {
            Err(ActivateError::FileChanged) if attempts_left > 0 => {}
            activated => return activated.or_failure().map(|ledger| activated_stack(&state, &ledger)),
        }
    }
}

/// How long a break-glass may last.
const BREAK_GLASS_SECONDS: RangeInclusive<u64> = 60..=86_400;

/// Refuses an activation, except a dry run, while the node's GPUNode names a stack: the daemon would activate that stack again at once.
fn check_gpu_node(state: &State, dry_run: bool) -> Result<(), Failure> {
    let facts = (state.facts)();
    let Some(policy) = facts.fleet_stack.filter(|_| !dry_run) else { return Ok(()) };
    let detail =
        format!("the node's GPUNode names the stack {policy}, so this API cannot activate another one");
    let hint = match facts.fleet.and_then(|fleet| fleet.stack_error) {
        None => format!(
            "change or remove `spec.stack` with `kubectl edit gpunode {}`, or activate another stack for a limited time with `berth policy \
             activate FILE --break-glass 2h --reason REASON`",
            facts.name
        ),
        Some(why) => format!(
            "the daemon cannot read the GPUNode at present ({why}); to activate another stack on this node meanwhile, run `berth policy activate FILE \
             --break-glass 2h --reason REASON`"
        ),
    };
    Err(Failure::new(Kind::State, detail).hint(hint))
}

/// The origin of a break-glass of so many seconds. Fails unless the GPUNode names a stack or a break-glass is active.
fn break_glass_origin(state: &State, seconds: u64, reason: &str) -> Result<kernel::StackOrigin, Failure> {
    if !BREAK_GLASS_SECONDS.contains(&seconds) {
        let (least, most) = (BREAK_GLASS_SECONDS.start(), BREAK_GLASS_SECONDS.end());
        return Err(Failure::new(
            Kind::Invalid,
            format!("breakGlassSeconds: the value must be from {least} to {most}, not {seconds}"),
        ));
    }
    if reason.is_empty() {
        let detail = "a break-glass needs a reason, which the GPUNode shows";
        return Err(Failure::new(Kind::Invalid, detail).hint("set `reason` (`--reason`)"));
    }
    let is_break_glass = state.kernel.snapshot().stack.is_break_glass();
    if (state.facts)().fleet_stack.is_none() && !is_break_glass {
        let detail = "the node's GPUNode names no stack, so a break-glass is not needed";
        return Err(Failure::new(Kind::State, detail)
            .hint("activate the stack without `breakGlassSeconds` (`--break-glass`)"));
    }
    let until_wall_ms = state.kernel.now().wall_ms.saturating_add(seconds.saturating_mul(1000));
    Ok(kernel::StackOrigin::BreakGlass { until_wall_ms })
}

async fn swap(
    state: &State,
    stack: command::NewStack,
    expected: Option<u64>,
    dry_run: bool,
) -> HandlerResult {
    if dry_run {
        return preview(state, stack, expected).await;
    }
    let ledger = state.policies.activate(stack, expected).await.or_failure()?;
    Ok(activated_stack(state, &ledger))
}

/// Logs an activation, and answers with the stack.
fn activated_stack(state: &State, ledger: &Ledger) -> HttpResponse {
    let labels: Vec<_> = ledger.stack.entries.iter().map(kernel::StackEntry::label).collect();
    tracing::info!(
        revision = ledger.stack.revision,
        stack = labels.join(" "),
        by = ledger.stack.by,
        why = ledger.stack.why,
        "a stack was activated"
    );
    answer(state, ledger, None)
}

/// Answers with the active stack, and what this one would change.
async fn preview(state: &State, stack: command::NewStack, expected: Option<u64>) -> HandlerResult {
    let Preview { node, after, mut warnings } = state.policies.preview(stack, expected).await.or_failure()?;
    warnings.extend(pod_rules::warnings(state, &after, &after.stack.entries));
    let preview = StackPreview {
        source: StackSource::of(&after.stack),
        entries: after.stack.entries.iter().map(|e| StackEntry::of(&after, e, None)).collect(),
        offers: trials::offers(&node, &after),
        resources: trials::resources(&node, &after),
        warnings,
    };
    Ok(answer(state, &node, Some(preview)))
}

/// The revision that the active stack must have; `None` if any will do.
fn if_match(request: &HttpRequest, ledger: &Ledger) -> Result<Option<u64>, Failure> {
    let condition = etag::if_match(request)?;
    let revision = ledger.stack.revision;
    match condition.names(&format!("\"{revision}\"")) {
        _ if condition.is_any() => Ok(None),
        true => Ok(Some(revision)),
        false => Err(Refusal::StackChanged { revision }.into_failure()),
    }
}

fn answer(state: &State, ledger: &Ledger, preview: Option<StackPreview>) -> HttpResponse {
    let stack = &ledger.stack;
    let entries = stack.entries.iter().enumerate();
    let file = state.policies.file_stack();
    let shown = Stack {
        revision: stack.revision,
        source: StackSource::of(stack),
        by: stack.by.clone(),
        why: non_empty(&stack.why),
        since: (stack.since_wall_ms > 0).then(|| rfc3339(stack.since_wall_ms)),
        until: match stack.origin {
            kernel::StackOrigin::BreakGlass { until_wall_ms } if until_wall_ms > 0 => {
                Some(rfc3339(until_wall_ms))
            }
            _ => None,
        },
        entries: entries
            .map(|(place, e)| StackEntry::of(ledger, e, Some(record(&state.kernel.entry_stats(place, e)))))
            .collect(),
        warnings: pod_rules::of_active_stack(state, ledger),
        file_stack: FileStack {
            shadowed: !stack.is_of_file(),
            error: file.error.clone(),
            entries: file.entries.iter().map(|e| StackEntry::of(ledger, e, None)).collect(),
        },
        preview,
    };
    HttpResponse::Ok().insert_header((ETAG, format!("\"{}\"", stack.revision))).json(shown)
}

/// The call statistics of a stack entry.
fn record(calls: &berth_core::stack::EntryStats) -> Record {
    let by_kind = calls.faults().into_iter();
    let hooks = || calls.hooks.iter();
    Record {
        calls: hooks().map(|(hook, stats)| ((*hook).into(), stats.calls)).collect(),
        hooks: hooks().map(|(hook, stats)| ((*hook).into(), hook_record(stats))).collect(),
        faults: Faults {
            by_kind: by_kind.map(|(kind, n)| ((&kind).into(), n)).collect(),
            in_a_row: calls.most_in_a_row(),
            last: calls.last.clone(),
        },
        suspended: calls.suspended,
    }
}

fn hook_record(stats: &berth_core::stack::CallStats) -> HookRecord {
    let percentile = |percent| stats.latencies.percentile_us(percent).unwrap_or(0);
    HookRecord {
        calls: stats.calls,
        passes: stats.passes,
        faults: stats.failed(),
        p50_microseconds: percentile(50),
        p99_microseconds: percentile(99),
        worst_microseconds: stats.latencies.worst_us,
    }
}

/// List the newest activations
///
/// Lists the active stack and up to 15 before it, with the author, time and reason of each. They outlive a restart. A
/// version that only earlier stacks name may be deleted; `gone` is set then.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "Newest first", body = ActivationList)))]
pub(crate) async fn history(state: Data<State>, request: HttpRequest) -> HandlerResult {
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
/// its own, and takes precedence over the configuration file's. A revision of the configuration file gives the file its
/// place back instead, if the file still has that stack. Rolling back twice without a revision returns to the initial
/// stack. A dry run does the same, but for the activation.
#[utoipa::path(post, path = "",
    request_body(content = Rollback, description = "The revision; optional"),
    responses(
        (status = 200, description = "The stack, active", body = Stack, headers(("ETag" = String, description = "The new revision"))),
        (status = 400, description = "A malformed body or If-Match"),
        (status = 403, description = "No trusted key signed one of its policies"),
        (status = 404, description = "The history has no such revision"),
        (status = 409, description = "The revision is active, there is no earlier one, versions of it were deleted, or the node's GPUNode names a stack; the detail has the reason"),
        (status = 422, description = "An unknown key, or a policy of it fails on this node"),
    ))]
pub(crate) async fn roll_back(
    caller: Caller,
    state: Data<State>,
    request: HttpRequest,
    query: Query<StackChange>,
    payload: Payload,
) -> HandlerResult {
    let expected = if_match(&request, &state.kernel.snapshot())?;
    let Rollback { revision, by, reason } = body::json_or_default(&request, payload).await?;
    let by = caller.author(by, &reason)?;
    check_gpu_node(&state, query.dry_run)?;
    let ledger = state.kernel.snapshot();
    let active = ledger.stack.revision;
    let file = state.policies.file_stack();
    // The initial stack and those of the file that it still has: with one of them the file decides again.
    let is_of_file =
        |stack: &kernel::Stack| stack.is_of_file() && file.error.is_none() && stack.entries == file.entries;
    if revision == Some(active) {
        return Err(Failure::new(Kind::State, format!("revision {active} is active already")));
    }
    let wanted = match revision {
        Some(revision) => ledger.past_stacks.get(&revision).ok_or_else(|| {
            Failure::new(Kind::UnknownRevision, format!("the history has no revision {revision}"))
                .hint("list the earlier stacks")
                .action(Operation::ListActivations)
        })?,
        None => {
            let before = ledger.past_stacks.values().next_back();
            before.filter(|before| before.revision > 0 || is_of_file(before)).ok_or_else(|| {
                let detail =
                    format!("nothing to roll back to: no stack was activated before revision {active}");
                let failure = Failure::new(Kind::State, detail);
                if before.is_none() {
                    return failure;
                }
                failure.hint("revision 0 is the node without policies; name it to remove them all")
            })?
        }
    };
    let gone = gone(&ledger, wanted);
    if !gone.is_empty() {
        let detail = format!("versions of revision {} were deleted: {}", wanted.revision, gone.join(", "));
        return Err(Failure::new(Kind::State, detail)
            .hint("the active stack is unchanged; upload the modules again, or roll back to another revision")
            .action(Operation::UploadPolicy));
    }
    let why = if reason.is_empty() { format!("rolled back to revision {}", wanted.revision) } else { reason };
    let origin = if is_of_file(wanted) { kernel::StackOrigin::File } else { kernel::StackOrigin::Api };
    let stack = command::NewStack { origin, failed: None, by, why, entries: wanted.entries.clone() };
    // The stack before the active one must not change between this read and the activation.
    let expected = expected.or_else(|| revision.is_none().then_some(active));
    swap(&state, stack, expected, query.dry_run).await
}

/// End the suspension of a policy
///
/// The entry of the active stack is called again, without another activation; its counts stay. An entry that is not
/// suspended is not changed.
#[utoipa::path(delete, path = "",
    responses(
        (status = 200, description = "The stack", body = Stack, headers(("ETag" = String, description = "Its revision"))),
        (status = 400, description = "A malformed index or If-Match"),
        (status = 404, description = "The active stack has no such entry"),
    ))]
pub(crate) async fn end_suspension(
    state: Data<State>,
    path: Path<usize>,
    request: HttpRequest,
) -> HandlerResult {
    let place = path.into_inner();
    let ledger = state.kernel.snapshot();
    let expected = if_match(&request, &ledger)?.unwrap_or(ledger.stack.revision);
    let entries = ledger.stack.entries.len();
    if place >= entries && expected == ledger.stack.revision {
        let detail = format!("the active stack has {entries} entries, and none with the index {place}");
        return Err(Failure::new(Kind::UnknownEntry, detail).hint("indices start at 0"));
    }
    state.kernel.unsuspend(place, expected).await.or_failure()?;
    Ok(answer(&state, &state.kernel.snapshot(), None))
}
