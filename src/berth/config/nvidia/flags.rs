//! `flags` of a file of NVIDIA's: those for all its programs, `plugin` and `gfd`.

use super::draft::{Draft, Place};
use super::read::{Section, scalar};
use super::{CDI, LABELS, MPS_ROOT, PACKED, discovery};
use crate::config::edits;
use berth_kernel::mig::MigStrategy;
use berth_kubelet::DeviceListStrategy::{CdiAnnotations, CdiCri};
use serde_json::Value;

pub(super) fn translate(flags: Option<Section<'_>>, draft: &mut Draft) {
    let Some(mut flags) = flags else { return };
    if let Some(word) = flags.text("migStrategy", draft) {
        if MigStrategy::parse(&word).is_none() {
            draft.error("flags.migStrategy", &format!("{word:?} is not one of `none`, `single`, `mixed`"));
        }
        draft.set("migStrategy", &word);
    }
    if let Some(fail) = flags.truth("failOnInitError", draft) {
        draft.set("failOnInitError", &fail);
    }
    if flags.text("mpsRoot", draft).is_some_and(|root| !root.is_empty()) {
        draft.unused("flags.mpsRoot", MPS_ROOT);
    }
    if let Some(word) = flags.text("deviceDiscoveryStrategy", draft) {
        match (word.as_str(), discovery(&word)) {
            (_, Ok(())) => {}
            ("tegra", Err(why)) => draft.refuse("flags.deviceDiscoveryStrategy", &why),
            (_, Err(why)) => draft.error("flags.deviceDiscoveryStrategy", &format!("{word:?}: {why}")),
        }
    }
    if flags.truth("useNodeFeatureAPI", draft).is_some() {
        draft.unused("flags.useNodeFeatureAPI", LABELS);
    }
    gfd(flags.section("gfd", draft), draft);
    draft.place = Place::Edits;
    for key in ["nvidiaDriverRoot", "nvidiaDevRoot"] {
        if let Some(root) = flags.text(key, draft).filter(|root| !root.is_empty()) {
            draft.set(key, &root);
        }
    }
    for key in ["gdrcopyEnabled", "gdsEnabled", "mofedEnabled"] {
        if let Some(wanted) = flags.truth(key, draft) {
            draft.set(key, &wanted);
        }
    }
    plugin(flags.section("plugin", draft), draft);
    draft.place = Place::Top;
    flags.report_unread(draft);
}

fn plugin(section: Option<Section<'_>>, draft: &mut Draft) {
    let Some(mut section) = section else { return };
    if let Some(pass) = section.truth("passDeviceSpecs", draft) {
        draft.set("passDeviceSpecs", &pass);
    }
    device_list_strategy(&mut section, draft);
    if let Some(word) = section.text("deviceIDStrategy", draft) {
        if edits::id_strategy(&word).is_err() {
            draft.error(&section.path("deviceIDStrategy"), &format!("{word:?} is neither uuid nor index"));
        }
        draft.set("deviceIdStrategy", &word);
    }
    if let Some(prefix) = section.text("cdiAnnotationPrefix", draft).filter(|prefix| !prefix.is_empty()) {
        draft.set("cdiAnnotationPrefix", &prefix);
    }
    if section.text("nvidiaCTKPath", draft).is_some() {
        draft.unused(&section.path("nvidiaCTKPath"), CDI);
    }
    if section.text("containerDriverRoot", draft).is_some() {
        let note = "set --driver-root-ctr-path or DRIVER_ROOT_CTR_PATH where the driver is mounted elsewhere than at /driver-root";
        draft.unused(&section.path("containerDriverRoot"), note);
    }
    match section.text("sharedDevicesAllocationPolicy", draft).as_deref() {
        None | Some("distributed") => {}
        Some("packed") => draft.policy(PACKED, &[]),
        Some(word) => draft.error(
            &section.path("sharedDevicesAllocationPolicy"),
            &format!("{word:?} is neither distributed nor packed"),
        ),
    }
    section.report_unread(draft);
}

/// One word, or a list.
fn device_list_strategy(section: &mut Section<'_>, draft: &mut Draft) {
    let path = section.path("deviceListStrategy");
    let words: Option<Vec<String>> = match section.value("deviceListStrategy") {
        None => return,
        Some(Value::Array(words)) => words.iter().map(scalar).collect(),
        Some(word) => scalar(word).map(|word| vec![word]),
    };
    let Some(words) = words else { return draft.error(&path, "must be a word or a list of words") };
    if words.is_empty() {
        return draft.refuse(&path, "an empty list would give containers no GPU at all; write [envvar]");
    }
    match edits::strategies(words.iter().map(String::as_str)) {
        Ok(found) => {
            if found.iter().any(|strategy| matches!(strategy, CdiAnnotations | CdiCri)) {
                draft.unused(&path, &format!("its CDI specification: {CDI}"));
            }
            draft.set("deviceListStrategy", &words);
        }
        Err(_) => draft.error(
            &path,
            &format!(
                "{} is not one of `envvar`, `volume-mounts`, `cdi-annotations`, `cdi-cri`",
                words.join(", ")
            ),
        ),
    }
}

fn gfd(section: Option<Section<'_>>, draft: &mut Draft) {
    let Some(mut section) = section else { return };
    for (key, note) in [
        ("oneshot", "labels follow the GPUs as long as the daemon runs"),
        ("noTimestamp", LABELS),
        ("sleepInterval", "labels follow the GPUs; health.pollSeconds is how often those are read"),
        ("outputFile", "write labels.nfdFile: with this path, where node-feature-discovery reads it"),
        ("machineTypeFile", LABELS),
    ] {
        if section.value(key).is_some() {
            draft.unused(&section.path(key), note);
        }
    }
    section.report_unread(draft);
}
