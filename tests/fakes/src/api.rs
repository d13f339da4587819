//! A client of the admin API.

use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Longest wait for a response. An activation that compiles a policy took more than 10 s beside two builds.
const RESPONSE_MAX: Duration = Duration::from_secs(60);

/// A client of the admin API with a token.
#[derive(Clone)]
pub struct Api {
    agent: ureq::Agent,
    base: String,
    token: Token,
}

/// A bearer token.
#[derive(Clone)]
enum Token {
    Text(String),
    /// Read for each request, since `berth token rotate` replaces it.
    File(PathBuf),
}

impl Api {
    /// `token`: a bearer token of the admin API.
    #[must_use]
    pub fn new(address: SocketAddr, token: &str) -> Self {
        Self::with_token(address, Token::Text(token.to_owned()))
    }

    /// `token_file`: the file of a bearer token of the admin API.
    #[must_use]
    pub fn of_file(address: SocketAddr, token_file: PathBuf) -> Self {
        Self::with_token(address, Token::File(token_file))
    }

    fn with_token(address: SocketAddr, token: Token) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(RESPONSE_MAX))
            .http_status_as_error(false)
            .proxy(None)
            .build();
        Self { agent: config.into(), base: format!("http://{address}/api/v1"), token }
    }

    fn authorization(&self) -> String {
        let token = match &self.token {
            Token::Text(token) => token.clone(),
            Token::File(file) => std::fs::read_to_string(file).unwrap_or_default(),
        };
        format!("Bearer {}", token.trim())
    }

    /// GET of a path below `/api/v1`.
    ///
    /// # Errors
    /// If the API does not answer, or answers with a problem.
    pub async fn get(&self, path: &str) -> anyhow::Result<Value> {
        let (api, url) = (self.clone(), format!("{}{path}", self.base));
        blocking(move || {
            read_response(&url, api.agent.get(&url).header("Authorization", api.authorization()).call())
        })
        .await
    }

    async fn put(&self, path: &str, body: Value) -> anyhow::Result<Value> {
        let (api, url) = (self.clone(), format!("{}{path}", self.base));
        blocking(move || {
            let request = api.agent.put(&url).header("Authorization", api.authorization());
            let request = request.header("Content-Type", "application/json");
            read_response(&url, request.send(body.to_string()))
        })
        .await
    }

    /// POST of a JSON body.
    ///
    /// # Errors
    /// If the API does not answer, or answers with a problem.
    pub async fn post(&self, path: &str, body: Value) -> anyhow::Result<Value> {
        let (api, url) = (self.clone(), format!("{}{path}", self.base));
        blocking(move || {
            let request = api.agent.post(&url).header("Authorization", api.authorization());
            let request = request.header("Content-Type", "application/json");
            read_response(&url, request.send(body.to_string()))
        })
        .await
    }

    /// DELETE of a path below `/api/v1`.
    ///
    /// # Errors
    /// If the API does not answer, or answers with a problem.
    pub async fn delete(&self, path: &str) -> anyhow::Result<()> {
        let (api, url) = (self.clone(), format!("{}{path}", self.base));
        blocking(move || {
            read_response(&url, api.agent.delete(&url).header("Authorization", api.authorization()).call())
        })
        .await
        .map(drop)
    }

    /// Cordons a GPU, by UUID.
    ///
    /// # Errors
    /// If the API does not answer, or answers with a problem.
    pub async fn cordon(&self, gpu: &str, reason: &str) -> anyhow::Result<()> {
        self.put(&format!("/gpus/{gpu}/cordon"), json!({ "reason": reason })).await.map(drop)
    }

    /// Ends a GPU's cordon.
    ///
    /// # Errors
    /// If the API does not answer, or answers with a problem.
    pub async fn uncordon(&self, gpu: &str) -> anyhow::Result<()> {
        self.delete(&format!("/gpus/{gpu}/cordon")).await
    }

    /// Activates a stack with these entries.
    ///
    /// # Errors
    /// If the API does not answer, or answers with a problem.
    pub async fn activate(&self, entries: Value) -> anyhow::Result<()> {
        self.put("/stack", json!({ "entries": entries })).await.map(drop)
    }
}

async fn blocking(work: impl FnOnce() -> anyhow::Result<Value> + Send + 'static) -> anyhow::Result<Value> {
    tokio::task::spawn_blocking(work).await.context("the thread of the HTTP client failed")?
}

fn read_response(
    url: &str,
    result: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
) -> anyhow::Result<Value> {
    let mut response = result.with_context(|| format!("calling {url}"))?;
    let text = response.body_mut().read_to_string()?;
    if !response.status().is_success() {
        bail!("{url} answered {}: {text}", response.status());
    }
    if text.is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_str(&text)?) }
}
