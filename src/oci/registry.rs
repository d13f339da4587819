//! A client of registries, as the OCI distribution specification and Docker's token authentication have them. It pulls by digest and
//! pushes; each answer has a limit of size and time.

use crate::Source;
use crate::artifact::{
    Artifact, MANIFEST_BYTES_MAX, MANIFEST_TYPE, PulledPolicy, check_digest, check_layer, check_manifest,
    digest_of, read_manifest,
};
use crate::credentials::{Credentials, Login};
use crate::error::{PullError, RegistryError};
use crate::reference::{Reference, Repository, Target, Version};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_kernel::ids::names::Digest;
use berth_kernel::policy::hooks::MODULE_BYTES_MAX;
use http_auth::{ChallengeRef, parse_challenges};
use parking_lot::Mutex;
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use ureq::http::Response;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, ResponseExt};

/// Longest wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Longest wait for the beginning of an answer.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// Longest time of a request with its answer: 32 MiB at 280 KB/s.
const REQUEST_MAX: Duration = Duration::from_secs(120);
/// Largest answer with a token or an error, bytes.
const MESSAGE_BYTES_MAX: u64 = 64 * 1024;
/// Longest part of a registry's message in an error, characters.
const SHOWN_CHARACTERS_MAX: usize = 200;
/// Largest file of certificates, bytes.
const CA_BYTES_MAX: u64 = 1 << 20;

/// A client of one registry.
pub struct Registry {
    agent: Agent,
    scheme: &'static str,
    credentials: Credentials,
    /// The authorization that the registry has accepted, with what it is for: it is sent at once with the next request, so that no
    /// body is sent in vain.
    accepted: Mutex<Option<(String, Access, String)>>,
}

/// What a request is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Pull,
    Push,
}

impl Access {
    /// The actions of a token's scope.
    fn actions(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Push => "pull,push",
        }
    }
}

/// A request without its authorization.
struct Call<'c> {
    method: &'static str,
    url: &'c str,
    headers: &'c [(&'static str, &'c str)],
    body: Option<&'c [u8]>,
}

