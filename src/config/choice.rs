//! Selection of a configuration file by a node label, by the rules of the config-manager of NVIDIA's device plugin
//! (v0.20, `cmd/config-manager`), so that its ConfigMaps and labels work for both.

use super::Config;
use super::args::{ChoiceArgs, Fallback, Fallbacks, ServeArgs};
use anyhow::{Context, bail, ensure};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Default key of the label, the same as for NVIDIA's device plugin.
const LABEL: &str = "nvidia.com/device-plugin.config";
/// The file of the fallback `named`.
const NAMED: &str = "default";
/// Most files that an error lists.
const SHOWN_MAX: usize = 20;

/// The rules that select a node's file.
#[derive(Clone, Debug)]
pub struct Choice {
    folder: PathBuf,
    /// The label's key.
    pub key: String,
    default: Option<String>,
    fallbacks: Vec<Fallback>,
}

impl Choice {
    /// The selection of these flags; `None` without `--config-dir`.
    #[must_use]
    pub fn from_args(args: &ChoiceArgs) -> Option<Self> {
        let non_empty = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let defaults = || vec![Fallback::Named, Fallback::Single];
        Some(Self {
            folder: args.config_dir.clone()?,
            key: non_empty(&args.config_label).unwrap_or_else(|| LABEL.into()),
            default: non_empty(&args.config_default),
            fallbacks: args.config_fallbacks.clone().map_or_else(defaults, |Fallbacks(list)| list),
        })
    }

    /// The file's name for this value of the label; `None` by the fallback `empty`.
    ///
    /// # Errors
    /// If the named file does not exist, or no file is selected.
    pub fn select(&self, label: Option<&str>) -> anyhow::Result<Option<String>> {
        let files = self.files()?;
        let existing = |selector: String, name: &str| {
            let folder = self.folder.display();
            ensure!(
                files.contains(name),
                "{selector} names the configuration {name:?}, but {folder} has only {}",
                shown(&files)
            );
            Ok(Some(name.to_owned()))
        };
        if let Some(value) = label.filter(|value| !value.is_empty()) {
            return existing(format!("the node's label {}", self.key), value);
        }
        if let Some(name) = &self.default {
            return existing("--config-default".into(), name);
        }
        for fallback in &self.fallbacks {
            match fallback {
                Fallback::Named if files.contains(NAMED) => return Ok(Some(NAMED.into())),
                Fallback::Single if files.len() == 1 => return Ok(files.first().cloned()),
                Fallback::Empty => return Ok(None),
                Fallback::Named | Fallback::Single => {}
            }
        }
        bail!(
            "the node has no label {}, and neither --config-default nor --config-fallbacks selects one of {}: set the label or \
             --config-default",
            self.key,
            shown(&files)
        )
    }

    /// The names of the folder's files, without the kubelet's own entries of a mounted ConfigMap, which begin with
    /// `..`.
    fn files(&self) -> anyhow::Result<BTreeSet<String>> {
        let folder = self.folder.display();
        let unreadable = || format!("cannot read the folder of configurations {folder}");
        let mut files = BTreeSet::new();
        for entry in std::fs::read_dir(&self.folder).with_context(unreadable)? {
            let entry = entry.with_context(unreadable)?;
            let is_file = std::fs::metadata(entry.path()).is_ok_and(|metadata| metadata.is_file());
            if let (true, Ok(name)) = (is_file, entry.file_name().into_string())
                && !name.starts_with("..")
            {
                files.insert(name);
            }
        }
        ensure!(!files.is_empty(), "the folder of configurations {folder} holds no file");
        Ok(files)
    }
}

fn shown(files: &BTreeSet<String>) -> String {
    let names: Vec<&str> = files.iter().take(SHOWN_MAX).map(String::as_str).collect();
    let more = if files.len() > SHOWN_MAX { ", ..." } else { "" };
    format!("{}{more}", names.join(", "))
}

/// The selected file of a running daemon, with the rules to select again.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// The rules of the selection.
    pub choice: Choice,
    /// The label's value at the start.
    pub value: Option<String>,
    /// The file's name; `None` by the fallback `empty`.
    pub name: Option<String>,
    /// The daemon's flags, which take precedence over every file.
    args: Box<ServeArgs>,
}

impl Chosen {
    /// The file's name, or `none`.
    #[must_use]
    pub fn shown(&self) -> &str {
        self.name.as_deref().unwrap_or("none")
    }

    /// The new configuration, if this value of the label selects another file.
    ///
    /// # Errors
    /// If no file can be selected, or the selected one is invalid.
    pub fn changed_for(&self, label: Option<&str>) -> anyhow::Result<Option<Config>> {
        let other = Config::load_chosen(&self.args, self.choice.clone(), label.map(str::to_owned))?;
        let changed = other.loaded.chosen.as_ref().is_some_and(|chosen| chosen.name != self.name);
        Ok(changed.then_some(other))
    }
}

