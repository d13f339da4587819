//! Arguments that several commands take: a policy with its parameters, the author and reason of a change, JSON and
//! files.

use crate::client::{Client, query};
use crate::complete;
use crate::names::short_digest;
use crate::policy_version::newest_of_several;
use crate::usage::BadUsage;
use anyhow::{Context, anyhow, bail};
use berth_api::{Candidate, PolicyList};
use berth_kernel::policy::hooks::PARAMETERS_BYTES_MAX;
use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use serde_json::{Map, Value};
use std::io::Read;
use std::path::Path;

/// A policy and its parameters: arguments of `policy replay`, `shadow` and `try`.
#[derive(Args, Clone, Debug)]
pub struct CandidateArgs {
    /// Name, or name@ and at least 12 digits of its digest; a name alone is its shipped or newest version
    #[arg(add = ArgValueCandidates::new(complete::policies))]
    pub policy: String,
    /// The policy's parameters
    #[arg(long, value_name = "JSON|@FILE", default_value = "{}")]
    pub parameters: String,
}

impl CandidateArgs {
    pub(crate) fn candidate(&self, client: &Client) -> anyhow::Result<Candidate> {
        // No name of a policy has a dot or a slash.
        if self.policy.ends_with(".wasm") || self.policy.contains('/') {
            return Err(BadUsage(format!(
                "{:?} is a file, but the daemon calls only uploaded policies: `berth policy push {}` uploads it, then \
                 give the policy's name; `berth policy test` tests a file without a daemon",
                self.policy, self.policy
            ))
            .into());
        }
        let (policy, digest) = match self.policy.split_once('@') {
            Some((name, digest)) => (name.to_owned(), Some(digest.to_owned())),
            None => (self.policy.clone(), None),
        };
        let parameters: Map<String, Value> =
            serde_json::from_str(&read_parameters("--parameters", &self.parameters)?)?;
        let digest = match digest {
            Some(digest) => Some(digest),
            None => newest_uploaded(&policy, client)?,
        };
        Ok(Candidate { policy, digest, parameters })
    }
}

/// The digest of the newest version of a name that has several, all of them uploaded. In all other cases the daemon
/// knows which one is meant.
fn newest_uploaded(name: &str, client: &Client) -> anyhow::Result<Option<String>> {
    let PolicyList { items, .. } = client.get("/policies")?;
    if items.iter().any(|policy| policy.name == name && policy.shipped) {
        return Ok(None);
    }
    Ok(newest_of_several(&items, name).map(|newest| short_digest(&newest.digest).to_owned()))
}

/// The person for whom a change is made, and the reason.
#[derive(Args, Clone, Debug, Default)]
pub struct ReasonArgs {
    /// The person for whom the change is made; recorded after the name of the token
    #[arg(long, env = "BERTH_BY", value_name = "NAME")]
    pub by: Option<String>,
    /// The reason; recorded with the change
    #[arg(long, visible_alias = "why", default_value = "", hide_default_value = true, value_name = "TEXT")]
    pub reason: String,
}

impl ReasonArgs {
    /// As a query; empty if neither is given.
    pub(crate) fn query(&self) -> String {
        let reason = Some(self.reason.as_str()).filter(|reason| !reason.is_empty());
        query(&[("by", self.by.as_deref()), ("reason", reason)])
    }
}

/// The bytes of a file; `-` is standard input.
///
/// # Errors
/// If it cannot be read, or has more than `limit` bytes.
pub fn read_file(file: &Path, limit: u64) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let reading = || format!("cannot read {}", file.display());
    if file == Path::new("-") {
        std::io::stdin().take(limit + 1).read_to_end(&mut bytes).with_context(reading)?;
    } else {
        let opened = std::fs::File::open(file).with_context(reading)?;
        opened.take(limit + 1).read_to_end(&mut bytes).with_context(reading)?;
    }
    if u64::try_from(bytes.len())? > limit {
        bail!("{} is larger than the limit of {limit} bytes", file.display());
    }
    Ok(bytes)
}

/// Reads a JSON object, given as text or as `@` and a file name. `flag` names the flag in errors.
pub fn read_parameters(flag: &str, given: &str) -> anyhow::Result<String> {
    let object =
        |text: &str| serde_json::from_str::<Map<String, Value>>(text).map(|o| Value::Object(o).to_string());
    match given.strip_prefix('@') {
        None => object(given).map_err(|error| {
            let form = r#"write it as {"replicas": 4}, or give a file of it as @FILE"#;
            BadUsage(format!("{flag} is not a JSON object ({error}): {form}")).into()
        }),
        // Larger than the limit of parameters, which does not count white space.
        Some(file) => {
            let limit = 2 * u64::try_from(PARAMETERS_BYTES_MAX)?;
            let bytes = read_file(Path::new(file), limit)?;
            let text = String::from_utf8(bytes).with_context(|| format!("{file} is not text"))?;
            object(&text).map_err(|error| anyhow!("{flag}: {file} contains no JSON object: {error}"))
        }
    }
}