impl Registry {
    /// A client that trusts the certificates of a file in place of the system's, if one is given.
    ///
    /// # Errors
    /// If the file cannot be used.
    pub fn new(
        is_plain_http: bool,
        credentials: Credentials,
        ca_file: Option<&Path>,
    ) -> Result<Self, String> {
        let roots = match ca_file {
            Some(path) => RootCerts::Specific(Arc::new(certificates(path)?)),
            None => RootCerts::PlatformVerifier,
        };
        let ring = Arc::new(rustls::crypto::ring::default_provider());
        let tls = TlsConfig::builder().root_certs(roots).unversioned_rustls_crypto_provider(ring);
        let agent = Agent::config_builder()
            .timeout_connect(Some(CONNECT_MAX))
            .timeout_recv_response(Some(ANSWER_MAX))
            .timeout_global(Some(REQUEST_MAX))
            .http_status_as_error(false)
            // A registry may redirect a request for a blob to an object store, to which no credentials are sent.
            .max_redirects(5)
            .https_only(!is_plain_http)
            .user_agent(concat!("berth/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls.build())
            .build()
            .new_agent();
        Ok(Self {
            agent,
            scheme: if is_plain_http { "http" } else { "https" },
            credentials,
            accepted: Mutex::default(),
        })
    }

    /// Pulls a policy by the digest of its manifest, and checks that it has this layer.
    ///
    /// # Errors
    /// If the registry cannot be reached or refuses, or the artifact is not what it should be.
    pub fn pull(
        &self,
        repository: &Repository,
        manifest: &Digest,
        layer: &Digest,
    ) -> Result<PulledPolicy, PullError> {
        let bytes = self.manifest(repository, &format!("sha256:{manifest}"))?;
        let signature = check_manifest(&bytes, manifest, layer)?;
        let module =
            self.get(repository, &format!("blobs/sha256:{layer}"), "*/*", "the layer", MODULE_BYTES_MAX)?;
        check_layer(&module, layer)?;
        Ok(PulledPolicy { module, signature })
    }

    /// The digests of the manifest and of the layer of an artifact.
    ///
    /// # Errors
    /// If the registry cannot be reached or refuses, or the artifact is not a policy.
    pub fn resolve(&self, reference: &Reference) -> Result<Source, PullError> {
        let Reference { repository, version } = reference;
        let bytes = self.manifest(repository, &version.to_string())?;
        if let Version::Digest(expected) = version {
            check_digest("the manifest", &bytes, expected)?;
        }
        let (layer, _) = read_manifest(&bytes)?;
        Ok(Source { repository: repository.clone(), manifest: digest_of(&bytes), layer })
    }

    fn manifest(&self, repository: &Repository, version: &str) -> Result<Vec<u8>, PullError> {
        let rest = format!("manifests/{version}");
        self.get(repository, &rest, MANIFEST_TYPE, "the manifest", MANIFEST_BYTES_MAX)
    }

    fn get(
        &self,
        repository: &Repository,
        rest: &str,
        accept: &str,
        what: &str,
        max: usize,
    ) -> Result<Vec<u8>, PullError> {
        let url = self.url(repository, rest);
        let call = Call { method: "GET", url: &url, headers: &[("accept", accept)], body: None };
        let answer = self.send(repository, Access::Pull, &call)?;
        body(expect(&url, answer, &[200])?, &url, what, max)
    }

    /// Pushes an artifact under a tag.
    ///
    /// # Errors
    /// If the registry cannot be reached, or refuses.
    pub fn push(&self, target: &Target, artifact: &Artifact) -> Result<(), RegistryError> {
        let repository = &target.repository;
        for blob in [&artifact.config, &artifact.layer] {
            self.push_blob(repository, blob)?;
        }
        let url = self.url(repository, &format!("manifests/{}", target.tag));
        let headers = [("content-type", MANIFEST_TYPE)];
        let call = Call { method: "PUT", url: &url, headers: &headers, body: Some(&artifact.manifest) };
        expect(&url, self.send(repository, Access::Push, &call)?, &[201])?;
        Ok(())
    }

    fn push_blob(&self, repository: &Repository, blob: &[u8]) -> Result<(), RegistryError> {
        let digest = digest_of(blob);
        let url = self.url(repository, &format!("blobs/sha256:{digest}"));
        let call = Call { method: "HEAD", url: &url, headers: &[], body: None };
        if self.send(repository, Access::Push, &call)?.status() == 200 {
            return Ok(());
        }
        let url = self.url(repository, "blobs/uploads/");
        let call = Call { method: "POST", url: &url, headers: &[], body: Some(&[]) };
        let answer = expect(&url, self.send(repository, Access::Push, &call)?, &[202])?;
        let location = answer.headers().get("location").and_then(|value| value.to_str().ok());
        let to = location.and_then(|location| self.upload_url(repository, location, &digest));
        let to = to.ok_or_else(|| RegistryError::Answer {
            url: url.clone(),
            why: "the answer has no Location for the upload, or one on another host, to which Berth sends no credentials".to_owned(),
        })?;
        let headers = [("content-type", "application/octet-stream")];
        let call = Call { method: "PUT", url: &to, headers: &headers, body: Some(blob) };
        expect(&to, self.send(repository, Access::Push, &call)?, &[201])?;
        Ok(())
    }

    /// The address of an upload, which may be relative. `None` if it is of another host, which would get the credentials.
    fn upload_url(&self, repository: &Repository, location: &str, digest: &Digest) -> Option<String> {
        let base = format!("{}://{}", self.scheme, repository.api_host());
        let url = match location.strip_prefix('/') {
            Some(path) => format!("{base}/{path}"),
            None => location.strip_prefix(&format!("{base}/")).map(|path| format!("{base}/{path}"))?,
        };
        let separator = if url.contains('?') { '&' } else { '?' };
        Some(format!("{url}{separator}digest=sha256:{digest}"))
    }

    fn url(&self, repository: &Repository, rest: &str) -> String {
        format!("{}://{}/v2/{}/{rest}", self.scheme, repository.api_host(), repository.path())
    }

    /// Sends a request; if the registry demands it, again with a token or a password.
    fn send(
        &self,
        repository: &Repository,
        access: Access,
        call: &Call<'_>,
    ) -> Result<Response<Body>, RegistryError> {
        let path = repository.to_string();
        let known = self.accepted.lock().clone();
        let known = known.filter(|(of, for_access, _)| *of == path && *for_access == access);
        let mut answer = self.exchange(call, known.as_ref().map(|(_, _, value)| value.as_str()))?;
        if answer.status() != 401 {
            return Ok(answer);
        }
        // A host to which the registry has redirected gets no credentials.
        let is_own = answer.get_uri().authority().is_some_and(|authority| authority == repository.api_host());
        let lines: Vec<String> = answer
            .headers()
            .get_all("www-authenticate")
            .iter()
            .filter_map(|value| value.to_str().ok().map(str::to_owned))
            .collect();
        let challenges = lines.iter().filter_map(|line| parse_challenges(line).ok()).flatten();
        let challenges: Vec<ChallengeRef<'_>> = challenges.filter(|_| is_own).collect();
        let login = self.credentials.of(repository);
        let scheme = |name: &str| challenges.iter().find(|one| one.scheme.eq_ignore_ascii_case(name));
        let authorization = match (scheme("Bearer"), scheme("Basic"), login) {
            (Some(bearer), _, _) => format!("Bearer {}", self.token(bearer, repository, access, login)?),
            (None, Some(_), Some(login)) => basic(login),
            (None, Some(_), None) => return Err(refused(call.url, &mut answer, NO_CREDENTIALS)),
            (None, None, _) => return Err(refused(call.url, &mut answer, NO_SCHEME)),
        };
        let mut answer = self.exchange(call, Some(&authorization))?;
        match answer.status().as_u16() {
            401 | 403 => Err(refused(call.url, &mut answer, hint(login))),
            _ => {
                *self.accepted.lock() = Some((path, access, authorization));
                Ok(answer)
            }
        }
    }

    fn exchange(
        &self,
        call: &Call<'_>,
        authorization: Option<&str>,
    ) -> Result<Response<Body>, RegistryError> {
        let mut request = ureq::http::Request::builder().method(call.method).uri(call.url);
        for (name, value) in
            call.headers.iter().copied().chain(authorization.map(|value| ("authorization", value)))
        {
            request = request.header(name, value);
        }
        let run = || match call.body {
            Some(body) => self.agent.run(request.body(body)?),
            None => self.agent.run(request.body(())?),
        };
        run().map_err(|error| unreachable(call.url, &error))
    }

    /// A token of the service that the challenge names.
    fn token(
        &self,
        challenge: &ChallengeRef<'_>,
        repository: &Repository,
        access: Access,
        login: Option<&Login>,
    ) -> Result<String, RegistryError> {
        let parameter = |name: &str| {
            let found = challenge.params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.to_unescaped())
        };
        let answer_error =
            |url: &str, why: &str| RegistryError::Answer { url: url.to_owned(), why: why.to_owned() };
        let registry = self.url(repository, "");
        let realm = parameter("realm").ok_or_else(|| {
            answer_error(&registry, "the registry demands a token, but WWW-Authenticate has no realm")
        })?;
        // The credentials are sent to the realm.
        if self.scheme == "https" && !realm.starts_with("https://") {
            let why = format!("the token service {realm} has no TLS, so Berth sends it no credentials");
            return Err(answer_error(&registry, &why));
        }
        let scope = format!("repository:{}:{}", repository.path(), access.actions());
        let mut request = self.agent.get(&realm).query("scope", scope);
        if let Some(service) = parameter("service") {
            request = request.query("service", service);
        }
        if let Some(login) = login {
            request = request.header("authorization", basic(login));
        }
        let mut answer = request.call().map_err(|error| unreachable(&realm, &error))?;
        if matches!(answer.status().as_u16(), 401 | 403) {
            return Err(refused(&realm, &mut answer, hint(login)));
        }
        let mut answer = expect(&realm, answer, &[200])?;
        #[derive(Deserialize)]
        struct Token {
            token: Option<String>,
            access_token: Option<String>,
        }
        let text = answer.body_mut().with_config().limit(MESSAGE_BYTES_MAX).read_to_vec();
        let text = text.map_err(|error| unreachable(&realm, &error))?;
        let token = serde_json::from_slice::<Token>(&text).ok();
        token
            .and_then(|answer| answer.token.filter(|token| !token.is_empty()).or(answer.access_token))
            .filter(|token| token.bytes().all(|b| b.is_ascii_graphic()))
            .ok_or_else(|| answer_error(&realm, "the answer has no token"))
    }
}

fn basic(login: &Login) -> String {
    format!("Basic {}", BASE64.encode(format!("{}:{}", login.user, login.password)))
}

fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>, String> {
    let shown = path.display();
    let pem = berth_files::read(path, CA_BYTES_MAX)
        .map_err(|error| format!("the certificates for registries cannot be read: {shown}: {error}"))?;
    let certificates: Vec<_> = parse_pem(&pem)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(format!("{shown} has no certificate in PEM"));
    }
    Ok(certificates)
}

