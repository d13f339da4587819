//! `containerEdits`: how granted devices are passed to containers, with the operator's own mounts and devices.

use super::args::{ServeArgs, non_empty};
use super::checks::{BadSetting, Checks, PATH_BYTES_MAX, PLAIN_PATH, bad, bad_because, parse_keyword};
use super::nvidia;
use berth_files::yaml::shown;
use berth_kernel::names::Resource;
use berth_kubelet::{DeviceIdStrategy, DeviceListStrategy, Edits, Feature, MpsEdits, ResourceEdits};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Most mounts, and most devices, of one resource.
const EDITS_PER_RESOURCE_MAX: usize = 64;

/// A notice if a flag or variable selects CDI, since NVIDIA's plugin writes the specification and Berth does not.
pub(super) fn cdi_notice(strategies: &[String]) -> Option<String> {
    let keywords = strategies.iter().flat_map(|list| list.split(','));
    let uses_cdi = keywords.map(str::trim).any(|keyword| keyword.starts_with("cdi-"));
    uses_cdi.then(|| format!("DEVICE_LIST_STRATEGY={}: {}", strategies.join(","), nvidia::CDI))
}

/// The file's `containerEdits`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EditsFile {
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

    /// The edits of flags, environment and file, in this order of precedence.
    pub(super) fn resolve(self, args: &ServeArgs, checks: &mut Checks) -> Edits {
        let file = self;
        let (args, nvidia) = (&args.edits, &args.nvidia);
        let keywords = match args.device_list_strategy.as_slice() {
            [] => file.device_list_strategy.unwrap_or_else(|| vec!["envvar".into()]),
            lists => lists.iter().flat_map(|l| l.split(',')).map(|w| w.trim().to_owned()).collect(),
        };
        let strategies = checks.ok(strategies(keywords.iter().map(String::as_str)));
        let id_strategy = args.device_id_strategy.clone().or(file.device_id_strategy);
        let id_strategy = id_strategy.and_then(|keyword| checks.ok(self::id_strategy(&keyword)));
        let cdi_kind = file.cdi_kind.unwrap_or_else(|| "nvidia.com/gpu".into());
        if let Err(error) = Resource::parse(&cdi_kind) {
            checks.add(bad_because("containerEdits.cdiKind", &cdi_kind, error.rule));
        }
        let mut resources = BTreeMap::new();
        for (name, edits) in file.resources.unwrap_or_default() {
            let at = format!("containerEdits.resources[{}]", shown(&name));
            check_resource_edits(&at, &edits, checks);
            let resource = Resource::parse(&name).map_err(|e| bad_because(at, &name, e.rule));
            resources.extend(checks.ok(resource).map(|resource| (resource, edits)));
        }
        let path = |flag: &Option<PathBuf>, file: &Option<PathBuf>| {
            non_empty(flag.as_ref()).or_else(|| non_empty(file.as_ref())).map(Path::to_path_buf)
        };
        let driver_root = path(&args.nvidia_driver_root, &file.nvidia_driver_root);
        let driver_root =
            checks.plain_path("containerEdits.nvidiaDriverRoot", driver_root.unwrap_or_else(|| "/".into()));
        let dev_root = path(&nvidia.dev_root, &file.nvidia_dev_root);
        let dev_root = checks
            .plain_path("containerEdits.nvidiaDevRoot", dev_root.unwrap_or_else(|| driver_root.clone()));
        let features = [
            (Feature::Gdrcopy, nvidia.gdrcopy_enabled.or(file.gdrcopy_enabled)),
            (Feature::Gds, nvidia.gds_enabled.or(file.gds_enabled)),
            (Feature::Mofed, nvidia.mofed_enabled.or(file.mofed_enabled)),
        ];
        let features = features.into_iter().filter(|(_, enabled)| *enabled == Some(true));
        let prefix = nvidia.cdi_annotation_prefix.clone().filter(|prefix| !prefix.is_empty());
        Edits {
            strategies: strategies.unwrap_or_default(),
            id_strategy: id_strategy.unwrap_or_default(),
            pass_device_specs: args.pass_device_specs.or(file.pass_device_specs).unwrap_or(false),
            driver_root,
            dev_root,
            features: features.map(|(feature, _)| feature).collect(),
            cdi_kind,
            cdi_annotation_prefix: prefix
                .or(file.cdi_annotation_prefix)
                .unwrap_or_else(|| "cdi.k8s.io/".into()),
            resources,
        }
    }
}

/// The keywords of `deviceListStrategy`.
const STRATEGIES: [(&str, DeviceListStrategy); 4] = [
    ("envvar", DeviceListStrategy::Envvar),
    ("volume-mounts", DeviceListStrategy::VolumeMounts),
    ("cdi-annotations", DeviceListStrategy::CdiAnnotations),
    ("cdi-cri", DeviceListStrategy::CdiCri),
];

pub(super) fn strategies<'a>(
    keywords: impl Iterator<Item = &'a str>,
) -> Result<BTreeSet<DeviceListStrategy>, BadSetting> {
    let strategies: BTreeSet<_> = keywords.map(strategy).collect::<Result<_, _>>()?;
    if strategies.is_empty() {
        let rule = "at least one of envvar, volume-mounts, cdi-annotations, cdi-cri";
        return Err(bad("containerEdits.deviceListStrategy", "", rule));
    }
    Ok(strategies)
}

fn strategy(keyword: &str) -> Result<DeviceListStrategy, BadSetting> {
    parse_keyword("containerEdits.deviceListStrategy", keyword, &STRATEGIES)
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
        let p = &device.permissions;
        if p.is_empty() || !p.chars().all(|c| "rwm".contains(c)) {
            checks.add(bad(
                format!("{at}.devices[{n}].permissions"),
                p,
                "a combination of the letters r, w and m",
            ));
        }
    }
}
