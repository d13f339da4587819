//! `berth policy pack`: a policy as an OCI artifact, in a registry or in a folder, from which the nodes of a fleet get it.

use crate::PolicyTester;
use crate::author::read_module;
use anyhow::{Context, anyhow};
use berth_cli::output::Out;
use berth_cli::upload::read_signature;
use berth_cli::usage::BadUsage;
use berth_kernel::policy::version::Signature;
use berth_oci::registry::Registry;
use berth_oci::{Artifact, Credentials, Target, is_tag, layout};
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// `berth policy pack`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The command checks that the file is a policy (`berth policy check` tests more), and prints \
the entry for `spec.stack.entries` of a GPUNode, by whose digests nodes pull it.
  berth policy pack p.wasm oci://registry.example/gpu/p:1.4
  berth policy pack p.wasm oci://registry.example/gpu/p:1.4 --signature p.wasm.sig
  berth policy pack p.wasm layout:./policies:1.4     An OCI image layout, for nodes without a registry")]
pub struct PackArgs {
    /// A WebAssembly component of the world berth:policy, or a core module
    file: PathBuf,
    /// oci://HOST/PATH:TAG, oci+http://HOST/PATH:TAG for a registry without TLS, or layout:FOLDER:TAG
    #[arg(value_name = "DESTINATION", value_parser = Destination::from_str)]
    to: Destination,
    /// An Ed25519 signature over the file's bytes: 64 bytes as openssl writes them, or in base64
    #[arg(long, value_name = "FILE")]
    signature: Option<PathBuf>,
    /// The credentials of registries, as `docker login` writes them; default: ~/.docker/config.json, if it exists
    #[arg(long, value_name = "FILE")]
    credentials: Option<PathBuf>,
    /// Certificates in PEM that are trusted in place of the system's
    #[arg(long, value_name = "FILE")]
    registry_ca: Option<PathBuf>,
}

/// Where to write the artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Destination {
    Registry(Target),
    Layout { folder: PathBuf, tag: String },
}

impl FromStr for Destination {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix("layout:") else {
            let target = text.parse().map(Self::Registry);
            return target.map_err(|why| format!("{why}; for a folder: layout:FOLDER:TAG"));
        };
        let rule = || "write layout:FOLDER:TAG, such as layout:./policies:1.4".to_owned();
        let (folder, tag) = rest.rsplit_once(':').ok_or_else(rule)?;
        if !is_tag(tag) {
            return Err(format!(
                "{tag:?} is not a tag: a tag has at most 128 letters, digits, `.`, `-` and `_`, and does not begin with `.` or `-`; {}",
                rule()
            ));
        }
        if folder.starts_with("//") {
            return Err(format!("a folder does not begin with //; {}", rule()));
        }
        if folder.is_empty() {
            return Err(rule());
        }
        if let Some(rest) = folder.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/')) {
            return Err(format!(
                "the shell does not expand ~ after \"layout:\"; write layout:$HOME{rest}:{tag}"
            ));
        }
        Ok(Self::Layout { folder: folder.into(), tag: tag.to_owned() })
    }
}

/// The artifact, as an entry of a stack names it.
#[derive(Serialize)]
struct Packed {
    name: String,
    version: String,
    #[serde(rename = "ref", skip_serializing_if = "Option::is_none")]
    repository: Option<String>,
    /// Where it was written to, with its tag.
    to: String,
    #[serde(skip)]
    hint: String,
    manifest: String,
    layer: String,
}

/// Runs the command.
///
/// # Errors
/// If the file is no policy, or the artifact cannot be written.
pub fn run(args: &PackArgs, out: &mut Out) -> anyhow::Result<()> {
    let PackArgs { file, to, signature, credentials, registry_ca } = args;
    let module = read_module(file)?;
    let is_component = !module.starts_with(crate::author::CORE_MODULE);
    let signature = signature.as_deref().map(read_signature).transpose()?.map(Signature);
    if signature.is_some() && !is_component {
        return Err(BadUsage(format!(
            "{} is a core module, and only a component can be signed: `wasm-tools component new` makes one",
            file.display()
        ))
        .into());
    }
    let tester = PolicyTester::new()?;
    let version = tester.install(&module).map_err(|error| anyhow!("{}: {error}", file.display()))?;
    let component = if is_component { module } else { tester.component(&version)? };
    let title = format!("{}.wasm", version.name);
    let artifact = Artifact::pack(component, &title, signature.as_ref())?;
    let (repository, to, hint) = match to {
        Destination::Layout { folder, tag } => {
            layout::add(folder, &artifact, tag)
                .with_context(|| format!("the layout folder {} was not written", folder.display()))?;
            let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.clone());
            let hint = "Replace REPOSITORY with a repository that `fleet.repositories` of the nodes allows. Copy the folder to the \
                        nodes and name it in `fleet.layouts`; they need no registry.";
            (None, format!("{}:{tag}", folder.display()), hint.to_owned())
        }
        Destination::Registry(target) => {
            let credentials = match credentials.clone().or_else(own_credentials) {
                Some(path) => Credentials::read(&path).map_err(|why| anyhow!(why))?,
                None => Credentials::default(),
            };
            let registry = Registry::new(target.is_plain_http, credentials, registry_ca.as_deref());
            let registry = registry.map_err(|why| anyhow!(why))?;
            registry.push(target, &artifact).with_context(|| format!("{target} was not pushed"))?;
            let (repository, scheme) =
                (&target.repository, if target.is_plain_http { "http://" } else { "" });
            let hint = format!("`fleet.repositories` of the nodes must allow {scheme}{repository}.");
            (Some(repository.to_string()), target.to_string(), hint)
        }
    };
    let packed = Packed {
        name: version.name,
        version: version.version,
        repository,
        to,
        hint,
        manifest: format!("sha256:{}", artifact.digest()),
        layer: format!("sha256:{}", artifact.layer_digest()),
    };
    out.answer(&packed, text)
}

/// The file of `docker login`, if it exists.
fn own_credentials() -> Option<PathBuf> {
    let folder = std::env::var_os("DOCKER_CONFIG").map(PathBuf::from);
    let folder = folder.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".docker")))?;
    Some(folder.join("config.json")).filter(|path| path.exists())
}

fn text(packed: &Packed) -> String {
    let Packed { name, version, repository, to, hint, manifest, layer } = packed;
    // A layout has no repository, so the user chooses one: the daemon searches layouts by digest.
    let from = repository.as_deref().unwrap_or("REPOSITORY");
    format!(
        "{name} {version} is at {to}; its entry in spec.stack.entries of a GPUNode:\n- name: {name}\n  ref: {from}\n  manifest: \
         {manifest}\n  layer: {layer}\n{hint}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_a_registry_or_a_folder() {
        let layout = |folder: &str| Destination::Layout { folder: folder.into(), tag: "1.4".into() };
        assert_eq!("layout:./a:1.4".parse(), Ok(layout("./a")));
        assert_eq!("layout:/a:b:1.4".parse(), Ok(layout("/a:b")));
        assert!(matches!("oci://reg.example/a:1".parse(), Ok(Destination::Registry(_))));
        for bad in [
            "layout:a",
            "layout::1",
            "layout:a:",
            "layout:a:b/c",
            "layout:a:b c",
            "layout://a:1",
            "reg.example/a:1",
            "./a",
        ] {
            let why = bad.parse::<Destination>().unwrap_err();
            assert!(why.contains("layout:FOLDER:TAG"), "{why}");
        }
        assert!("layout:~/a:1".parse::<Destination>().unwrap_err().contains("layout:$HOME/a:1"));
    }
}