fn unreachable(url: &str, error: &ureq::Error) -> RegistryError {
    let mut error = error.to_string();
    // The names of rustls' errors.
    let hints = [
        (
            "InvalidContentType",
            "the registry answers without TLS: push to oci+http://…, and write http:// before its name in `fleet.repositories`",
        ),
        (
            "UnknownIssuer",
            "the CA of the registry's certificate is not trusted: name a PEM file with it in `--registry-ca FILE`, and on nodes in \
             `fleet.caFile`",
        ),
        (
            "CaUsedAsEndEntity",
            "the registry's certificate is a CA certificate, which a server must not use: give the registry one with \
             basicConstraints CA:FALSE, signed by a CA",
        ),
    ];
    if let Some((_, hint)) = hints.iter().find(|(name, _)| error.contains(name)) {
        error = format!("{error}; {hint}");
    }
    RegistryError::Unreachable { url: without_query(url).to_owned(), error }
}

/// The address without its query, which may have a secret.
fn without_query(url: &str) -> &str {
    url.split('?').next().unwrap_or_default()
}

fn expect(url: &str, mut answer: Response<Body>, statuses: &[u16]) -> Result<Response<Body>, RegistryError> {
    let status = answer.status().as_u16();
    if statuses.contains(&status) {
        return Ok(answer);
    }
    let message = message(&mut answer);
    Err(RegistryError::Status { url: without_query(url).to_owned(), status, message })
}

