//! Keeps request bodies that a handler does not read.
//!
//! If a handler drops a chunked body, the HTTP library reads it to its end in order to reuse the connection, however
//! long that is. If the body still exists when the response was sent, the library closes the connection instead. So
//! the response holds it.

use crate::connection_slots::{Slot, Work};
use crate::response_budget::{Share, is_small};
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

/// The unread rest of a request's body.
pub(crate) struct RequestBody(Rc<RefCell<Payload>>);

impl RequestBody {
    /// Replaces the request's body by a proxy and keeps the body itself; `None` without a body.
    ///
    /// The slot is notified at the end of the body.
    pub(crate) fn of(request: &mut ServiceRequest) -> Option<Self> {
        let payload = request.take_payload();
        let slot = request.conn_data::<Arc<Slot>>().cloned();
        let ended = move || {
            if let Some(slot) = &slot {
                slot.pause_reading();
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

/// The size of a body that is not small, bytes, if known: a streamed one has the size by which it is counted, and an
/// event stream none.
pub(crate) fn bytes(body: &BoxBody, share: Option<&Share>) -> Option<u64> {
    match body.size() {
        BodySize::Sized(bytes) => Some(bytes).filter(|_| !is_small(body)),
        _ => share.map(Share::bytes),
    }
}

/// Bytes of a larger body that the HTTP library gets at a time: it copies them, and keeps the copy while its client
/// does not read.
const PIECE_BYTES_MAX: usize = 16 * 1024;

/// A response's body that holds the unread part of the request, and keeps its request in progress and its memory
/// counted, until the body was copied.
pub(crate) fn holding(
    body: BoxBody,
    unread: Option<RequestBody>,
    work: Option<Work>,
    share: Option<Share>,
) -> BoxBody {
    let _unread = unread.map(|unread| unread.0);
    BoxBody::new(Holding { body, rest: Bytes::new(), _unread, _work: work, _share: share })
}

struct Holding {
    body: BoxBody,
    /// The rest of the last piece.
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
