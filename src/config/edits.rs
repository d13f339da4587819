//! `containerEdits`: how granted devices are passed to containers, with the operator's own mounts and devices.

use super::checks::{
    BadSetting, Checks, PATH_BYTES_MAX, PLAIN_PATH, bad, by_rule, invalid_because, parse_keyword,
};
use super::nvidia::args::{NvidiaArgs, boolish, non_empty, path};
use berth_files::yaml::shown;
use berth_kernel::hardware::device_nodes::MOUNTED_ROOT;
use berth_kernel::ids::names::Resource;
use berth_kubelet::{DeviceIdStrategy, DeviceListStrategy, Edits, Feature, MpsEdits, ResourceEdits};
use clap::Args;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Most mounts, and most devices, of one resource.
const EDITS_PER_RESOURCE_MAX: usize = 64;

/// Container edits, by the names of NVIDIA's device plugin.
#[derive(Args, Clone, Debug, Default)]
pub struct EditArgs {
    /// How GPUs are passed to containers: auto (what works on this node), or envvar, volume-mounts, cdi-annotations,
    /// cdi-cri; several of these with commas [default: auto]
    #[arg(long, env = "DEVICE_LIST_STRATEGY", hide_env = true, hide_short_help = true, value_name = "LIST", value_parser = by_rule(|list| strategy(list.split(',').map(str::trim))))]
    pub device_list_strategy: Vec<String>,
    /// Name GPUs by uuid or index [default: uuid]
    #[arg(long, env = "DEVICE_ID_STRATEGY", hide_env = true, hide_short_help = true, value_name = "STRATEGY", value_parser = by_rule(id_strategy))]
    pub device_id_strategy: Option<String>,
    /// Pass the /dev/nvidia* nodes, for nodes where the CPU manager resets container devices
    #[arg(long, env = "PASS_DEVICE_SPECS", hide_env = true, hide_short_help = true, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", value_parser = boolish)]
    pub pass_device_specs: Option<bool>,
    /// Where the NVIDIA driver is installed on the host [default: /]
    #[arg(long, alias = "driver-root", env = "NVIDIA_DRIVER_ROOT", hide_env = true, hide_short_help = true, value_name = "DIR", value_parser = path)]
    pub nvidia_driver_root: Option<PathBuf>,
}

/// The file's `containerEdits`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct EditsFile {
    device_list_strategy: Option<Vec<String>>,
    device_id_strategy: Option<String>,
    pass_device_specs: Option<bool>,
    nvidia_driver_root: Option<PathBuf>,
    nvidia_dev_root: Option<PathBuf>,
    gdrcopy_enabled: Option<bool>,
    gds_enabled: Option<bool>,
    mofed_enabled: Option<bool>,
    cdi_kind: Option<String>,
    cdi_annotation_prefix: Option<String>,
    resources: Option<BTreeMap<String, ResourceEdits>>,
}

impl EditsFile {
    /// These edits, with the keys of `base` that they lack.
    pub(super) fn overlay(self, base: Self) -> Self {
        Self {
            device_list_strategy: self.device_list_strategy.or(base.device_list_strategy),
            device_id_strategy: self.device_id_strategy.or(base.device_id_strategy),
            pass_device_specs: self.pass_device_specs.or(base.pass_device_specs),
            nvidia_driver_root: self.nvidia_driver_root.or(base.nvidia_driver_root),
            nvidia_dev_root: self.nvidia_dev_root.or(base.nvidia_dev_root),
            gdrcopy_enabled: self.gdrcopy_enabled.or(base.gdrcopy_enabled),
            gds_enabled: self.gds_enabled.or(base.gds_enabled),
            mofed_enabled: self.mofed_enabled.or(base.mofed_enabled),
            cdi_kind: self.cdi_kind.or(base.cdi_kind),
            cdi_annotation_prefix: self.cdi_annotation_prefix.or(base.cdi_annotation_prefix),
            resources: self.resources.or(base.resources),
        }
    }

