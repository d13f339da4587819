//! The flags `--by` and `--reason` of commands that change something.

use super::client::escaped;
use clap::Args;

/// The person for whom a change is made, and the reason.
#[derive(Args, Clone, Debug, Default)]
pub struct ReasonArgs {
    /// The person for whom it is done; recorded after the name of the token
    #[arg(long, env = "BERTH_BY", value_name = "NAME")]
    pub by: Option<String>,
    /// Why; recorded with the change
    #[arg(long, visible_alias = "why", default_value = "", hide_default_value = true, value_name = "TEXT")]
    pub reason: String,
}

impl ReasonArgs {
    /// As a query; empty if neither is given.
    pub(super) fn query(&self) -> String {
        let by = self.by.as_deref().map(|by| format!("by={}", escaped(by)));
        let reason = (!self.reason.is_empty()).then(|| format!("reason={}", escaped(&self.reason)));
        let given: Vec<_> = by.into_iter().chain(reason).collect();
        if given.is_empty() { String::new() } else { format!("?{}", given.join("&")) }
    }
}
