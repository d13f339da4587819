//! HTTP over the daemon's Unix socket, for the client half.

use super::reach::CONNECT_MAX;
use berth_files::socket::connect_within;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use ureq::Error;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport,
};

/// Connects to one socket, whatever the address of a request says.
#[derive(Debug)]
pub(super) struct UnixConnector(pub(super) PathBuf);

impl<In: Transport> Connector<In> for UnixConnector {
    type Out = UnixTransport;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        _: Option<In>,
    ) -> Result<Option<UnixTransport>, Error> {
        let wait = details.timeout.not_zero().map_or(CONNECT_MAX, |left| CONNECT_MAX.min(*left));
        let stream = connect_within(&self.0, wait).map_err(|error| match error.kind() {
            ErrorKind::TimedOut => Error::Timeout(details.timeout.reason),
            _ => error.into(),
        })?;
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(Some(UnixTransport { stream, buffers }))
    }
}

/// There is no name to look up.
#[derive(Debug)]
pub(super) struct NoNames;

impl Resolver for NoNames {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let mut addresses = self.empty();
        // The library requires at least one address; it is not connected to.
        addresses.push((IpAddr::from([127, 0, 0, 1]), 0).into());
        Ok(addresses)
    }
}

/// One connection.
pub(super) struct UnixTransport {
    stream: UnixStream,
    buffers: LazyBuffers,
}

impl fmt::Debug for UnixTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnixTransport").finish_non_exhaustive()
    }
}

/// The error of a wait that was too long.
fn late(error: io::Error, timeout: NextTimeout) -> Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::Timeout(timeout.reason),
        _ => error.into(),
    }
}

impl Transport for UnixTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        self.stream.set_write_timeout(timeout.not_zero().map(|t| *t))?;
        let output = &self.buffers.output()[..amount];
        self.stream.write_all(output).map_err(|error| late(error, timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.stream.set_read_timeout(timeout.not_zero().map(|t| *t))?;
        let input = self.buffers.input_append_buf();
        let amount = loop {
            match self.stream.read(input) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => break other.map_err(|error| late(error, timeout))?,
            }
        };
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    /// Each request has an agent of its own, so none is used again.
    fn is_open(&mut self) -> bool {
        false
    }
}
