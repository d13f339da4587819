//! `/events`: the changes of the node as server-sent events (`text/event-stream` of the HTML standard).

mod stream;

use crate::event_feed::{
    EventId, Following, Ring, STREAMS_MAX, frame, node_event, policy_event, refused_event, transition_event,
};
use crate::resources::gpus::gpu_of_query;
use crate::state::State;
use actix_web::http::Method;
use actix_web::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use actix_web::web::{self, Data};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{EventKind, Kind};
use berth_core::transition_stream::Batches;
use berth_http::{Caller, Failure, HandlerResult, IDENTITY, excerpt};
use berth_kernel::node::ledger::Ledger;
use futures_util::{FutureExt as _, stream as futures_stream};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use stream::{EventFilter, EventStream, IsAdmitted, Start, StreamTimes};
use utoipa::IntoParams;

/// The `Retry-After` of a request for one stream too many, seconds.
const STREAMS_RETRY_S: u64 = 10;
/// The content type of a stream.
pub(crate) const EVENT_STREAM: &str = "text/event-stream";
/// The header in which a client that reconnects sends the id of its last event.
const LAST_EVENT_ID: &str = "last-event-id";

/// Adds the changes of each batch to the feed; returns when the batches end.
pub(crate) async fn run(state: Data<State>, mut batches: Batches) {
    while let Some(batch) = batches.recv().await {
        let (ledger, now) = (&batch.ledger, batch.at);
        for transition in &batch.transitions {
            if let Some(event) = transition_event(transition, ledger, now) {
                state.feed.add(&event, now);
            }
        }
        for transition in &batch.policies {
            state.feed.add(&policy_event(transition, ledger, now), now);
        }
        for request in &batch.refused {
            state.feed.add(&refused_event(request, ledger), now);
        }
    }
    state.feed.ring.close("the daemon's ledger has ended");
}

/// The filter of a stream, and the event that it starts after.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Query {
    /// Only of these kinds, separated by commas.
    #[param(example = "gpuHealth,gpuDrained")]
    kind: Option<String>,
    /// Only about this GPU, by UUID.
    #[param(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    gpu: Option<String>,
    /// Only those after the event with this id, for clients that cannot send the header; `0`: all that are kept.
    #[param(example = "0")]
    since: Option<String>,
    /// Whether the stream stays open for new events once all kept ones were sent; `true` if not given.
    #[param(example = false)]
    follow: Option<bool>,
}

/// Stream the changes of the node
///
/// Server-sent events. The first one, `here`, gives the present state in short; then each change is one event, with an
/// `Event` as its data. A client that reconnects sends the id of its last event as `Last-Event-ID` (or `since`) and
/// gets the events that it missed. If they are no longer kept (1024 are, until the daemon ends), it gets `missed` and has to
/// read the state again. After 15 seconds without an event the stream sends a comment and the client's present id.
/// A stream ends with `end` and the reason: the daemon stops, the client reads too slowly, or the stream is an hour old; then
/// reconnect. It also ends within some seconds after its caller is no longer authorized. At most 32 streams are open
/// at the same time. When all are in use, a new stream replaces the oldest one of the caller with the most streams,
/// if the new caller has fewer. `follow=false` does not count.
#[utoipa::path(get, path = "",
    params(("Last-Event-ID" = Option<String>, Header, description = "The id of the last event that the client got; takes precedence over `since`", example = "19a8c3f2b10-17")),
    responses(
        (status = 200, description = "Events, until the stream ends", body = String, content_type = "text/event-stream"),
        (status = 400, description = "A malformed query or Last-Event-ID, or an unknown key in the query"),
    ))]
