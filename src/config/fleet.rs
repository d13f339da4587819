//! `fleet`: whether the daemon reports its node in a GPUNode and carries out GPUMaintenances, and where the policies that a GPUNode
//! names are pulled from.

use super::checks::{BadSetting, Checks, bad, invalid_because};
use berth_oci::{PullSettings, RepositoryPrefix};
use serde::Deserialize;
use std::path::PathBuf;

/// Most repositories.
const REPOSITORIES_MAX: usize = 32;
/// Most folders of layouts.
const LAYOUTS_MAX: usize = 8;

/// The file's `fleet`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct FleetFile {
    enabled: Option<bool>,
    repositories: Option<Vec<String>>,
    layouts: Option<Vec<PathBuf>>,
    credentials_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
}

impl FleetFile {
    /// Where policies are pulled from; `None` if the fleet is not enabled.
    pub(super) fn settings(self, has_api_server: bool, checks: &mut Checks) -> Option<PullSettings> {
        let Self { enabled, repositories, layouts, credentials_file, ca_file } = self;
        let is_enabled = enabled.unwrap_or(false);
        if is_enabled && !has_api_server {
            let reason = "its objects are in the API server, and none is configured: set `kubeconfig` or run in a pod with a \
                          service account, and do not set `apiServer: off`";
            checks.add(invalid_because("fleet.enabled", "true", reason));
        }
        let (repositories, layouts) = (repositories.unwrap_or_default(), layouts.unwrap_or_default());
        if repositories.is_empty() && (!layouts.is_empty() || credentials_file.is_some() || ca_file.is_some())
        {
            let what = "no repository is set, so no policy is pulled, not even from fleet.layouts: add a registry or the beginning of its \
                        repositories' names, such as registry.example/gpu, or remove fleet.layouts, fleet.credentialsFile and fleet.caFile";
            checks.add(BadSetting::new("fleet.repositories", what));
        }
        checks.at_most("fleet.repositories", repositories.len(), REPOSITORIES_MAX, "repositories");
        checks.at_most("fleet.layouts", layouts.len(), LAYOUTS_MAX, "folders");
        let repositories = repositories.iter().enumerate().filter_map(|(at, text)| {
            let parsed = text.parse::<RepositoryPrefix>();
            checks.ok(parsed.map_err(|rule| bad(format!("fleet.repositories[{at}]"), text, rule)))
        });
        let repositories: Vec<_> = repositories.collect();
        let layouts = layouts.into_iter().map(|path| checks.absolute_path("fleet.layouts", path)).collect();
        let credentials_file =
            credentials_file.map(|path| checks.absolute_path("fleet.credentialsFile", path));
        let ca_file = ca_file.map(|path| checks.absolute_path("fleet.caFile", path));
        is_enabled.then_some(PullSettings { repositories, layouts, credentials_file, ca_file })
    }
}

#[cfg(test)]
mod tests {
    use crate::{Config, FileConfig, ServeArgs};

    fn settings(yaml: &str) -> Result<Config, String> {
        let file = FileConfig::parse(yaml).map_err(|error| error.to_string())?;
        Config::merge(&ServeArgs::default(), file).map_err(|error| error.to_string())
    }

    #[test]
    fn the_fleet_needs_an_api_server() {
        assert_eq!(settings("").unwrap().cluster.fleet, None);
        assert!(
            settings("{kubeconfig: /kubeconfig, fleet: {enabled: true}}").unwrap().cluster.fleet.is_some()
        );
        let error = settings("fleet: {enabled: true}").unwrap_err();
        assert!(error.contains("set `kubeconfig`"), "{error}");
    }

    #[test]
    fn repositories_are_checked_even_if_the_fleet_is_off() {
        let fleet = "kubeconfig: /kubeconfig\nfleet: {enabled: true, repositories: ['http://reg.example:5000/gpu/'], \
                     layouts: [/policies], credentialsFile: /c, caFile: /ca}";
        let fleet = settings(fleet).unwrap().cluster.fleet.unwrap();
        assert_eq!(fleet.repositories[0].to_string(), "http://reg.example:5000/gpu");
        for (bad, expected) in [
            ("repositories: ['reg.example/gpu:1']", "fleet.repositories[0]"),
            ("repositories: [reg.example/A]", "beginning of the names"),
            ("layouts: [/a]", "no policy is pulled"),
            ("caFile: /a", "no policy is pulled"),
            ("layouts: [\"a\\nb\"]", "fleet.layouts"),
            ("caFile: \"a\\nb\"", "fleet.caFile"),
        ] {
            let error = settings(&format!("fleet: {{{bad}}}")).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
