//! `flags` of an NVIDIA file: those of all programs, `plugin` and `gfd`.

use super::draft::{Draft, FilePart};
use super::read::{Section, scalar};
use super::{CDI, LABELS, MPS_ROOT, PACKED, check_discovery};
use crate::config::edits;
use berth_kernel::mig::MigStrategy;
use berth_kubelet::DeviceListStrategy::{CdiAnnotations, CdiCri};
use serde_json::Value;

pub(super) fn translate(flags: Option<Section<'_>>, draft: &mut Draft) {
    let Some(mut flags) = flags else { return };
    if let Some(keyword) = flags.text("migStrategy", draft) {
        if MigStrategy::parse(&keyword).is_none() {
            draft.error("flags.migStrategy", &format!("{keyword:?} is not one of `none`, `single`, `mixed`"));
        }
        draft.set("migStrategy", &keyword);
    }
    if let Some(fail) = flags.bool("failOnInitError", draft) {
        draft.set("failOnInitError", &fail);
    }
    if flags.text("mpsRoot", draft).is_some_and(|root| !root.is_empty()) {
        draft.unused("flags.mpsRoot", MPS_ROOT);
    }
    if let Some(keyword) = flags.text("deviceDiscoveryStrategy", draft) {
        match (keyword.as_str(), check_discovery(&keyword)) {
            (_, Ok(())) => {}
            ("tegra", Err(reason)) => draft.refuse("flags.deviceDiscoveryStrategy", &reason),
            (_, Err(reason)) => {
                draft.error("flags.deviceDiscoveryStrategy", &format!("{keyword:?}: {reason}"));
            }
        }
    }
    if flags.bool("useNodeFeatureAPI", draft).is_some() {
        draft.unused("flags.useNodeFeatureAPI", LABELS);
    }
    gfd(flags.section("gfd", draft), draft);
    draft.part = FilePart::Edits;
    for key in ["nvidiaDriverRoot", "nvidiaDevRoot"] {
        if let Some(root) = flags.text(key, draft).filter(|root| !root.is_empty()) {
            draft.set(key, &root);
        }
    }
    for key in ["gdrcopyEnabled", "gdsEnabled", "mofedEnabled"] {
        if let Some(enabled) = flags.bool(key, draft) {
            draft.set(key, &enabled);
        }
    }
    plugin(flags.section("plugin", draft), draft);
    draft.part = FilePart::Top;
    flags.report_unread(draft);
}

fn plugin(section: Option<Section<'_>>, draft: &mut Draft) {
    let Some(mut section) = section else { return };
    if let Some(pass) = section.bool("passDeviceSpecs", draft) {
        draft.set("passDeviceSpecs", &pass);
    }
    device_list_strategy(&mut section, draft);
    if let Some(keyword) = section.text("deviceIDStrategy", draft) {
        if edits::id_strategy(&keyword).is_err() {
            draft.error(&section.path("deviceIDStrategy"), &format!("{keyword:?} is neither uuid nor index"));
        }
        draft.set("deviceIdStrategy", &keyword);
    }
    if let Some(prefix) = section.text("cdiAnnotationPrefix", draft).filter(|prefix| !prefix.is_empty()) {
        draft.set("cdiAnnotationPrefix", &prefix);
    }
    if section.text("nvidiaCTKPath", draft).is_some() {
        draft.unused(&section.path("nvidiaCTKPath"), CDI);
    }
    if section.text("containerDriverRoot", draft).is_some() {
        let note =
            "set --driver-root-ctr-path or DRIVER_ROOT_CTR_PATH if the driver is not mounted at /driver-root";
        draft.unused(&section.path("containerDriverRoot"), note);
    }
    match section.text("sharedDevicesAllocationPolicy", draft).as_deref() {
        None | Some("distributed") => {}
        Some("packed") => draft.add_policy(PACKED, &[]),
        Some(keyword) => draft.error(
            &section.path("sharedDevicesAllocationPolicy"),
            &format!("{keyword:?} is neither distributed nor packed"),
        ),
    }
    section.report_unread(draft);
}

/// A keyword, or a list of them.
fn device_list_strategy(section: &mut Section<'_>, draft: &mut Draft) {
    let path = section.path("deviceListStrategy");
    let keywords: Option<Vec<String>> = match section.value("deviceListStrategy") {
        None => return,
        Some(Value::Array(keywords)) => keywords.iter().map(scalar).collect(),
        Some(keyword) => scalar(keyword).map(|keyword| vec![keyword]),
    };
    let Some(keywords) = keywords else { return draft.error(&path, "must be text or a list of texts") };
    if keywords.is_empty() {
        return draft.refuse(&path, "with an empty list, containers would get no GPU; write [envvar]");
    }
    match edits::strategies(keywords.iter().map(String::as_str)) {
        Ok(strategies) => {
            if strategies.iter().any(|strategy| matches!(strategy, CdiAnnotations | CdiCri)) {
                draft.unused(&path, &format!("its CDI specification: {CDI}"));
            }
            draft.set("deviceListStrategy", &keywords);
        }
        Err(_) => draft.error(
            &path,
            &format!(
                "{} is not one of `envvar`, `volume-mounts`, `cdi-annotations`, `cdi-cri`",
                keywords.join(", ")
            ),
        ),
    }
}

fn gfd(section: Option<Section<'_>>, draft: &mut Draft) {
    let Some(mut section) = section else { return };
    for (key, note) in [
        ("oneshot", "Berth updates labels as long as the daemon runs"),
        ("noTimestamp", LABELS),
        ("sleepInterval", "Berth updates labels when GPUs change, which it checks every health.pollSeconds"),
        ("outputFile", "set labels.nfdFile instead, to a path from which node-feature-discovery reads"),
        ("machineTypeFile", LABELS),
    ] {
        if section.value(key).is_some() {
            draft.unused(&section.path(key), note);
        }
    }
    section.report_unread(draft);
}
