//! `dra`: the DRA driver, and through which API of the kubelet new GPUs are granted.

use super::checks::{Checks, bad, invalid_because};
use berth_kernel::ids::names::is_dns_label;
use berth_kernel::sharing::via::KubeletApi;
use berth_kubelet::dra::DRIVER_NAME_BYTES_MAX;
use serde::Deserialize;

/// The driver's name where none is given: that of NVIDIA's DRA driver, so that claims and DeviceClasses written for that one
/// work.
const DRIVER: &str = "gpu.nvidia.com";

/// The DRA driver; a change needs a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraSettings {
    /// Whether the driver is registered.
    pub enabled: bool,
    /// The driver's name.
    pub driver: String,
}

/// The file's `dra`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct DraFile {
    enabled: Option<bool>,
    driver: Option<String>,
    via: Option<ViaMode>,
}

/// `dra.via`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
enum ViaMode {
    DevicePlugin,
    Dra,
}

impl DraFile {
    /// The driver, and the API of new GPUs.
    pub(super) fn resolve(self, has_api_server: bool, checks: &mut Checks) -> (DraSettings, KubeletApi) {
        let driver = self.driver.unwrap_or_else(|| DRIVER.to_owned());
        if !is_driver(&driver) {
            let rule = "the name of a DNS subdomain in lower case that begins with a letter, of at most 63 characters";
            checks.add(bad("dra.driver", &driver, rule));
        }
        let enabled = self.enabled.unwrap_or(false);
        let via = match self.via {
            None | Some(ViaMode::DevicePlugin) => KubeletApi::DevicePlugin,
            Some(ViaMode::Dra) => KubeletApi::Dra,
        };
        if enabled && !has_api_server {
            let reason = "claims are read from the API server, and none is configured: set `kubeconfig` or run in a pod with a \
                          service account, and do not set `apiServer: off`";
            checks.add(invalid_because("dra.enabled", "true", reason));
        }
        if via == KubeletApi::Dra && !enabled {
            checks.add(bad(
                "dra.via",
                via.as_str(),
                "`dra.enabled: true`, since no claim is prepared without it",
            ));
        }
        (DraSettings { enabled, driver }, via)
    }
}

/// Whether Kubernetes accepts it as the name of a driver (`apis/resource/validation`: `validateDriverName`).
fn is_driver(name: &str) -> bool {
    // A CDI vendor, which the driver is, begins with a letter (cdi, `parser.go`).
    name.len() <= DRIVER_NAME_BYTES_MAX
        && name.split('.').all(is_dns_label)
        && name.starts_with(|c: char| c.is_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use crate::{Config, FileConfig, ServeArgs};
    use berth_kernel::sharing::via::KubeletApi;

    fn settings(yaml: &str) -> Result<Config, String> {
        let file = FileConfig::parse(yaml).map_err(|error| error.to_string())?;
        Config::merge(&ServeArgs::default(), file).map_err(|error| error.to_string())
    }

    #[test]
    fn the_driver_is_off_unless_it_is_enabled() {
        let config = settings("").unwrap();
        assert!(!config.dra.enabled);
        assert_eq!(config.rules.via, KubeletApi::DevicePlugin);
        let config = settings("{kubeconfig: /kubeconfig, dra: {enabled: true, via: dra}}").unwrap();
        assert_eq!((config.dra.driver.as_str(), config.rules.via), ("gpu.nvidia.com", KubeletApi::Dra));
    }

    #[test]
    fn wrong_settings_are_refused() {
        for (yaml, expected) in [
            ("dra: {enabled: true}", "set `kubeconfig`"),
            ("dra: {via: dra}", "dra.enabled: true"),
            ("dra: {driver: GPU}", "DNS subdomain"),
            ("dra: {driver: a..b}", "DNS subdomain"),
            ("dra: {driver: 1gpu.example.com}", "begins with a letter"),
            ("dra: {via: claims}", "via"),
        ] {
            let error = settings(yaml).unwrap_err();
            assert!(error.contains(expected), "{yaml}: {error}");
        }
    }
}
