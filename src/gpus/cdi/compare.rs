//! The comparison of two specifications by what their containers get.

use super::spec::{ContainerEdits, OciHook, Spec};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Parts of paths in a container that only graphics needs: what Berth's specification leaves out of nvidia-ctk's.
const GRAPHICS: [&str; 12] = [
    "/dev/dri/by-path/",
    "/egl/",
    "/gbm/",
    "/glvnd/",
    "/vulkan/",
    "/xorg/",
    "/X11/",
    "/libnvidia-egl-",
    "/libnvidia-vulkan-producer",
    "/libnvidia-api.so",
    "/nvidia-application-profiles",
    "/icd.d/",
];
/// Part of the paths of firmware.
const FIRMWARE: &str = "/firmware/nvidia/";
/// The name of the device that stands for all GPUs.
const ALL: &str = "all";

/// The differences of specification A from B.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// What a container gets by B and not by A, other than what Berth's specification leaves out.
    pub missing: Vec<String>,
    /// What a container gets by A and not by B, other than a library under its soname.
    pub extra: Vec<String>,
    /// What A leaves out on purpose: graphics, firmware, the device `all`.
    pub left_out: Vec<String>,
    /// Libraries that A has as files under their sonames, where B has links by a hook.
    pub soname_files: Vec<String>,
}

impl Comparison {
    /// Whether a container gets the same by both.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        self.missing.is_empty() && self.extra.is_empty()
    }
}

/// Compares what containers get. Kind, version, order and paths on the host are not compared.
#[must_use]
pub fn compare(a: &Spec, b: &Spec) -> Comparison {
    let mut comparison = Comparison::default();
    let links_of_b: BTreeSet<String> = links(&b.container_edits);
    let mut diff = |place: &str, a: &BTreeSet<Item>, b: &BTreeSet<Item>| {
        for item in b.difference(a) {
            let list = if item.is_left_out() { &mut comparison.left_out } else { &mut comparison.missing };
            list.push(format!("{place}: {item}"));
        }
        for item in a.difference(b) {
            let is_soname = matches!(item, Item::Mount(path) if is_soname_file(path, a, &links_of_b));
            let list = if is_soname { &mut comparison.soname_files } else { &mut comparison.extra };
            list.push(format!("{place}: {item}"));
        }
    };
    diff("every container", &items(&a.container_edits), &items(&b.container_edits));
    let (of_a, of_b) = (devices(a), devices(b));
    for (name, edits) in &of_b {
        match of_a.get(name) {
            Some(own) => diff(&format!("device {name}"), &items(own), &items(edits)),
            None => report_device(&mut diff, name, false),
        }
    }
    for name in of_a.keys().filter(|name| !of_b.contains_key(*name)) {
        report_device(&mut diff, name, true);
    }
    comparison
}

/// Reports a device that only one of the two has.
fn report_device(diff: &mut impl FnMut(&str, &BTreeSet<Item>, &BTreeSet<Item>), name: &str, is_in_a: bool) {
    let (only, none) = (BTreeSet::from([Item::Device(name.to_owned())]), BTreeSet::new());
    if is_in_a { diff("devices", &only, &none) } else { diff("devices", &none, &only) }
}

/// The paths on the host that a specification names and that do not exist below `root`, which is `/` outside tests.
#[must_use]
pub fn missing_host_paths(spec: &Spec, root: &Path) -> Vec<String> {
    let mut paths = BTreeSet::new();
    for edits in spec.all_edits() {
        paths.extend(edits.device_nodes.iter().map(|node| node.host_path.as_ref().unwrap_or(&node.path)));
        paths.extend(edits.mounts.iter().map(|mount| &mount.host_path));
        paths.extend(edits.hooks.iter().map(|hook| &hook.path));
    }
    let exists = |path: &&&String| !root.join(path.trim_start_matches('/')).exists();
    paths.iter().filter(exists).map(|path| (*path).clone()).collect()
}

/// One thing that a container gets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Item {
    Device(String),
    Env(String),
    Group(u32),
    Hook { when: String, args: String },
    Mount(String),
    Node(String),
}

impl Item {
    /// Whether it is of what Berth's specification leaves out.
    fn is_left_out(&self) -> bool {
        let is_graphics = |path: &str| GRAPHICS.iter().any(|part| path.contains(part));
        match self {
            Self::Device(name) => name == ALL,
            Self::Mount(path) => path.contains(FIRMWARE) || is_graphics(path),
            Self::Hook { args, .. } => {
                args.split_once("::").is_some_and(|(_, link)| is_graphics(link)) || args.contains("/gbm")
            }
            Self::Env(_) | Self::Group(_) | Self::Node(_) => false,
        }
    }
}

impl std::fmt::Display for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Device(name) => write!(f, "device {name}"),
            Self::Env(variable) => write!(f, "variable {variable}"),
            Self::Group(id) => write!(f, "group {id}"),
            Self::Hook { when, args } => write!(f, "{when} hook {args}"),
            Self::Mount(path) => write!(f, "mount {path}"),
            Self::Node(path) => write!(f, "device node {path}"),
        }
    }
}

fn devices(spec: &Spec) -> BTreeMap<&str, &ContainerEdits> {
    spec.devices.iter().map(|device| (device.name.as_str(), &device.container_edits)).collect()
}

fn items(edits: &ContainerEdits) -> BTreeSet<Item> {
    let mut items: BTreeSet<Item> = edits.env.iter().cloned().map(Item::Env).collect();
    items.extend(edits.device_nodes.iter().map(|node| Item::Node(node.path.clone())));
    items.extend(edits.mounts.iter().map(|mount| Item::Mount(mount.container_path.clone())));
    items.extend(edits.additional_gids.iter().copied().map(Item::Group));
    items.extend(edits.hooks.iter().flat_map(hook_items));
    items
}

