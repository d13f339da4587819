//! The access settings of the admin API, as `berth config check` shows them.

use crate::config::Config;
use berth_http::{Right, TokenSource};
use serde::Serialize;
use std::path::Path;

/// The access settings of the admin API, with defaults.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AccessSummary {
    /// The file of the token that the first start creates.
    token_file: String,
    /// Further tokens.
    tokens: Vec<Token>,
    /// `None`: plain HTTP.
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<Tls>,
    /// The Unix socket for root.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket: Option<String>,
    /// Whether users of the cluster are accepted.
    kubernetes: bool,
    reads_per_second: u32,
    changes_per_second: u32,
}

#[derive(Serialize)]
struct Token {
    name: String,
    right: &'static str,
    /// `None` if the configuration has the token's SHA-256.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Tls {
    cert_file: String,
    key_file: String,
    /// The CA of client certificates, if they are accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    client_ca_file: Option<String>,
    require_client_cert: bool,
    clients: Vec<Client>,
    #[serde(skip_serializing_if = "Option::is_none")]
    others_may: Option<&'static str>,
}

#[derive(Serialize)]
struct Client {
    name: String,
    right: &'static str,
}

impl AccessSummary {
    pub(super) fn new(config: &Config) -> Self {
        let access = &config.admin;
        let shown = |path: &Path| path.display().to_string();
        let tokens = access.tokens.iter().map(|token| Token {
            name: token.name.clone(),
            right: token.right.as_str(),
            file: match &token.source {
                TokenSource::File(path) => Some(shown(path)),
                TokenSource::Sha256(_) => None,
            },
        });
        let tls = access.tls.as_ref().map(|tls| Tls {
            cert_file: shown(&tls.cert),
            key_file: shown(&tls.key),
            client_ca_file: tls.client_ca.as_deref().map(shown),
            require_client_cert: tls.require_client_cert,
            clients: tls
                .clients
                .iter()
                .flatten()
                .map(|(name, right)| Client { name: name.clone(), right: right.as_str() })
                .collect(),
            others_may: tls.others_may.map(Right::word),
        });
        Self {
            token_file: shown(&config.token_file),
            tokens: tokens.collect(),
            tls,
            socket: access.socket.as_deref().map(shown),
            kubernetes: access.kubernetes.is_some(),
            reads_per_second: access.limits.reads_per_second,
            changes_per_second: access.limits.changes_per_second,
        }
    }

    /// The address, and whether it uses TLS.
    pub(super) fn address(&self, listen: &str) -> String {
        match &self.tls {
            Some(tls) => format!("https://{listen}, TLS by {} and {}", tls.cert_file, tls.key_file),
            None => format!("http://{listen}, without TLS"),
        }
    }

    /// All kinds of callers, with their rights.
    pub(super) fn callers(&self) -> String {
        let mut callers = vec![format!("the token in {} (change)", self.token_file)];
        callers.extend(self.tokens.iter().map(|Token { name, right, file }| match file {
            Some(file) => format!("token {name} in {file} ({right})"),
            None => format!("token {name} by its SHA-256 ({right})"),
        }));
        if let Some(tls) = &self.tls
            && let Some(ca) = &tls.client_ca_file
        {
            let rights = tls.clients.iter().map(|Client { name, right }| format!("{name}: {right}"));
            let others = format!("others: {}", tls.others_may.unwrap_or("nothing"));
            let rights = rights.chain([others]).collect::<Vec<_>>().join(", ");
            let required = if tls.require_client_cert { ", required" } else { "" };
            callers.push(format!("client certificates of {ca} ({rights}){required}"));
        }
        callers.extend(self.socket.as_ref().map(|socket| format!("root at {socket} (change)")));
        if self.kubernetes {
            callers.push("users of the cluster, by their rights there".into());
        }
        callers.join("; ")
    }

    /// The rate limits of one client.
    pub(super) fn limits(&self) -> String {
        format!("{} reads and {} changes a second per client", self.reads_per_second, self.changes_per_second)
    }
}
