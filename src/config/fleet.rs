//! `fleet`: whether the daemon reports its node in a GPUNode and carries out GPUMaintenances.

use super::checks::{Checks, invalid_because};
use serde::Deserialize;

/// The file's `fleet`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct FleetFile {
    enabled: Option<bool>,
}

impl FleetFile {
    /// Whether it is enabled.
    pub(super) fn is_enabled(&self, has_api_server: bool, checks: &mut Checks) -> bool {
        let is_enabled = self.enabled.unwrap_or(false);
        if is_enabled && !has_api_server {
            let reason = "its objects are in the API server, and none is configured: set `kubeconfig` or run in a pod with a \
                          service account, and do not set `apiServer: off`";
            checks.add(invalid_because("fleet.enabled", "true", reason));
        }
        is_enabled
    }
}

#[cfg(test)]
mod tests {
    use crate::{Config, FileConfig, ServeArgs};

    #[test]
    fn the_fleet_needs_an_api_server() {
        let settings = |yaml: &str| {
            let file = FileConfig::parse(yaml).map_err(|error| error.to_string())?;
            Config::merge(&ServeArgs::default(), file).map_err(|error| error.to_string())
        };
        assert!(!settings("").unwrap().cluster.fleet);
        assert!(settings("{kubeconfig: /kubeconfig, fleet: {enabled: true}}").unwrap().cluster.fleet);
        let error = settings("fleet: {enabled: true}").unwrap_err();
        assert!(error.contains("set `kubeconfig`"), "{error}");
    }
}