/// One item for each link and each folder that a hook handles, since one hook may do what two do; the program's own
/// name is not compared.
fn hook_items(hook: &OciHook) -> Vec<Item> {
    let item = |args: String| Item::Hook { when: hook.hook_name.clone(), args };
    let args: Vec<&str> = hook.args.iter().skip(1).map(String::as_str).filter(|arg| *arg != "hook").collect();
    match args.split_first() {
        Some((name @ (&"create-symlinks" | &"update-ldcache"), rest)) => {
            rest.chunks(2).map(|pair| item(format!("{name} {}", pair.join(" ")))).collect()
        }
        _ => vec![item(args.join(" "))],
    }
}

/// The paths of the links that hooks make.
fn links(edits: &ContainerEdits) -> BTreeSet<String> {
    let links = edits.hooks.iter().flat_map(|hook| &hook.args).filter_map(|arg| arg.split_once("::"));
    links.map(|(_, path)| path.to_owned()).collect()
}

/// Whether a mount is a library under its soname: a link of the other specification, or beside the same library under
/// the name with its version.
fn is_soname_file(path: &str, own: &BTreeSet<Item>, links_of_other: &BTreeSet<String>) -> bool {
    let Some(end) = path.rfind('/').and_then(|slash| Some(slash + path[slash..].find(".so")?)) else {
        return false;
    };
    let base = &path[..end + 3];
    let is_beside = own.iter().any(|item| {
        matches!(item, Item::Mount(other) if other != path && other.starts_with(base) && other.len() > path.len())
    });
    links_of_other.contains(path) || is_beside
}

#[cfg(test)]
mod tests {
    use super::super::spec::{Device, DeviceNode, Mount};
    use super::*;

    fn mount(path: &str) -> Mount {
        Mount { host_path: path.into(), container_path: path.into(), options: Vec::new() }
    }

    fn device(name: &str, node: &str) -> Device {
        let nodes = vec![DeviceNode { path: node.into(), ..DeviceNode::default() }];
        Device {
            name: name.into(),
            container_edits: ContainerEdits { device_nodes: nodes, ..ContainerEdits::default() },
        }
    }

    fn symlinks(links: &[&str]) -> OciHook {
        let mut args = vec!["nvidia-cdi-hook".to_owned(), "create-symlinks".to_owned()];
        for link in links {
            args.extend(["--link".to_owned(), (*link).to_owned()]);
        }
        OciHook {
            hook_name: "createContainer".into(),
            path: "/usr/bin/nvidia-cdi-hook".into(),
            args,
            env: vec![],
        }
    }

    fn theirs() -> Spec {
        let edits = ContainerEdits {
            mounts: vec![
                mount("/usr/lib64/libcuda.so.580.1"),
                mount("/lib/firmware/nvidia/580.1/gsp_ga10x.bin"),
                mount("/etc/vulkan/icd.d/nvidia_icd.json"),
            ],
            hooks: vec![symlinks(&["libcuda.so.580.1::/usr/lib64/libcuda.so.1"])],
            ..ContainerEdits::default()
        };
        let devices = vec![device("0", "/dev/nvidia0"), device("all", "/dev/nvidia0")];
        Spec { devices, container_edits: edits, ..Spec::default() }
    }

    #[test]
    fn what_berth_leaves_out_is_no_difference() {
        let b = theirs();
        let mut a = b.clone();
        a.devices.pop();
        a.container_edits.mounts.truncate(1);
        let found = compare(&a, &b);
        assert!(found.is_equal(), "{found:?}");
        assert_eq!(found.left_out.len(), 3);
    }

    #[test]
    fn a_library_that_is_missing_is_a_difference_and_a_soname_file_is_none() {
        let b = theirs();
        let mut a = b.clone();
        a.container_edits.mounts.push(mount("/usr/lib64/libcuda.so.1"));
        a.container_edits.mounts.push(mount("/usr/lib64/libother.so.1"));
        let found = compare(&a, &b);
        assert_eq!(found.soname_files, ["every container: mount /usr/lib64/libcuda.so.1"]);
        assert_eq!(found.extra, ["every container: mount /usr/lib64/libother.so.1"]);
        a.container_edits.mounts.clear();
        a.container_edits.hooks.clear();
        a.devices[0].container_edits.device_nodes[0].path = "/dev/nvidia1".into();
        let found = compare(&a, &b);
        assert_eq!(
            found.missing,
            [
                "every container: createContainer hook create-symlinks --link libcuda.so.580.1::/usr/lib64/libcuda.so.1",
                "every container: mount /usr/lib64/libcuda.so.580.1",
                "device 0: device node /dev/nvidia0",
            ]
        );
        assert_eq!(found.extra, ["device 0: device node /dev/nvidia1"]);
    }

    #[test]
    fn paths_that_the_host_lacks_are_named() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("usr/lib64")).unwrap();
        std::fs::write(root.path().join("usr/lib64/libcuda.so.580.1"), "").unwrap();
        let missing = missing_host_paths(&theirs(), root.path());
        assert!(!missing.contains(&"/usr/lib64/libcuda.so.580.1".to_owned()));
        assert!(missing.contains(&"/dev/nvidia0".to_owned()), "{missing:?}");
        assert!(missing.contains(&"/usr/bin/nvidia-cdi-hook".to_owned()));
    }
}