    /// The edits of flags, environment and file, in this order of precedence, and whether the strategy is `auto`.
    pub(super) fn resolve(self, args: &EditArgs, nvidia: &NvidiaArgs, checks: &mut Checks) -> (Edits, bool) {
        let file = self;
        let keywords = match args.device_list_strategy.as_slice() {
            [] => file.device_list_strategy.unwrap_or_else(|| vec![AUTO.into()]),
            lists => lists.iter().flat_map(|l| l.split(',')).map(|w| w.trim().to_owned()).collect(),
        };
        let strategies = checks.ok(strategy(keywords.iter().map(String::as_str))).flatten();
        let id_keyword = args.device_id_strategy.clone().or(file.device_id_strategy);
        let id_strategy = id_keyword.and_then(|keyword| checks.ok(id_strategy(&keyword)));
        let cdi_kind = file.cdi_kind.unwrap_or_else(|| "nvidia.com/gpu".into());
        if let Err(error) = Resource::parse(&cdi_kind) {
            checks.add(invalid_because("containerEdits.cdiKind", &cdi_kind, error.rule));
        }
        let mut resources = BTreeMap::new();
        for (name, edits) in file.resources.unwrap_or_default() {
            let at = format!("containerEdits.resources[{}]", shown(&name));
            check_resource_edits(&at, &edits, checks);
            let resource = Resource::parse(&name).map_err(|e| invalid_because(at, &name, e.rule));
            resources.extend(checks.ok(resource).map(|resource| (resource, edits)));
        }
        let driver_root = non_empty(args.nvidia_driver_root.as_ref())
            .or_else(|| non_empty(file.nvidia_driver_root.as_ref()))
            .unwrap_or(Path::new("/"));
        let driver_root = checks.plain_path("containerEdits.nvidiaDriverRoot", driver_root.to_owned());
        let dev_root =
            non_empty(nvidia.dev_root.as_ref()).or_else(|| non_empty(file.nvidia_dev_root.as_ref()));
        let dev_root =
            dev_root.map(|root| checks.plain_path("containerEdits.nvidiaDevRoot", root.to_owned()));
        let driver_root_in_container =
            non_empty(nvidia.driver_root_ctr_path.as_ref()).unwrap_or(Path::new(MOUNTED_ROOT));
        let features = [
            (Feature::Gdrcopy, nvidia.gdrcopy_enabled.or(file.gdrcopy_enabled)),
            (Feature::Gds, nvidia.gds_enabled.or(file.gds_enabled)),
            (Feature::Mofed, nvidia.mofed_enabled.or(file.mofed_enabled)),
        ];
        let features = features.into_iter().filter(|(_, enabled)| *enabled == Some(true));
        let prefix = nvidia.cdi_annotation_prefix.clone().filter(|prefix| !prefix.is_empty());
        let is_auto = strategies.is_none();
        let edits = Edits {
            // With `auto` those of simulated GPUs, until others are resolved.
            strategies: strategies.unwrap_or_else(|| Edits::default().strategies),
            id_strategy: id_strategy.unwrap_or_default(),
            pass_device_specs: args.pass_device_specs.or(file.pass_device_specs).unwrap_or(false),
            driver_root,
            driver_root_in_container: driver_root_in_container.to_owned(),
            dev_root,
            features: features.map(|(feature, _)| feature).collect(),
            cdi_kind,
            cdi_annotation_prefix: prefix
                .or(file.cdi_annotation_prefix)
                .unwrap_or_else(|| "cdi.k8s.io/".into()),
            resources,
        };
        (edits, is_auto)
    }
}

/// The keywords of `deviceListStrategy`.
const STRATEGIES: [(&str, DeviceListStrategy); 4] = [
    ("envvar", DeviceListStrategy::Envvar),
    ("volume-mounts", DeviceListStrategy::VolumeMounts),
    ("cdi-annotations", DeviceListStrategy::CdiAnnotations),
    ("cdi-cri", DeviceListStrategy::CdiCri),
];

/// The keyword for the strategy that works on the node.
const AUTO: &str = "auto";

