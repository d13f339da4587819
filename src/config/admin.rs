//! `admin`: callers of the admin API, their rights, TLS and rate limits.

use super::checks::{BadSetting, Checks, address, bad, in_range};
use berth_http::{
    AdminAccess, KubernetesReviews, NAME_BYTES_MAX, NamedToken, RateLimits, Right, TlsFiles, TokenSource,
};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Most named tokens: each request is compared with all of them, and the file of each is checked.
const TOKENS_MAX: usize = 32;
/// Most names of client certificates.
const CLIENTS_MAX: usize = 256;
/// Most audiences of a review.
const AUDIENCES_MAX: usize = 8;
/// Highest rate limit, requests per second.
const PER_SECOND_MAX: u32 = 1_000_000;

/// `admin` in the file; the keys are documented at the settings that they become, in [`AdminAccess`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct AdminFile {
    socket: Option<PathBuf>,
    #[serde(default)]
    tokens: Vec<TokenFile>,
    tls: Option<TlsFile>,
    limits: Option<LimitsFile>,
    kubernetes: Option<KubernetesFile>,
}

/// One of `tokens`.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TokenFile {
    name: String,
    file: Option<PathBuf>,
    sha256: Option<String>,
    right: Right,
}

/// `tls`.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TlsFile {
    cert_file: PathBuf,
    key_file: PathBuf,
    client_ca_file: Option<PathBuf>,
    #[serde(default)]
    require_client_cert: bool,
    clients: Option<Vec<ClientFile>>,
    #[serde(default)]
    others_may: OthersMay,
}

/// `tls.othersMay`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum OthersMay {
    #[default]
    None,
    Read,
    Change,
}

/// One of `tls.clients`.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ClientFile {
    name: String,
    right: Right,
}

/// `limits`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct LimitsFile {
    reads_per_second: Option<u32>,
    changes_per_second: Option<u32>,
}

/// `kubernetes`; its presence turns it on.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct KubernetesFile {
    #[serde(default)]
    audiences: Vec<String>,
}

impl AdminFile {
    /// The access settings; `socket`, a flag, takes precedence.
    pub(super) fn resolve(self, socket: Option<PathBuf>, checks: &mut Checks) -> AdminAccess {
        AdminAccess {
            tokens: tokens(self.tokens, checks),
            tls: self.tls.map(|file| tls(file, checks)),
            socket: socket.or(self.socket).map(|path| checks.absolute_path("admin.socket", path)),
            limits: limits(&self.limits.unwrap_or_default(), checks),
            kubernetes: self.kubernetes.map(|file| kubernetes(file, checks)),
        }
    }
}

/// The address of the admin API. Without TLS only a loopback address, since a token could be read on the network.
pub(super) fn listen(text: &str, tls: bool) -> Result<SocketAddr, BadSetting> {
    let admin = address("adminListen", text)?;
    if !tls && !admin.ip().is_loopback() {
        let rule = "a loopback address, such as 127.0.0.1:9470, while there is no TLS (admin.tls in the \
                    configuration file)";
        return Err(bad("adminListen", text, rule));
    }
    Ok(admin)
}

fn tokens(file: Vec<TokenFile>, checks: &mut Checks) -> Vec<NamedToken> {
    checks.at_most("admin.tokens", file.len(), TOKENS_MAX, "tokens");
    let mut tokens: Vec<NamedToken> = Vec::with_capacity(file.len());
    for (at, file) in file.into_iter().enumerate() {
        let token = token(&format!("admin.tokens[{at}]"), file, &tokens, checks);
        tokens.extend(checks.ok(token));
    }
    tokens
}

fn token(
    at: &str,
    file: TokenFile,
    earlier: &[NamedToken],
    checks: &mut Checks,
) -> Result<NamedToken, BadSetting> {
    let TokenFile { name, file, sha256, right } = file;
    check_name(&format!("{at}.name"), &name)?;
    if is_reserved(&name) {
        let rule = "a name that is not reserved (admin, root, user-..., config, unknown, certificate:..., \
                    kubernetes:...)";
        return Err(bad(format!("{at}.name"), &name, rule));
    }
    if earlier.iter().any(|token| token.name == name) {
        return Err(bad(format!("{at}.name"), &name, "a name that is used only once"));
    }
    let source = match (file, sha256) {
        (Some(file), None) => TokenSource::File(checks.absolute_path(&format!("{at}.file"), file)),
        (None, Some(text)) => TokenSource::Sha256(hash(&text).ok_or_else(|| {
            // The value is hidden: it may be a token, given by mistake.
            let what = format!(
                "the hash of token {name:?} is not allowed (value hidden); expected 64 hex digits, as printed by \
                 `printf %s TOKEN | sha256sum`"
            );
            BadSetting::new(format!("{at}.sha256"), what)
        })?),
        _ => {
            return Err(BadSetting::new(at, format!("token {name:?} needs exactly one of file and sha256")));
        }
    };
    Ok(NamedToken { name, right, source })
}

