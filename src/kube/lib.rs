//! What the tasks of a daemon and the controller need to talk to the API server: the connection, requests with a timeout, watches
//! that resume, waits that do not coincide, conditions.

mod conditions;
mod connection;
mod object_watch;
mod request;
mod wait;

pub use conditions::{ConditionContent, conditions, time};
pub use connection::{ApiServer, ConnectError, Connection};
pub use object_watch::{Cause, Error, Event, events};
pub use request::{ANSWER_MAX, RequestError, error_chain, request};
pub use wait::{
    BACKOFF_MAX, Backoff, REFRESH_MEAN, RetryAfter, after_loss, jittered, random, retry_at, watch,
};
