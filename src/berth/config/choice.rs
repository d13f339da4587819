//! Which file of a folder configures the node: a label of the node names it, by the rules of the config-manager of
//! NVIDIA's device plugin (v0.20, `cmd/config-manager`), so that its ConfigMaps and labels serve both.

use super::{Config, ConfigError, ServeArgs};
use clap::Args;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The label that names the file, as NVIDIA's device plugin has it.
const LABEL: &str = "nvidia.com/device-plugin.config";
/// The file that the fallback `named` takes.
const NAMED: &str = "default";
/// Most files of the folder that an error names.
const SHOWN_MAX: usize = 20;

/// The flags of the choice.
#[derive(Args, Clone, Debug, Default)]
pub struct ChoiceArgs {
    /// Folder of configuration files; a node label selects one, and its keys replace those of --config
    #[arg(long, env = "BERTH_CONFIG_DIR", value_name = "DIR")]
    pub config_dir: Option<PathBuf>,
    /// The node label that selects the file [default: nvidia.com/device-plugin.config]
    #[arg(long, env = "BERTH_CONFIG_LABEL", value_name = "KEY")]
    pub config_label: Option<String>,
    /// The file in --config-dir for a node without the label
    #[arg(long, env = "BERTH_CONFIG_DEFAULT", value_name = "FILE")]
    pub config_default: Option<String>,
    /// What to use without label and --config-default, tried in order: named (the file `default`), single (the only file), empty (--config alone) [default: named,single]
    #[arg(long, env = "BERTH_CONFIG_FALLBACKS", value_name = "LIST", value_parser = fallbacks)]
    pub config_fallbacks: Option<Fallbacks>,
}

/// What chooses where there is neither label nor default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fallback {
    /// The file `default`.
    Named,
    /// The only file of the folder.
    Single,
    /// No file.
    Empty,
}

/// Those that are tried, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallbacks(Vec<Fallback>);

fn fallbacks(text: &str) -> Result<Fallbacks, String> {
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
    let known = words.map(|word| match word {
        "named" => Ok(Fallback::Named),
        "single" => Ok(Fallback::Single),
        "empty" => Ok(Fallback::Empty),
        _ => Err("expected named, single or empty, separated by commas".to_owned()),
    });
    known.collect::<Result<_, _>>().map(Fallbacks)
}

/// Why no file of the folder can be used.
#[derive(Debug, thiserror::Error)]
pub enum ChoiceError {
    /// The folder cannot be read.
    #[error("cannot read the folder of configurations {folder}")]
    Unreadable {
        /// Which one.
        folder: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The folder holds no file.
    #[error("the folder of configurations {folder} holds no file")]
    Empty {
        /// Which one.
        folder: PathBuf,
    },
    /// There is no file of that name.
    #[error("{by} names the configuration {name:?}, but {folder} has only {there}")]
    Absent {
        /// What names it: the label, or the default.
        by: String,
        /// The name.
        name: String,
        /// Where it was searched.
        folder: PathBuf,
        /// The files that there are.
        there: String,
    },
    /// Nothing chooses.
    #[error(
        "the node has no label {label}, and neither --config-default nor --config-fallbacks selects one of {there}: set \
         the label or --config-default"
    )]
    Undecided {
        /// The label's key.
        label: String,
        /// The files that there are.
        there: String,
    },
    /// The chosen file cannot be used.
    #[error(transparent)]
    File(#[from] ConfigError),
}

/// How a node's file is chosen.
#[derive(Clone, Debug)]
pub struct Choice {
    folder: PathBuf,
    /// The key of the label.
    pub label: String,
    default: Option<String>,
    fallbacks: Vec<Fallback>,
}

impl Choice {
    /// `None` where the flags name no folder.
    #[must_use]
    pub fn of(args: &ChoiceArgs) -> Option<Self> {
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let usual = || vec![Fallback::Named, Fallback::Single];
        Some(Self {
            folder: args.config_dir.clone()?,
            label: given(&args.config_label).unwrap_or_else(|| LABEL.into()),
            default: given(&args.config_default),
            fallbacks: args.config_fallbacks.clone().map_or_else(usual, |Fallbacks(list)| list),
        })
    }

    /// The name of the file for a node whose label has this value; `None`: none, by the fallback `empty`.
    ///
    /// # Errors
    /// If the named file is not there, or nothing names one.
    pub fn name(&self, label: Option<&str>) -> Result<Option<String>, ChoiceError> {
        let files = self.files()?;
        let present = |by: String, name: &str| {
            if files.contains(name) {
                return Ok(Some(name.to_owned()));
            }
            let (name, folder) = (name.to_owned(), self.folder.clone());
            Err(ChoiceError::Absent { by, name, folder, there: shown(&files) })
        };
        if let Some(value) = label.filter(|value| !value.is_empty()) {
            return present(format!("the node's label {}", self.label), value);
        }
        if let Some(name) = &self.default {
            return present("--config-default".into(), name);
        }
        for fallback in &self.fallbacks {
            match fallback {
                Fallback::Named if files.contains(NAMED) => return Ok(Some(NAMED.into())),
                Fallback::Single if files.len() == 1 => return Ok(files.first().cloned()),
                Fallback::Empty => return Ok(None),
                Fallback::Named | Fallback::Single => {}
            }
        }
        Err(ChoiceError::Undecided { label: self.label.clone(), there: shown(&files) })
    }

