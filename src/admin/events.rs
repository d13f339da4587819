//! `/events`: what changes on the node, as it changes, by server-sent events (the HTML standard's
//! `text/event-stream`).

pub(super) mod feed;
mod names;
mod news;
mod people;
mod places;
mod reader;
mod recent;

use super::gpus::gpu_of_query;
use super::state::State;
use actix_web::http::Method;
use actix_web::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use actix_web::{HttpRequest, HttpResponse, web};
use berth_api::EventKind;
use berth_api::Kind;
use berth_core::admission::Standings;
use berth_core::keeper::Snapshot;
use berth_http::Failure;
use berth_http::caller;
use berth_http::route::IDENTITY;
use berth_kernel::ledger::Ledger;
use feed::event;
use futures_util::{FutureExt as _, stream};
use news::{News, Told};
use places::STREAMS_MAX;
use reader::{Begin, Reader, Still, Waits, Wanted};
use recent::{Following, Id, Ring};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use utoipa::IntoParams;

/// When to retry where all are taken.
const STREAMS_RETRY_S: u64 = 10;
/// After a look at the ledger the next one waits so long: a burst of Allocates is one look.
const LOOK_WAIT: Duration = Duration::from_millis(50);
/// What a stream is sent as.
pub(super) const EVENT_STREAM: &str = "text/event-stream";
/// The header that a client comes back with.
const LAST_EVENT_ID: &str = "last-event-id";

/// Looks at each new ledger for what is to be told, for ever. What it is held against is the ledger of the
/// call, whenever the future is first polled: what comes in between is told.
pub(super) fn keep(state: web::Data<State>) -> impl Future<Output = ()> {
    let (mut snapshots, mut standings) = (state.door.watch(), state.door.watch_standings());
    let first = snapshots.borrow_and_update().clone();
    let told = Told::new(first, standings.borrow_and_update().clone());
    look(state, snapshots, standings, told)
}

async fn look(
    state: web::Data<State>,
    mut snapshots: watch::Receiver<Snapshot>,
    mut standings: watch::Receiver<Arc<Standings>>,
    mut told: Told,
) {
    loop {
        let changed = tokio::select! {
            changed = snapshots.changed() => changed,
            changed = standings.changed() => changed,
        };
        if changed.is_err() {
            // The ledger's thread has ended, and the process will.
            return state.feed.close("the daemon's ledger has ended");
        }
        let ledger = snapshots.borrow_and_update().clone();
        let standings = standings.borrow_and_update().clone();
        let news = told.step(Arc::clone(&ledger), standings);
        state.feed.tell(news, &ledger, state.door.now());
        tokio::time::sleep(LOOK_WAIT).await;
    }
}

/// Which events, and from where.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Query {
    /// Only of these kinds, separated by commas.
    #[param(example = "gpuHealth,gpuDrained")]
    kind: Option<String>,
    /// Only about this GPU, by UUID.
    #[param(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    gpu: Option<String>,
    /// Those that follow this id, for clients that cannot send the header; `0`: all that are kept.
    #[param(example = "0")]
    since: Option<String>,
    /// Whether the stream goes on once all that is kept was sent; `true` if not given.
    #[param(example = false)]
    follow: Option<bool>,
}

/// What changes on the node, as it changes
///
/// Server-sent events. The first one, `here`, says where one stands; then comes one for each change, with
/// an `Event` as its data. A client that comes back sends the last id that it got as `Last-Event-ID` (or
/// `since`) and gets what it missed; where that is no longer kept (1024 events, until the daemon ends),
/// `missed` says to read the state anew. Where nothing is sent for 15 seconds, a comment is, with the id
/// that the client is at by then. A stream ends with `end` and the reason: the daemon stops, the client
/// reads too slowly, or an hour is over; come back then. At most 32 streams are served at
/// a time; those whose clients are gone give their places back as soon as one is wanted, and whoever has most
/// gives one up for a caller who has fewer. `follow=false` takes no place. A stream ends, too, within some
/// seconds of its caller being let in no longer.
#[utoipa::path(get, path = "/api/v1/events", tag = "events", operation_id = "streamEvents",
    params(Query, ("Last-Event-ID" = Option<String>, Header, description = "The id of the last event that the client got; goes before `since`", example = "19a8c3f2b10-17")),
    responses(
        (status = 200, description = "Events, until the stream ends", body = String, content_type = "text/event-stream"),
        (status = 400, description = "A malformed query or Last-Event-ID, or an unknown key in the query"),
    ))]
