//! The client of the collector, over gRPC or HTTP, with limits on time and size.

use super::headers::Headers;
use crate::config::{Protocol, TracingSettings};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use prost::Message;
use std::error::Error;
use std::str::FromStr;
use std::time::Duration;
use tonic::metadata::{Ascii, AsciiMetadataValue, MetadataKey, MetadataMap};
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Status};
use ureq::Agent;
use ureq::tls::{RootCerts, TlsConfig};

/// Largest response, bytes: it is empty or a short message.
const RESPONSE_BYTES_MAX: usize = 64 * 1024;
/// Longest message in the log, bytes.
const MESSAGE_BYTES_MAX: usize = 300;

/// Why an export failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExportError {
    #[error("no response within {0:?}")]
    Timeout(Duration),
    #[error("the address cannot be used")]
    Address(#[source] tonic::transport::Error),
    #[error("gRPC status {code:?}: {message}")]
    Grpc {
        code: Code,
        message: String,
        #[source]
        source: Box<Status>,
    },
    #[error("HTTP status {0}")]
    Http(u16),
    #[error("the request failed")]
    Transport(#[source] Box<ureq::Error>),
    #[error("the daemon is stopping")]
    Stopping,
}

impl ExportError {
    /// The error with its causes, in one line of bounded length.
    pub(super) fn message(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(next) = cause {
            let part = next.to_string();
            // The text of a status repeats its message; its cause names the connection and the error.
            if !next.is::<Box<Status>>() && !text.contains(&part) {
                text = format!("{text}: {part}");
            }
            cause = next.source();
        }
        text.truncate(text.floor_char_boundary(MESSAGE_BYTES_MAX));
        text
    }
}

/// The collector's response to an export.
pub(super) struct ExportResult {
    /// The number of refused spans.
    pub(super) refused: u64,
    /// The collector's message.
    pub(super) message: String,
}

impl From<ExportTraceServiceResponse> for ExportResult {
    fn from(response: ExportTraceServiceResponse) -> Self {
        let partial = response.partial_success.unwrap_or_default();
        let mut message = partial.error_message;
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        Self { refused: u64::try_from(partial.rejected_spans).unwrap_or(0), message }
    }
}

/// A client of the collector.
pub(super) struct Client {
    url: String,
    timeout: Duration,
    headers: Headers,
    transport: Transport,
}

enum Transport {
    /// Created by the first export, since it needs a runtime, and again after a failed one, which may have left a dead
    /// connection.
    Grpc(Option<TraceServiceClient<Channel>>),
    Http(Agent),
}

impl Client {
    pub(super) fn new(settings: &TracingSettings, headers: Headers) -> Self {
        let (url, timeout) = (settings.endpoint.url.clone(), settings.timeout);
        let transport = match settings.endpoint.protocol {
            Protocol::Grpc => Transport::Grpc(None),
            Protocol::HttpProtobuf => {
                let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
                let config = Agent::config_builder()
                    .timeout_global(Some(timeout))
                    .http_status_as_error(false)
                    .max_redirects(0)
                    // As for gRPC: `HTTP_PROXY` is for requests that leave the cluster.
                    .proxy(None)
                    .tls_config(tls);
                Transport::Http(config.build().new_agent())
            }
        };
        Self { url, timeout, headers, transport }
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) async fn export(
        &mut self,
        request: ExportTraceServiceRequest,
    ) -> Result<ExportResult, ExportError> {
        match &self.transport {
            Transport::Grpc(_) => self.grpc(request).await,
            Transport::Http(agent) => {
                let (agent, url, headers) = (agent.clone(), self.url.clone(), self.headers.clone());
                // The library blocks, at most for its timeout.
                let result =
                    tokio::task::spawn_blocking(move || http(&agent, &url, &headers, &request)).await;
                result.unwrap_or(Err(ExportError::Stopping))
            }
        }
    }

    async fn grpc(&mut self, request: ExportTraceServiceRequest) -> Result<ExportResult, ExportError> {
        let existing = match &mut self.transport {
            Transport::Grpc(client) => client.take(),
            Transport::Http(_) => None,
        };
        let mut client = match existing {
            Some(client) => client,
            None => self.connect()?,
        };
        let mut request = tonic::Request::new(request);
        *request.metadata_mut() = metadata(&self.headers);
        let result = tokio::time::timeout(self.timeout, client.export(request)).await;
        let response = result.map_err(|_| ExportError::Timeout(self.timeout))?.map_err(|status| {
            let (code, message) = (status.code(), status.message().to_owned());
            ExportError::Grpc { code, message, source: Box::new(status) }
        })?;
        self.transport = Transport::Grpc(Some(client));
        Ok(response.into_inner().into())
    }

    fn connect(&self) -> Result<TraceServiceClient<Channel>, ExportError> {
        let mut endpoint = Endpoint::from_shared(self.url.clone())
            .map_err(ExportError::Address)?
            .user_agent(concat!("berth/", env!("CARGO_PKG_VERSION")))
            .map_err(ExportError::Address)?
            .connect_timeout(self.timeout)
            .timeout(self.timeout);
        if self.url.starts_with("https:") {
            let tls = ClientTlsConfig::new().with_native_roots();
            endpoint = endpoint.tls_config(tls).map_err(ExportError::Address)?;
        }
        let client = TraceServiceClient::new(endpoint.connect_lazy());
        Ok(client.max_decoding_message_size(RESPONSE_BYTES_MAX))
    }
}

fn metadata(headers: &Headers) -> MetadataMap {
    let mut map = MetadataMap::new();
    for (name, value) in &headers.0 {
        // `Headers` has valid names and values only.
        let name = MetadataKey::<Ascii>::from_str(name);
        if let (Ok(name), Ok(mut value)) = (name, AsciiMetadataValue::try_from(value.as_str())) {
            value.set_sensitive(true);
            map.insert(name, value);
        }
    }
    map
}

fn http(
    agent: &Agent,
    url: &str,
    headers: &Headers,
    request: &ExportTraceServiceRequest,
) -> Result<ExportResult, ExportError> {
    let transport_error = |error| ExportError::Transport(Box::new(error));
    let mut post = agent.post(url).content_type("application/x-protobuf");
    for (name, value) in &headers.0 {
        post = post.header(name, value);
    }
    let mut response = post.send(request.encode_to_vec().as_slice()).map_err(transport_error)?;
    let status = response.status();
    if !status.is_success() {
        return Err(ExportError::Http(status.as_u16()));
    }
    let body = response
        .body_mut()
        .with_config()
        .limit(RESPONSE_BYTES_MAX as u64)
        .read_to_vec()
        .map_err(transport_error)?;
    // Some collectors always respond with JSON: the status already shows that the spans were accepted.
    Ok(ExportTraceServiceResponse::decode(body.as_slice()).unwrap_or_default().into())
}
