//! The client of the collector, over gRPC or HTTP, with limits on time and size.

use super::headers::Headers;
use super::{Protocol, TracingSettings};
use anyhow::{Context, anyhow, ensure};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use prost::Message;
use std::str::FromStr;
use std::time::Duration;
use tonic::Status;
use tonic::metadata::{Ascii, AsciiMetadataValue, MetadataKey, MetadataMap};
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use ureq::Agent;
use ureq::tls::{RootCerts, TlsConfig};

/// Largest response, bytes: it is empty or a short message.
const RESPONSE_BYTES_MAX: usize = 64 * 1024;
/// Longest message in the log, bytes.
const MESSAGE_BYTES_MAX: usize = 300;

/// The error of an export with its causes, in one line of bounded length.
pub(super) fn message(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let part = cause.to_string();
        // The text of a status repeats its message; its cause names the connection and the error.
        if !cause.is::<Status>() && !text.contains(&part) {
            text = format!("{text}: {part}");
        }
    }
    truncated(text)
}

/// A text of at most [`MESSAGE_BYTES_MAX`].
pub(super) fn truncated(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MESSAGE_BYTES_MAX));
    text
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

    /// Sends spans. The result has the number of refused ones, with a message.
    pub(super) async fn export(
        &mut self,
        request: ExportTraceServiceRequest,
    ) -> anyhow::Result<ExportTracePartialSuccess> {
        match &self.transport {
            Transport::Grpc(_) => self.grpc(request).await,
            Transport::Http(agent) => {
                let (agent, url, headers) = (agent.clone(), self.url.clone(), self.headers.clone());
                // The library blocks, at most for its timeout.
                let result =
                    tokio::task::spawn_blocking(move || http(&agent, &url, &headers, &request)).await;
                result.unwrap_or_else(|_| Err(anyhow!("the daemon is stopping")))
            }
        }
    }

    async fn grpc(
        &mut self,
        request: ExportTraceServiceRequest,
    ) -> anyhow::Result<ExportTracePartialSuccess> {
        let existing = match &mut self.transport {
            Transport::Grpc(client) => client.take(),
            Transport::Http(_) => None,
        };
        let mut client = match existing {
            Some(client) => client,
            None => self.connect().context("the address cannot be used")?,
        };
        let mut request = tonic::Request::new(request);
        *request.metadata_mut() = metadata(&self.headers);
        let result = tokio::time::timeout(self.timeout, client.export(request)).await;
        let result = result.map_err(|_| anyhow!("no response within {:?}", self.timeout))?;
        let response = result.map_err(|status| {
            let what = format!("gRPC status {:?}: {}", status.code(), status.message());
            anyhow::Error::new(status).context(what)
        })?;
        self.transport = Transport::Grpc(Some(client));
        Ok(response.into_inner().partial_success.unwrap_or_default())
    }

    fn connect(&self) -> Result<TraceServiceClient<Channel>, tonic::transport::Error> {
        let mut endpoint = Endpoint::from_shared(self.url.clone())?
            .user_agent(concat!("berth/", env!("CARGO_PKG_VERSION")))?
            .connect_timeout(self.timeout)
            .timeout(self.timeout);
        if self.url.starts_with("https:") {
            endpoint = endpoint.tls_config(ClientTlsConfig::new().with_native_roots())?;
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
) -> anyhow::Result<ExportTracePartialSuccess> {
    const FAILED: &str = "the request failed";
    let mut post = agent.post(url).content_type("application/x-protobuf");
    for (name, value) in &headers.0 {
        post = post.header(name, value);
    }
    let mut response = post.send(request.encode_to_vec().as_slice()).context(FAILED)?;
    let status = response.status();
    ensure!(status.is_success(), "HTTP status {}", status.as_u16());
    let body =
        response.body_mut().with_config().limit(RESPONSE_BYTES_MAX as u64).read_to_vec().context(FAILED)?;
    // Some collectors always respond with JSON: the status already shows that the spans were accepted.
    let response = ExportTraceServiceResponse::decode(body.as_slice()).unwrap_or_default();
    Ok(response.partial_success.unwrap_or_default())
}