pub(super) async fn follow(
    state: web::Data<State>,
    request: HttpRequest,
    query: web::Query<Query>,
) -> Result<HttpResponse, Failure> {
    let wanted = wanted(&state.door.snapshot(), &query)?;
    let ring = &state.feed.ring;
    let since = since(ring, &request, &query)?;
    let mut response = HttpResponse::Ok();
    // Named so that nothing gathers frames so as to compress them.
    response.insert_header((CONTENT_ENCODING, IDENTITY));
    response.insert_header((CONTENT_TYPE, EVENT_STREAM));
    response.insert_header(("x-accel-buffering", "no"));
    // As everywhere HEAD answers with the head alone; it takes no place.
    if request.method() == Method::HEAD {
        return Ok(response.streaming(stream::empty::<Result<web::Bytes, Infallible>>()));
    }
    let follow = query.follow.unwrap_or(true);
    let place = match follow {
        true => Some(state.feed.place(&caller::identity()).await.ok_or_else(no_place)?),
        // Ends with what is kept.
        false => None,
    };
    // Before the ledger is looked at: what comes in between is told, and in `here`, too.
    let newest = ring.newest();
    let (ledger, now) = (state.door.snapshot(), state.door.now());
    let told =
        |kind, after, words| recent::frame(ring.id(after), &event(News::new(kind, words), &ledger, now));
    let (after, begin) = match since {
        Since::Now => (newest, None),
        Since::After(seq) => (seq, None),
        Since::Gone => {
            let words = "what came after that id is no longer kept, or of another run of the daemon: read \
                         the state anew";
            (newest, Some(words))
        }
    };
    // Comes back after three seconds, where the client follows the standard.
    let mut first = format!("retry: 3000\n{}", told(EventKind::Here, after, here(&ledger)));
    if let Some(words) = begin {
        first += &told(EventKind::Missed, after, words.to_owned());
    }
    let door = state.door.clone();
    let generation = Box::new(move || door.snapshot().generation);
    let (asked, with) = (request.clone(), state.clone());
    let still: Still = Box::new(move || {
        let (asked, with) = (asked.clone(), with.clone());
        async move { with.http.access.still(&asked).await }.boxed_local()
    });
    let begin = Begin { after, follow, first, generation, still };
    let reader = Reader::new(Arc::clone(ring), wanted, begin, place, Waits::default());
    Ok(response.streaming(reader.stream()))
}

fn no_place() -> Failure {
    Failure::new(Kind::Streams, format!("{STREAMS_MAX} event streams are open, which is the most"))
        .retry_after(STREAMS_RETRY_S)
        .hint("close pages and `berth events` that nobody looks at, or ask with ?follow=false")
}

enum Since {
    Now,
    After(u64),
    Gone,
}

fn since(ring: &Ring, request: &HttpRequest, query: &Query) -> Result<Since, Failure> {
    let mut given = request.headers().get_all(LAST_EVENT_ID);
    let (first, second) = (given.next(), given.next());
    let (text, kind, name) = match first {
        Some(value) => (value.to_str().ok(), Kind::Header, "Last-Event-ID"),
        None => match query.since.as_deref() {
            None => return Ok(Since::Now),
            Some("0") => return Ok(Since::After(ring.oldest())),
            Some(text) => (Some(text), Kind::Query, "since"),
        },
    };
    let id = text.filter(|_| second.is_none()).and_then(Id::parse).ok_or_else(|| {
        Failure::new(kind, format!("{name}: the id of an event, such as {}", ring.id(ring.newest())))
            .hint("leave it out for new events alone")
    })?;
    let known = id.start == ring.id(0).start && id.seq <= ring.newest();
    match ring.following(id.seq, 0) {
        Following::Gone => Ok(Since::Gone),
        _ if known => Ok(Since::After(id.seq)),
        _ => Ok(Since::Gone),
    }
}

fn wanted(ledger: &Ledger, query: &Query) -> Result<Wanted, Failure> {
    let bad = |rule: String| Failure::new(Kind::Query, rule);
    let kinds = query.kind.as_deref().map(|text| {
        let words = text.split(',').map(str::trim);
        let kinds = words.map(|word| {
            let shown: String = word.chars().take(80).collect();
            EventKind::parse(word).ok_or_else(|| bad(format!("kind: no event is called {shown:?}")))
        });
        kinds.collect::<Result<BTreeSet<_>, _>>()
    });
    let gpu = query.gpu.as_deref().map(|gpu| gpu_of_query(ledger, gpu)).transpose()?;
    Ok(Wanted { kinds: kinds.transpose()?, gpu: gpu.map(|gpu| gpu.to_string()) })
}

/// Where one stands, in words.
fn here(ledger: &Ledger) -> String {
    format!("{} GPUs, {} allocations, stack {}", ledger.gpus.len(), ledger.live.len(), ledger.stack.revision)
}