    /// The names of the folder's files. A mounted ConfigMap has entries of its own besides, which begin with `..`.
    fn files(&self) -> Result<BTreeSet<String>, ChoiceError> {
        let unreadable = |source| ChoiceError::Unreadable { folder: self.folder.clone(), source };
        let mut files = BTreeSet::new();
        for entry in std::fs::read_dir(&self.folder).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let is_file = std::fs::metadata(entry.path()).is_ok_and(|found| found.is_file());
            if let (true, Ok(name)) = (is_file, entry.file_name().into_string())
                && !name.starts_with("..")
            {
                files.insert(name);
            }
        }
        if files.is_empty() {
            return Err(ChoiceError::Empty { folder: self.folder.clone() });
        }
        Ok(files)
    }
}

fn shown(files: &BTreeSet<String>) -> String {
    let names: Vec<&str> = files.iter().take(SHOWN_MAX).map(String::as_str).collect();
    let more = if files.len() > SHOWN_MAX { ", ..." } else { "" };
    format!("{}{more}", names.join(", "))
}

/// The file that configures a running daemon, and what chooses it again.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// How it was chosen.
    pub choice: Choice,
    /// The value of the label at the start.
    pub label: Option<String>,
    /// Its name; `None`: no file, by the fallback `empty`.
    pub name: Option<String>,
    /// The flags of the daemon, which win over every file.
    args: Box<ServeArgs>,
}

impl Chosen {
    /// The name to show.
    #[must_use]
    pub fn shown(&self) -> &str {
        self.name.as_deref().unwrap_or("none")
    }

    /// The configuration of a node whose label now has this value, if it is another file's.
    ///
    /// # Errors
    /// If no file can be chosen, or the chosen one cannot be used.
    pub fn changed_for(&self, label: Option<&str>) -> Result<Option<Config>, ChoiceError> {
        let other = Config::load_chosen(&self.args, self.choice.clone(), label.map(str::to_owned))?;
        let is_another = other.chosen.as_ref().is_some_and(|chosen| chosen.name != self.name);
        Ok(is_another.then_some(other))
    }
}

impl Config {
    /// As [`Config::load`], with the keys of the file that the label chooses in place of those of `--config`.
    ///
    /// # Errors
    /// If no file can be chosen, or a file or a value cannot be used.
    pub fn load_chosen(args: &ServeArgs, choice: Choice, label: Option<String>) -> Result<Self, ChoiceError> {
        let name = choice.name(label.as_deref())?;
        let mut config = match &name {
            None => Self::load(args)?,
            Some(name) => Self::load_over(Some(&choice.folder.join(name)), args.config_file(), args)?,
        };
        config.chosen = Some(Chosen { choice, label, name, args: Box::new(args.clone()) });
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in files {
            std::fs::write(folder.path().join(name), "gpus: sim:1xt4\n").unwrap();
        }
        // As the kubelet mounts a ConfigMap.
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
        Choice::of(&args).unwrap()
    }

    /// Each row as NVIDIA's config-manager decides it.
    #[test]
    fn label_default_and_fallbacks_choose_in_this_order() {
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
            let found = choice(folder.path(), default, fallbacks).name(label);
            match (found, expected) {
                (Ok(name), Ok(expected)) => assert_eq!(name.as_deref(), expected),
                (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
                (found, expected) => panic!("{found:?}, not {expected:?}"),
            }
        }
        assert!(fallbacks("named, other").unwrap_err().contains("named, single or empty"));
    }

    #[test]
    fn keys_of_the_chosen_file_replace_those_of_the_other() {
        let (chosen, below) = (folder(&["t4"]), tempfile::tempdir().unwrap());
        let config = below.path().join("config.yaml");
        std::fs::write(&config, "gpus: sim:8xh100\nresource: example.com/gpu\n").unwrap();
        let args = ServeArgs { config: Some(config), ..ServeArgs::default() };
        let load = |label: Option<&str>, fallbacks| {
            let choice = choice(chosen.path(), "", fallbacks);
            Config::load_chosen(&args, choice, label.map(str::to_owned)).unwrap()
        };
        let found = load(Some("t4"), None);
        assert_eq!(found.gpus, super::super::GpuSource::Sim("1xt4".into()));
        assert_eq!(found.resource.as_str(), "example.com/gpu");
        // The same file is no other configuration, whatever names it.
        let now = found.chosen.unwrap();
        assert!(now.changed_for(None).unwrap().is_none());
        assert!(now.changed_for(Some("gone")).is_err());
        // NVIDIA's files have no `containerEdits`: their flags leave the other keys of it in force.
        let edits =
            "containerEdits: { cdiKind: example.com/gpu, passDeviceSpecs: true, deviceIdStrategy: index }";
        std::fs::write(args.config.as_ref().unwrap(), edits).unwrap();
        let nvidia = "version: v1\nflags: { plugin: { passDeviceSpecs: false } }";
        std::fs::write(chosen.path().join("nvidia"), nvidia).unwrap();
        let found = load(Some("nvidia"), None).edits;
        assert_eq!((found.cdi_kind.as_str(), found.pass_device_specs), ("example.com/gpu", false));
        assert_eq!(found.id_strategy, berth_kubelet::DeviceIdStrategy::Index);
        std::fs::write(chosen.path().join("nvidia"), "containerEdits: { passDeviceSpecs: false }").unwrap();
        assert_eq!(
            load(Some("nvidia"), None).edits.cdi_kind,
            "nvidia.com/gpu",
            "a key of Berth's is replaced whole"
        );

        std::fs::remove_file(chosen.path().join("nvidia")).unwrap();
        std::fs::write(args.config.as_ref().unwrap(), "gpus: sim:8xh100\n").unwrap();
        let none = load(None, Some("empty"));
        assert_eq!(none.gpus, super::super::GpuSource::Sim("8xh100".into()));
        assert_eq!(
            none.chosen.unwrap().changed_for(Some("t4")).unwrap().unwrap().chosen.unwrap().shown(),
            "t4"
        );
    }
}