/// The strategies; `None` is `auto`, which stands alone.
pub(super) fn strategy<'a>(
    keywords: impl Iterator<Item = &'a str>,
) -> Result<Option<BTreeSet<DeviceListStrategy>>, BadSetting> {
    const SETTING: &str = "containerEdits.deviceListStrategy";
    let keywords: Vec<&str> = keywords.collect();
    if keywords == [AUTO] {
        return Ok(None);
    }
    let known: Vec<_> =
        STRATEGIES.map(|(name, strategy)| (name, Some(strategy))).into_iter().chain([(AUTO, None)]).collect();
    let strategies = keywords.iter().map(|keyword| parse_keyword(SETTING, keyword, &known));
    let strategies: BTreeSet<Option<DeviceListStrategy>> = strategies.collect::<Result<_, _>>()?;
    if strategies.is_empty() || strategies.contains(&None) {
        let rule = "auto, or at least one of envvar, volume-mounts, cdi-annotations, cdi-cri";
        return Err(bad(SETTING, &keywords.join(","), rule));
    }
    Ok(Some(strategies.into_iter().flatten().collect()))
}

pub(super) fn id_strategy(keyword: &str) -> Result<DeviceIdStrategy, BadSetting> {
    let known = [("uuid", DeviceIdStrategy::Uuid), ("index", DeviceIdStrategy::Index)];
    parse_keyword("containerEdits.deviceIdStrategy", keyword, &known)
}

fn check_resource_edits(at: &str, edits: &ResourceEdits, checks: &mut Checks) {
    checks.at_most(&format!("{at}.mounts"), edits.mounts.len(), EDITS_PER_RESOURCE_MAX, "mounts");
    checks.at_most(&format!("{at}.devices"), edits.devices.len(), EDITS_PER_RESOURCE_MAX, "devices");
    let mut check_path = |setting: String, path: &str| {
        if !path.starts_with('/') || path.contains("/../") || path.ends_with("/..") {
            checks.add(bad(setting, path, "an absolute path without .."));
        } else if path.len() > PATH_BYTES_MAX || path.chars().any(char::is_control) {
            checks.add(bad(setting, path, PLAIN_PATH));
        }
    };
    for (n, mount) in edits.mounts.iter().enumerate() {
        check_path(format!("{at}.mounts[{n}].hostPath"), &mount.host_path);
        check_path(format!("{at}.mounts[{n}].containerPath"), &mount.container_path);
    }
    for (n, device) in edits.devices.iter().enumerate() {
        check_path(format!("{at}.devices[{n}].hostPath"), &device.host_path);
        if let Some(container_path) = &device.container_path {
            check_path(format!("{at}.devices[{n}].containerPath"), container_path);
        }
    }
    for (key, path) in edits.mps.iter().flat_map(MpsEdits::paths) {
        check_path(format!("{at}.mps.{key}"), path);
    }
    for (n, device) in edits.devices.iter().enumerate() {
        let permissions = &device.permissions;
        if permissions.is_empty() || !permissions.chars().all(|c| "rwm".contains(c)) {
            let rule = "a combination of the letters r, w and m";
            checks.add(bad(format!("{at}.devices[{n}].permissions"), permissions, rule));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, FileConfig, ServeArgs};

    const SHARED: &str = "nvidia.com/gpu.shared";

    fn edits(yaml: &str) -> Result<Edits, String> {
        let file =
            FileConfig::parse(&format!("containerEdits: {{resources: {{{SHARED}: {{mps: {yaml}}}}}}}"))
                .map_err(|e| e.to_string())?;
        Config::merge(&ServeArgs::default(), file).map(|c| c.containers.edits).map_err(|e| e.to_string())
    }

    #[test]
    fn the_configuration_names_the_daemons_folders() {
        let edits = edits("{pipeDirectory: /run/mps, containerPipeDirectory: /mps}").unwrap();
        let shared = Resource::parse(SHARED).unwrap();
        let mps = edits.resources[&shared].mps.clone().unwrap();
        assert_eq!((mps.inner_pipe_directory(), mps.shm.as_str()), ("/mps", "/dev/shm"));
        assert_eq!(edits.mps_sockets()[&shared], Path::new("/run/mps/control"));
        assert!(Edits::default().mps_sockets().is_empty());
    }

    #[test]
    fn a_wrong_configuration_is_refused() {
        for (yaml, expected) in [
            ("{}", "pipeDirectory"),
            ("{pipeDirectory: run/mps}", "absolute"),
            ("{pipeDirectory: /run/mps, shm: /a/../b}", "absolute"),
            ("{pipeDirectory: /run/mps, pipes: /x}", "pipes"),
        ] {
            let error = edits(yaml).unwrap_err();
            assert!(error.contains(expected), "{yaml}: {error}");
        }
    }
}