fn tls(file: TlsFile, checks: &mut Checks) -> TlsFiles {
    let TlsFile { cert_file, key_file, client_ca_file, require_client_cert, clients, others_may } = file;
    let needs_ca = require_client_cert || clients.is_some() || others_may != OthersMay::None;
    if client_ca_file.is_none() && needs_ca {
        let what = "missing; requireClientCert, clients and othersMay need a CA file";
        checks.add(BadSetting::new("admin.tls.clientCaFile", what));
    }
    TlsFiles {
        cert: checks.absolute_path("admin.tls.certFile", cert_file),
        key: checks.absolute_path("admin.tls.keyFile", key_file),
        client_ca: client_ca_file.map(|path| checks.absolute_path("admin.tls.clientCaFile", path)),
        require_client_cert,
        clients: clients.map(|list| rights(list, checks)),
        others_may: match others_may {
            OthersMay::None => None,
            OthersMay::Read => Some(Right::Read),
            OthersMay::Change => Some(Right::Change),
        },
    }
}

fn rights(list: Vec<ClientFile>, checks: &mut Checks) -> BTreeMap<String, Right> {
    checks.at_most("admin.tls.clients", list.len(), CLIENTS_MAX, "names");
    let mut rights = BTreeMap::new();
    for (at, ClientFile { name, right }) in list.into_iter().enumerate() {
        let setting = format!("admin.tls.clients[{at}].name");
        checks.ok(check_name(&setting, &name));
        if rights.insert(name.clone(), right).is_some() {
            checks.add(bad(setting, &name, "a name that is used only once"));
        }
    }
    rights
}

fn limits(file: &LimitsFile, checks: &mut Checks) -> RateLimits {
    let mut rate = |key, setting: Option<u32>, default| {
        let value = setting.unwrap_or(default);
        checks.ok(in_range(format!("admin.limits.{key}"), value, 1..=PER_SECOND_MAX));
        value
    };
    let defaults = RateLimits::default();
    RateLimits {
        reads_per_second: rate("readsPerSecond", file.reads_per_second, defaults.reads_per_second),
        changes_per_second: rate("changesPerSecond", file.changes_per_second, defaults.changes_per_second),
    }
}

fn kubernetes(file: KubernetesFile, checks: &mut Checks) -> KubernetesReviews {
    let audiences = file.audiences;
    checks.at_most("admin.kubernetes.audiences", audiences.len(), AUDIENCES_MAX, "audiences");
    for (at, name) in audiences.iter().enumerate() {
        if name.is_empty() || name.chars().any(char::is_control) {
            let rule = "a non-empty name without control characters, such as berth";
            checks.add(bad(format!("admin.kubernetes.audiences[{at}]"), name, rule));
        }
    }
    KubernetesReviews { audiences }
}

fn check_name(setting: &str, name: &str) -> Result<(), BadSetting> {
    if (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control) {
        return Ok(());
    }
    Err(bad(setting, name, format!("1 to {NAME_BYTES_MAX} bytes without control characters")))
}

/// Caller names that records use for changes without a named token: the first token, users of the Unix socket, the
/// configuration, unknown callers, certificates and users of the cluster.
fn is_reserved(name: &str) -> bool {
    let lower = name.to_lowercase();
    matches!(lower.as_str(), "admin" | "root" | "config" | "unknown")
        || ["user-", "certificate:", "kubernetes:"].iter().any(|prefix| lower.starts_with(prefix))
}

fn hash(text: &str) -> Option<[u8; 32]> {
    if !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let starts = (0..text.len()).step_by(2);
    let bytes =
        starts.map(|at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok()).collect::<Option<Vec<_>>>()?;
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests;