impl Config {
    /// As [`Config::load`], with the keys of the selected file in place of those of `--config`.
    ///
    /// # Errors
    /// If no file can be selected, or a file or a value is invalid.
    pub fn load_chosen(args: &ServeArgs, choice: Choice, value: Option<String>) -> anyhow::Result<Self> {
        let name = choice.select(value.as_deref())?;
        let mut config = match &name {
            None => Self::load(args)?,
            Some(name) => Self::load_with_base(Some(&choice.folder.join(name)), args.config_file(), args)?,
        };
        config.loaded.chosen = Some(Chosen { choice, value, name, args: Box::new(args.clone()) });
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GpuSource;
    use crate::args::fallbacks;
    use std::path::Path;

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in files {
            std::fs::write(folder.path().join(name), "gpus: sim:1xt4\n").unwrap();
        }
        // The entries of a ConfigMap that the kubelet mounted.
        std::fs::create_dir(folder.path().join("..2026")).unwrap();
        std::os::unix::fs::symlink("..2026", folder.path().join("..data")).unwrap();
        folder
    }

    fn choice(folder: &Path, default: &str, fallback: Option<&str>) -> Choice {
        let args = ChoiceArgs {
            config_dir: Some(folder.into()),
            config_label: None,
            config_default: Some(default.into()),
            config_fallbacks: fallback.map(|text| fallbacks(text).unwrap()),
        };
        Choice::from_args(&args).unwrap()
    }

    /// The results are those of NVIDIA's config-manager.
    #[test]
    fn label_default_and_fallbacks_select_in_this_order() {
        let two = folder(&["default", "mig"]);
        let one = folder(&["only"]);
        let others = folder(&["a", "b"]);
        for (folder, default, fallbacks, label, expected) in [
            (&two, "", None, Some("mig"), Ok(Some("mig"))),
            (&two, "mig", None, None, Ok(Some("mig"))),
            (&two, "mig", None, Some(""), Ok(Some("mig"))),
            (&two, "mig", None, Some("default"), Ok(Some("default"))),
            (&two, "", None, None, Ok(Some("default"))),
            (&one, "", None, None, Ok(Some("only"))),
            (&others, "", None, None, Err("selects one of a, b")),
            (&others, "", Some("named,single,empty"), None, Ok(None)),
            (&two, "", Some("single"), None, Err("selects one of default, mig")),
            (&two, "", Some(""), None, Err("--config-default")),
            (&one, "", Some("empty"), Some("gone"), Err("label nvidia.com/device-plugin.config names")),
            (&one, "gone", Some("single"), None, Err("--config-default names the configuration \"gone\"")),
            (&two, "", None, Some("..2026"), Err("has only default, mig")),
            (&folder(&[]), "", Some("empty"), None, Err("holds no file")),
        ] {
            let selected = choice(folder.path(), default, fallbacks).select(label);
            match (selected, expected) {
                (Ok(name), Ok(expected)) => assert_eq!(name.as_deref(), expected),
                (Err(error), Err(text)) => assert!(error.to_string().contains(text), "{error}"),
                (selected, expected) => panic!("{selected:?}, not {expected:?}"),
            }
        }
        assert!(fallbacks("named, other").unwrap_err().contains("named, single or empty"));
    }

    #[test]
    fn keys_of_the_selected_file_replace_those_of_the_base_file() {
        let (folder, base) = (folder(&["t4"]), tempfile::tempdir().unwrap());
        let config = base.path().join("config.yaml");
        std::fs::write(&config, "gpus: sim:8xh100\nresource: example.com/gpu\n").unwrap();
        let args = ServeArgs { config: Some(config), ..ServeArgs::default() };
        let load = |label: Option<&str>, fallbacks| {
            let choice = choice(folder.path(), "", fallbacks);
            Config::load_chosen(&args, choice, label.map(str::to_owned)).unwrap()
        };
        let config = load(Some("t4"), None);
        assert_eq!(config.gpus.source, GpuSource::Sim("1xt4".into()));
        assert_eq!(config.offers.resource.as_str(), "example.com/gpu");
        // The selection of the same file by another rule is not a change.
        let chosen = config.loaded.chosen.unwrap();
        assert!(chosen.changed_for(None).unwrap().is_none());
        assert!(chosen.changed_for(Some("gone")).is_err());
        // NVIDIA's files have no `containerEdits`: their flags replace single keys of it.
        let base_edits =
            "containerEdits: { cdiKind: example.com/gpu, passDeviceSpecs: true, deviceIdStrategy: index }";
        std::fs::write(args.config.as_ref().unwrap(), base_edits).unwrap();
        let nvidia = "version: v1\nflags: { plugin: { passDeviceSpecs: false } }";
        std::fs::write(folder.path().join("nvidia"), nvidia).unwrap();
        let edits = load(Some("nvidia"), None).containers.edits;
        assert_eq!((edits.cdi_kind.as_str(), edits.pass_device_specs), ("example.com/gpu", false));
        assert_eq!(edits.id_strategy, berth_kubelet::DeviceIdStrategy::Index);
        std::fs::write(folder.path().join("nvidia"), "containerEdits: { passDeviceSpecs: false }").unwrap();
        assert_eq!(
            load(Some("nvidia"), None).containers.edits.cdi_kind,
            "nvidia.com/gpu",
            "a top-level key of a Berth file is replaced as a whole"
        );

        std::fs::remove_file(folder.path().join("nvidia")).unwrap();
        std::fs::write(args.config.as_ref().unwrap(), "gpus: sim:8xh100\n").unwrap();
        let none = load(None, Some("empty"));
        assert_eq!(none.gpus.source, GpuSource::Sim("8xh100".into()));
        assert_eq!(
            none.loaded
                .chosen
                .unwrap()
                .changed_for(Some("t4"))
                .unwrap()
                .unwrap()
                .loaded
                .chosen
                .unwrap()
                .shown(),
            "t4"
        );
    }
}
