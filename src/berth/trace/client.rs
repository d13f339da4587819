//! One export: a request to the collector, over gRPC or HTTP, with a limit on everything.

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

/// Most of an answer that is read, bytes: it is empty, or a line of text.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// Most bytes of a collector's message in the log.
const WORDS_BYTES_MAX: usize = 300;

/// Why nothing was exported.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExportError {
    #[error("no answer within {0:?}")]
    Late(Duration),
    #[error("the address cannot be used")]
    Address(#[source] tonic::transport::Error),
    #[error("gRPC says {code:?}: {message}")]
    Grpc {
        code: Code,
        message: String,
        #[source]
        source: Box<Status>,
    },
    #[error("it answers {0}")]
    Http(u16),
    #[error("it cannot be asked")]
    Transport(#[source] Box<ureq::Error>),
    #[error("the daemon is stopping")]
    Stopping,
}

impl ExportError {
    /// With its causes, in one line of bounded length.
    pub(super) fn words(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(next) = cause {
            let said = next.to_string();
            // The text of a status repeats itself; its cause names the connection and the error.
            if !next.is::<Box<Status>>() && !text.contains(&said) {
                text = format!("{text}: {said}");
            }
            cause = next.source();
        }
        text.truncate(text.floor_char_boundary(WORDS_BYTES_MAX));
        text
    }
}

/// What a collector made of a request.
pub(super) struct Taken {
    /// Spans that it does not want.
    pub(super) refused: u64,
    /// The message of the collector.
    pub(super) why: String,
}

impl From<ExportTraceServiceResponse> for Taken {
    fn from(answer: ExportTraceServiceResponse) -> Self {
        let partial = answer.partial_success.unwrap_or_default();
        let mut why = partial.error_message;
        why.truncate(why.floor_char_boundary(WORDS_BYTES_MAX));
        Self { refused: u64::try_from(partial.rejected_spans).unwrap_or(0), why }
    }
}

/// The way to the collector.
pub(super) struct Client {
    url: String,
    timeout: Duration,
    headers: Headers,
    way: Way,
}

enum Way {
    /// Made with the first export, since that needs a runtime, and again after one that failed: a connection whose other
    /// end vanished would otherwise be used again.
    Grpc(Option<TraceServiceClient<Channel>>),
    Http(Agent),
}

impl Client {
    pub(super) fn new(settings: &TracingSettings, headers: Headers) -> Self {
        let (url, timeout) = (settings.endpoint.url.clone(), settings.timeout);
        let way = match settings.endpoint.protocol {
            Protocol::Grpc => Way::Grpc(None),
            Protocol::HttpProtobuf => {
                let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
                let config = Agent::config_builder()
                    .timeout_global(Some(timeout))
                    .http_status_as_error(false)
                    .max_redirects(0)
                    // As with gRPC: HTTP_PROXY is for requests that leave the cluster.
                    .proxy(None)
                    .tls_config(tls);
                Way::Http(config.build().new_agent())
            }
        };
        Self { url, timeout, headers, way }
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) async fn export(&mut self, request: ExportTraceServiceRequest) -> Result<Taken, ExportError> {
        match &self.way {
            Way::Grpc(_) => self.grpc(request).await,
            Way::Http(agent) => {
                let (agent, url, headers) = (agent.clone(), self.url.clone(), self.headers.clone());
                // The library blocks, for no longer than its timeout.
                let sent = tokio::task::spawn_blocking(move || http(&agent, &url, &headers, &request)).await;
                sent.unwrap_or(Err(ExportError::Stopping))
            }
        }
    }

    async fn grpc(&mut self, request: ExportTraceServiceRequest) -> Result<Taken, ExportError> {
        let kept = match &mut self.way {
            Way::Grpc(kept) => kept.take(),
            Way::Http(_) => None,
        };
        let mut client = match kept {
            Some(client) => client,
            None => self.channel()?,
        };
        let mut request = tonic::Request::new(request);
        *request.metadata_mut() = metadata(&self.headers);
        let answered = tokio::time::timeout(self.timeout, client.export(request)).await;
        let answer = answered.map_err(|_| ExportError::Late(self.timeout))?.map_err(|status| {
            let (code, message) = (status.code(), status.message().to_owned());
            ExportError::Grpc { code, message, source: Box::new(status) }
        })?;
        self.way = Way::Grpc(Some(client));
        Ok(answer.into_inner().into())
    }

    fn channel(&self) -> Result<TraceServiceClient<Channel>, ExportError> {
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
        Ok(client.max_decoding_message_size(ANSWER_BYTES_MAX))
    }
}

fn metadata(headers: &Headers) -> MetadataMap {
    let mut map = MetadataMap::new();
    for (name, value) in &headers.0 {
        // Both were checked when they were read.
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
) -> Result<Taken, ExportError> {
    let failed = |error| ExportError::Transport(Box::new(error));
    let mut post = agent.post(url).content_type("application/x-protobuf");
    for (name, value) in &headers.0 {
        post = post.header(name, value);
    }
    let mut answer = post.send(request.encode_to_vec().as_slice()).map_err(failed)?;
    let status = answer.status();
    if !status.is_success() {
        return Err(ExportError::Http(status.as_u16()));
    }
    let body =
        answer.body_mut().with_config().limit(ANSWER_BYTES_MAX as u64).read_to_vec().map_err(failed)?;
    // Some answer with JSON, whatever they were sent: it was taken all the same.
    Ok(ExportTraceServiceResponse::decode(body.as_slice()).unwrap_or_default().into())
}