const WRONG_CREDENTIALS: &str = "it refuses the credentials; correct them in the file that `fleet.credentialsFile` or `--credentials` names";
const NO_CREDENTIALS: &str = "it demands credentials, and none are known for the repository; add `auths` for it to the file that \
     `fleet.credentialsFile` or `--credentials` names (credential helpers are not used)";
const NO_SCHEME: &str = "it offers no authentication that Berth knows (Bearer or Basic), or it has redirected to another host, which gets no credentials";

fn hint(login: Option<&Login>) -> &'static str {
    if login.is_some() { WRONG_CREDENTIALS } else { NO_CREDENTIALS }
}

fn refused(url: &str, answer: &mut Response<Body>, hint: &'static str) -> RegistryError {
    RegistryError::Unauthorized {
        url: without_query(url).to_owned(),
        status: answer.status().as_u16(),
        hint,
        message: message(answer),
    }
}

/// The words of the registry after a colon; empty if it has none.
fn message(answer: &mut Response<Body>) -> String {
    #[derive(Deserialize)]
    struct Errors {
        errors: Vec<Error>,
    }
    #[derive(Deserialize)]
    struct Error {
        code: Option<String>,
        message: Option<String>,
    }
    let text = answer.body_mut().with_config().limit(MESSAGE_BYTES_MAX).read_to_vec().unwrap_or_default();
    let first = serde_json::from_slice::<Errors>(&text).ok().and_then(|all| all.errors.into_iter().next());
    let words = first.and_then(|error| error.message.filter(|text| !text.is_empty()).or(error.code));
    let words = words.unwrap_or_default();
    let shown: String = words.chars().filter(|c| !c.is_control()).take(SHOWN_CHARACTERS_MAX).collect();
    if shown.is_empty() { shown } else { format!(": {shown}") }
}