pub(crate) async fn follow(
    caller: Caller,
    state: Data<State>,
    request: HttpRequest,
    query: web::Query<Query>,
) -> HandlerResult {
    let filter = filter(&state.kernel.snapshot(), &query)?;
    let ring = &state.feed.ring;
    let (since, is_gone) = since(ring, &request, &query)?;
    let mut response = HttpResponse::Ok();
    // A middleware that compresses would buffer frames.
    response.insert_header((CONTENT_ENCODING, IDENTITY));
    response.insert_header((CONTENT_TYPE, EVENT_STREAM));
    response.insert_header(("x-accel-buffering", "no"));
    // HEAD needs no permit.
    if request.method() == Method::HEAD {
        return Ok(response.streaming(futures_stream::empty::<Result<web::Bytes, Infallible>>()));
    }
    let follow = query.follow.unwrap_or(true);
    let permit = match follow {
        true => Some(state.feed.permit(&caller.key()).await.ok_or_else(too_many_streams)?),
        false => None,
    };
    // Read before the ledger: a change in between is an event, and part of `here` too.
    let newest = ring.newest();
    let (ledger, now) = (state.kernel.snapshot(), state.kernel.now());
    let frame_of = |kind, after, words| frame(ring.id(after), &node_event(kind, words, &ledger, now));
    let after = since.unwrap_or(newest);
    // A client that follows the standard reconnects after three seconds.
    let mut first = format!("retry: 3000\n{}", frame_of(EventKind::Here, after, summary(&ledger)));
    if is_gone {
        let words =
            "the events after that id are no longer kept, or the daemon was restarted: read the state again";
        first += &frame_of(EventKind::Missed, after, words.to_owned());
    }
    let kernel = state.kernel.clone();
    let generation = Box::new(move || kernel.snapshot().generation);
    let (request, handler_state) = (request.clone(), state.clone());
    let is_admitted: IsAdmitted = Box::new(move || {
        let (request, state) = (request.clone(), handler_state.clone());
        async move { state.http.access.is_still_authorized(&request).await }.boxed_local()
    });
    let start = Start { after, follow, first, generation, is_admitted };
    let events = EventStream::new(Arc::clone(ring), filter, start, permit, StreamTimes::default());
    Ok(response.streaming(events.into_stream()))
}

fn too_many_streams() -> Failure {
    Failure::new(Kind::Streams, format!("{STREAMS_MAX} event streams are open, the maximum"))
        .retry_after(STREAMS_RETRY_S)
        .hint("close pages and `berth events` commands that are not in use, or request with ?follow=false")
}

/// The number of the event that a stream starts after, and whether events after the given id are no longer kept. `None`:
/// it starts with new events.
fn since(ring: &Ring, request: &HttpRequest, query: &Query) -> Result<(Option<u64>, bool), Failure> {
    let mut given = request.headers().get_all(LAST_EVENT_ID);
    let (first, second) = (given.next(), given.next());
    let (text, kind, name) = match first {
        Some(value) => (value.to_str().ok(), Kind::Header, "Last-Event-ID"),
        None => match query.since.as_deref() {
            None => return Ok((None, false)),
            Some("0") => return Ok((Some(ring.oldest()), false)),
            Some(text) => (Some(text), Kind::Query, "since"),
        },
    };
    let id = text.filter(|_| second.is_none()).and_then(EventId::parse).ok_or_else(|| {
        Failure::new(kind, format!("{name}: not the id of an event, such as {}", ring.id(ring.newest())))
            .hint("omit it to get only new events")
    })?;
    let known = id.start == ring.id(0).start && id.seq <= ring.newest();
    let is_gone = !known || matches!(ring.following(id.seq, 0), Following::Gone);
    Ok((Some(id.seq).filter(|_| !is_gone), is_gone))
}

fn filter(ledger: &Ledger, query: &Query) -> Result<EventFilter, Failure> {
    let bad = |rule: String| Failure::new(Kind::Query, rule);
    let kinds = query.kind.as_deref().map(|text| {
        let kinds = text.split(',').map(str::trim).map(|name| {
            let rule = || format!("kind: there are no events of kind {:?}", excerpt(name));
            EventKind::parse(name).ok_or_else(|| bad(rule()))
        });
        kinds.collect::<Result<BTreeSet<_>, _>>()
    });
    let gpu = query.gpu.as_deref().map(|gpu| gpu_of_query(ledger, gpu)).transpose()?;
    Ok(EventFilter { kinds: kinds.transpose()?, gpu: gpu.map(|gpu| gpu.to_string()) })
}

/// The words of `here`.
fn summary(ledger: &Ledger) -> String {
    format!("{} GPUs, {} allocations, stack {}", ledger.gpu_count(), ledger.live.len(), ledger.stack.revision)
}
