//! A policy with its parameters, as `policy replay`, `shadow` and `try` take them.

use super::parameters::read_parameters;
use super::usage::BadUsage;
use berth_api::Candidate;
use clap::Args;
use serde_json::{Map, Value};

/// A policy and its parameters.
#[derive(Args, Clone, Debug)]
pub struct CandidateArgs {
    /// Name, or name@ and the beginning of its digest
    pub policy: String,
    /// Its parameters
    #[arg(long, value_name = "JSON|@FILE", default_value = "{}")]
    pub parameters: String,
}

impl CandidateArgs {
    pub(super) fn candidate(&self) -> anyhow::Result<Candidate> {
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
        Ok(Candidate { policy, digest, parameters })
    }
}