fn body(mut answer: Response<Body>, url: &str, what: &str, max: usize) -> Result<Vec<u8>, PullError> {
    let read = answer.body_mut().with_config().limit(max as u64 + 1).read_to_vec();
    match read {
        Ok(bytes) if bytes.len() <= max => Ok(bytes),
        Ok(_) | Err(ureq::Error::BodyExceedsLimit(_)) => {
            Err(PullError::LongAnswer { what: what.to_owned(), max })
        }
        Err(error) => Err(unreachable(url, &error).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifact::tests::component;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{SocketAddr, TcpListener};
    use std::sync::mpsc::{Receiver, channel};

    /// A request as the server sees it.
    struct Seen {
        method: String,
        target: String,
        host: String,
        authorization: String,
    }

    /// The status with further header lines, and the body.
    type Answer = (String, Vec<u8>);

    fn ok(body: &[u8]) -> Answer {
        ("200 OK".to_owned(), body.to_vec())
    }

    fn challenge(text: &str) -> Answer {
        (format!("401 Unauthorized\r\nwww-authenticate: {text}"), Vec::new())
    }

    /// Serves one request a connection. Returns the address, and what was requested.
    fn serve(answer: impl Fn(&Seen) -> Answer + Send + 'static) -> (SocketAddr, Receiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, requests) = channel();
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let mut connection = connection.unwrap();
                let mut reader = BufReader::new(connection.try_clone().unwrap());
                let mut head = String::new();
                while reader.read_line(&mut head).unwrap() > 2 {}
                let field = |name: &str| {
                    let line = head.lines().find(|line| line.to_ascii_lowercase().starts_with(name));
                    line.and_then(|line| line.split_once(": "))
                        .map_or(String::new(), |(_, value)| value.to_owned())
                };
                reader
                    .take(field("content-length").parse().unwrap_or(0))
                    .read_to_end(&mut Vec::new())
                    .unwrap();
                let mut first = head.split(' ').map(str::to_owned);
                let seen = Seen {
                    method: first.next().unwrap(),
                    target: first.next().unwrap(),
                    host: field("host"),
                    authorization: field("authorization"),
                };
                let (status, body) = answer(&seen);
                let Seen { method, target, authorization, .. } = seen;
                let _ = sender.send(format!("{method} {target} {authorization}").trim_end().to_owned());
                let length = if method == "HEAD" { 0 } else { body.len() };
                let head =
                    format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
                // The client may have read enough.
                let _ = connection.write_all(head.as_bytes()).and_then(|()| connection.write_all(&body));
            }
        });
        (address, requests)
    }

    /// A client, and a repository of the server.
    fn client(address: SocketAddr, has_login: bool) -> (Registry, Repository) {
        let host = format!("localhost:{}", address.port());
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.json");
        let logins = format!(r#"{{"auths": {{"{host}": {{"username": "u", "password": "p"}}}}}}"#);
        std::fs::write(&file, if has_login { &logins } else { "{}" }).unwrap();
        let registry = Registry::new(true, Credentials::read(&file).unwrap(), None).unwrap();
        (registry, format!("{host}/gpu/a").parse().unwrap())
    }

    fn pull(
        registry: &Registry,
        repository: &Repository,
        artifact: &Artifact,
    ) -> Result<PulledPolicy, PullError> {
        registry.pull(repository, &artifact.digest(), &artifact.layer_digest())
    }

    fn packed() -> Artifact {
        Artifact::pack(component("a"), "a.wasm", None).unwrap()
    }

    #[test]
    fn a_token_is_fetched_with_the_credentials_and_an_object_store_gets_neither() {
        let artifact = packed();
        let (manifest, layer) = (artifact.manifest.clone(), artifact.layer.clone());
        let (store, of_store) = serve(move |_| ok(&layer));
        let (address, requests) = serve(move |seen| match (&seen.target, seen.authorization.as_str()) {
            (target, "Basic dTpw") if target.starts_with("/token") => ok(br#"{"token": "t0"}"#),
            (target, "Bearer t0") if target.contains("/manifests/") => ok(&manifest),
            (_, "Bearer t0") => {
                (format!("307 Temporary Redirect\r\nlocation: http://{store}/blob?signature=1"), Vec::new())
            }
            _ => challenge(&format!("Bearer realm=\"http://{}/token\",service=\"reg\"", seen.host)),
        });
        let (registry, repository) = client(address, true);
        assert_eq!(pull(&registry, &repository, &artifact).unwrap().module, artifact.layer);
        let requests: Vec<String> = requests.try_iter().collect();
        let manifest = format!("GET /v2/gpu/a/manifests/sha256:{}", artifact.digest());
        let token = "GET /token?scope=repository%3Agpu%2Fa%3Apull&service=reg Basic dTpw";
        assert_eq!(requests[..3], [manifest.clone(), token.to_owned(), format!("{manifest} Bearer t0")]);
        assert_eq!(requests.len(), 4, "the token is sent again at once: {requests:?}");
        assert_eq!(of_store.try_iter().collect::<Vec<_>>(), ["GET /blob?signature=1"]);
    }

    #[test]
    fn a_registry_may_ask_for_the_password_itself_and_without_one_the_error_says_so() {
        let artifact = packed();
        let (manifest, layer) = (artifact.manifest.clone(), artifact.layer.clone());
        let (address, _requests) = serve(move |seen| match seen.authorization.as_str() {
            "Basic dTpw" if seen.target.contains("/manifests/") => ok(&manifest),
            "Basic dTpw" => ok(&layer),
            _ => challenge("Basic realm=\"registry\""),
        });
        let (registry, repository) = client(address, true);
        pull(&registry, &repository, &artifact).unwrap();
        let (registry, repository) = client(address, false);
        let error = pull(&registry, &repository, &artifact).unwrap_err();
        assert!(error.may_succeed_later());
        let expected =
            "the registry answers 401: it demands credentials, and none are known for the repository";
        assert!(error.to_string().contains(expected), "{error}");
    }

    #[test]
    fn the_message_of_the_registry_is_shown_but_no_query() {
        let (address, _requests) = serve(|seen| match seen.target.starts_with("/v2/") {
            true => (
                format!("307 Temporary Redirect\r\nlocation: http://{}/blob?secret=1", seen.host),
                Vec::new(),
            ),
            false => {
                let errors =
                    br#"{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest\u001b[1m unknown"}]}"#;
                ("404 Not Found".to_owned(), errors.to_vec())
            }
        });
        let (registry, repository) = client(address, false);
        let error = pull(&registry, &repository, &packed()).unwrap_err().to_string();
        assert!(error.ends_with("the registry answers 404: manifest[1m unknown"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn an_answer_that_is_too_large_or_has_another_digest_is_refused() {
        let (address, _requests) = serve(|_| ok(&vec![b'x'; MANIFEST_BYTES_MAX + 1]));
        let (registry, repository) = client(address, false);
        assert!(matches!(pull(&registry, &repository, &packed()), Err(PullError::LongAnswer { .. })));
        let (address, _requests) = serve(|_| ok(b"x"));
        let (registry, repository) = client(address, false);
        assert!(matches!(pull(&registry, &repository, &packed()), Err(PullError::DigestMismatch { .. })));
    }

    #[test]
    fn what_the_registry_has_is_not_uploaded_again_and_no_other_host_gets_an_upload() {
        let artifact = packed();
        let config = format!("/v2/gpu/a/blobs/sha256:{}", digest_of(&artifact.config));
        let (address, requests) = serve(move |seen| match (seen.method.as_str(), seen.target.as_str()) {
            ("HEAD", target) if target == config => ok(b""),
            ("HEAD", _) => ("404 Not Found".to_owned(), Vec::new()),
            ("POST", _) => ("202 Accepted\r\nlocation: /v2/uploads/1?state=2".to_owned(), Vec::new()),
            _ => ("201 Created".to_owned(), Vec::new()),
        });
        let (registry, repository) = client(address, false);
        let target = Target { repository, tag: "1".into(), is_plain_http: true };
        registry.push(&target, &artifact).unwrap();
        let layer = artifact.layer_digest();
        let expected = [
            format!("HEAD /v2/gpu/a/blobs/sha256:{}", digest_of(&artifact.config)),
            format!("HEAD /v2/gpu/a/blobs/sha256:{layer}"),
            "POST /v2/gpu/a/blobs/uploads/".to_owned(),
            format!("PUT /v2/uploads/1?state=2&digest=sha256:{layer}"),
            "PUT /v2/gpu/a/manifests/1".to_owned(),
        ];
        assert_eq!(requests.try_iter().collect::<Vec<_>>(), expected);
        let to = |location: &str| registry.upload_url(&target.repository, location, &layer);
        assert_eq!(to("http://elsewhere/v2/uploads/1"), None);
        let own = format!("http://{}", target.repository.host());
        assert_eq!(to(&format!("{own}/u")), Some(format!("{own}/u?digest=sha256:{layer}")));
        assert_eq!(to(&format!("{own}.elsewhere/u")), None);
    }

    #[test]
    fn a_host_to_which_the_registry_redirects_gets_no_credentials_even_if_it_asks_for_them() {
        let (other, requests) = serve(|_| challenge("Basic realm=\"other\""));
        let (address, _own) = serve(move |_| {
            (format!("307 Temporary Redirect\r\nlocation: http://{other}/manifest"), Vec::new())
        });
        let (registry, repository) = client(address, true);
        let error = pull(&registry, &repository, &packed()).unwrap_err().to_string();
        assert!(error.contains("redirected to another host"), "{error}");
        assert_eq!(requests.try_iter().collect::<Vec<_>>(), ["GET /manifest"]);
    }

    /// Without a process-wide provider of rustls, as in `berth policy pack`.
    #[test]
    fn a_registry_with_tls_that_does_not_answer_is_an_error() {
        let (address, _requests) = serve(|_| ok(b""));
        let repository = format!("localhost:{}/gpu/a", address.port()).parse().unwrap();
        let registry = Registry::new(false, Credentials::default(), None).unwrap();
        let error = pull(&registry, &repository, &packed()).unwrap_err();
        assert!(error.may_succeed_later() && error.to_string().contains("https://localhost"), "{error}");
    }

    #[test]
    fn a_file_without_certificates_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ca.crt");
        std::fs::write(&file, "no PEM").unwrap();
        let error = Registry::new(false, Credentials::default(), Some(&file)).err().unwrap();
        assert!(error.contains("no certificate in PEM"), "{error}");
        assert!(Registry::new(false, Credentials::default(), Some(folder.path())).is_err());
    }
}
