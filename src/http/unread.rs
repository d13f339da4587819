//! A body that nobody reads is not taken in.
//!
//! Once a handler has dropped a chunked body, the HTTP library reads it to its end so as to use the
//! connection again, however long that is. While somebody still holds the body when the answer has
//! left, it closes the connection instead. So the answer holds it.

use super::response_budget::Share;
use super::slot::{Slot, Work};
use actix_web::HttpMessage;
use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::{Payload, ServiceRequest};
use actix_web::web::Bytes;
use futures_util::stream::{self, Stream};
use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

/// What of a request's body was not read.
pub(super) struct Unread(Rc<RefCell<Payload>>);

impl Unread {
    /// Puts a look-alike in place of the request's body and keeps the body itself; `None` where
    /// there is none.
    ///
    /// The slot is told when there is no more of it.
    pub(super) fn of(request: &mut ServiceRequest) -> Option<Self> {
        let payload = request.take_payload();
        let slot = request.conn_data::<Arc<Slot>>().cloned();
        let ended = move || {
            if let Some(slot) = &slot {
                slot.hush();
            }
        };
        if matches!(payload, Payload::None) {
            ended();
            return None;
        }
        let shared = Rc::new(RefCell::new(payload));
        let reader = Rc::clone(&shared);
        let look_alike = stream::poll_fn(move |cx| {
            let next = Pin::new(&mut *reader.borrow_mut()).poll_next(cx);
            if matches!(next, Poll::Ready(None)) {
                ended();
            }
            next
        });
        request.set_payload(Payload::Stream { payload: Box::pin(look_alike) });
        Some(Self(shared))
    }
}

/// Largest body that the HTTP library takes over at once, bytes: what it buffers before it writes.
const SMALL_BYTES_MAX: u64 = 32 * 1024;

/// Whether an answer's body has left its handler once it is made.
pub(super) fn is_small(body: &BoxBody) -> bool {
    matches!(body.size(), BodySize::None | BodySize::Sized(..=SMALL_BYTES_MAX))
}

/// How large a body is that is not small, bytes, as far as that is known: one that comes in pieces has the size by
/// which it is counted, and a stream of events none.
pub(super) fn bytes(body: &BoxBody, share: Option<&Share>) -> Option<u64> {
    match body.size() {
        BodySize::Sized(bytes) => Some(bytes).filter(|_| !is_small(body)),
        _ => share.map(Share::bytes),
    }
}

/// So much of a larger body is handed to the HTTP library at a time, bytes: it copies whatever it is handed,
/// and for a client that does not read it keeps the copy.
const PIECE_BYTES_MAX: usize = 16 * 1024;

/// An answer's body that holds what of the request was not read, and keeps its request under way and its share of
/// the memory, until it has been taken over.
pub(super) fn holding(
    body: BoxBody,
    unread: Option<Unread>,
    work: Option<Work>,
    share: Option<Share>,
) -> BoxBody {
    let _unread = unread.map(|unread| unread.0);
    BoxBody::new(Holding { body, rest: Bytes::new(), _unread, _work: work, _share: share })
}

struct Holding {
    body: BoxBody,
    /// What is left of what came last.
    rest: Bytes,
    _unread: Option<Rc<RefCell<Payload>>>,
    _work: Option<Work>,
    _share: Option<Share>,
}

impl MessageBody for Holding {
    type Error = <BoxBody as MessageBody>::Error;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
        while self.rest.is_empty() {
            match Pin::new(&mut self.body).poll_next(cx) {
                Poll::Ready(Some(Ok(bytes))) => self.rest = bytes,
                other => return other,
            }
        }
        let piece = self.rest.len().min(PIECE_BYTES_MAX);
        Poll::Ready(Some(Ok(self.rest.split_to(piece))))
    }
}
