//! A body that nobody reads is not taken in.
//!
//! Once a handler has dropped a chunked body, the HTTP library reads it to its end so as to use the
//! connection again, however long that is. While somebody still holds the body when the answer has
//! left, it closes the connection instead. So the answer holds it.

use actix_web::HttpMessage;
use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::{Payload, ServiceRequest};
use actix_web::web::Bytes;
use futures_util::stream::{self, Stream};
use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

/// What of a request's body was not read.
pub(super) struct Unread(Rc<RefCell<Payload>>);

impl Unread {
    /// Puts a look-alike in place of the request's body and keeps the body itself; `None` where
    /// there is none.
    pub(super) fn of(request: &mut ServiceRequest) -> Option<Self> {
        let payload = request.take_payload();
        if matches!(payload, Payload::None) {
            return None;
        }
        let shared = Rc::new(RefCell::new(payload));
        let reader = Rc::clone(&shared);
        let look_alike = stream::poll_fn(move |cx| Pin::new(&mut *reader.borrow_mut()).poll_next(cx));
        request.set_payload(Payload::Stream { payload: Box::pin(look_alike) });
        Some(Self(shared))
    }

    /// An answer's body that holds it.
    pub(super) fn held_by(self, body: BoxBody) -> BoxBody {
        BoxBody::new(Holding { body, _unread: self.0 })
    }
}

struct Holding {
    body: BoxBody,
    _unread: Rc<RefCell<Payload>>,
}

impl MessageBody for Holding {
    type Error = <BoxBody as MessageBody>::Error;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
        Pin::new(&mut self.body).poll_next(cx)
    }
}
