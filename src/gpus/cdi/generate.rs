//! Berth's own specification, made of the same parts as that of nvidia-ctk (NVIDIA Container Toolkit 1.20), without
//! what only graphics needs, without firmware, and without the device `all`, with which a container would get every
//! GPU.

use super::OWN_KIND;
use super::driver::{Driver, DriverError, HookProgram, Libraries, links, soname};
use super::spec::{ContainerEdits, Device, DeviceNode, Mount, OciHook, Spec};
use berth_kernel::hardware::device_nodes::{HostFolder, OPTIONAL_NODES, REQUIRED_NODES, part_nodes};
use berth_kernel::hardware::gpu::Part;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Options of mounts: of files, of sockets, and of the one that requests no device from NVIDIA's runtime.
const FILE_OPTIONS: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
const SOCKET_OPTIONS: [&str; 5] = ["nosuid", "nodev", "rbind", "rprivate", "noexec"];
const VOID_OPTIONS: [&str; 4] = ["ro", "nosuid", "nodev", "bind"];
/// `S_IFCHR` of the type bits of a mode (inode(7)).
const CHARACTER_DEVICE: u32 = 0o020_000;
/// The subcommand of the hook of each whole GPU.
const MEMORY_HOOK: &str = "apply-cuda-memory-limits";

/// A specification, with what it lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The specification.
    pub spec: Spec,
    /// The version of the driver whose files it names.
    pub driver_version: String,
    /// What containers will lack, with the remedy.
    pub warnings: Vec<String>,
}

/// The specification of these parts: whole GPUs that are not in MIG mode, and MIG instances, each by index and by UUID.
///
/// # Errors
/// If the driver's libraries are not found.
pub fn generate(parts: &[&Part], driver: &Driver) -> Result<Generated, DriverError> {
    let libraries = driver.libraries()?;
    let mut warnings = Vec::new();
    let program = driver.find_hook();
    let common = common_edits(driver, &libraries, program.as_ref(), &mut warnings);
    let capabilities = fs::read_to_string(&driver.capabilities).unwrap_or_default();
    let has_memory_hook = program.as_ref().is_some_and(|program| !program.known(&[MEMORY_HOOK]).is_empty());
    let mut devices = Vec::new();
    for part in parts.iter().filter(|part| part.mig.is_some() || !part.mig_enabled) {
        let mut edits = part_edits(part, driver, &capabilities, &mut warnings);
        // A device without any change is not valid, and a container would start without its GPU.
        if edits.device_nodes.is_empty() {
            warnings.push(format!("{}: it is not offered until a device node of it exists", part.id));
            continue;
        }
        if part.mig.is_none() && has_memory_hook {
            edits.hooks = program.iter().map(|program| memory_hook(program, part, driver)).collect();
        }
        for name in names(part) {
            devices.push(Device { name, container_edits: edits.clone() });
        }
    }
    let mut spec =
        Spec { cdi_version: String::new(), kind: OWN_KIND.into(), devices, container_edits: common };
    spec.cdi_version = spec.least_version().into();
    spec.sort();
    spec.container_edits.mounts.dedup();
    Ok(Generated { spec, driver_version: libraries.version, warnings })
}

/// What every container with a GPU gets: nodes of the driver, its libraries, programs and sockets, and the hooks of
/// `program`.
fn common_edits(
    driver: &Driver,
    libraries: &Libraries,
    program: Option<&HookProgram>,
    warnings: &mut Vec<String>,
) -> ContainerEdits {
    let mut common = ContainerEdits {
        env: vec!["NVIDIA_VISIBLE_DEVICES=void".into(), libraries_variable(libraries)],
        ..ContainerEdits::default()
    };
    for path in REQUIRED_NODES.into_iter().chain(OPTIONAL_NODES) {
        match driver.node(path) {
            Some(node) => common.device_nodes.push(device_node(path, &node)),
            None if REQUIRED_NODES.contains(&path) => warnings.push(format!(
                "/{path} does not exist, so containers cannot use CUDA: run `nvidia-modprobe -u -c=0` on the node"
            )),
            None => {}
        }
    }
    common
        .mounts
        .extend(libraries.all.iter().map(|library| mount(&library.path, &library.file, &FILE_OPTIONS)));
    for path in driver.programs() {
        common.mounts.push(mount(&Path::new("/").join(&path), &driver.root.join(&path), &FILE_OPTIONS));
    }
    for path in driver.sockets() {
        common.mounts.push(mount(&Path::new("/").join(&path), &driver.root.join(&path), &SOCKET_OPTIONS));
    }
    // Keeps NVIDIA's runtime, where it is used, too, from adding GPUs a second time.
    common.mounts.push(Mount {
        host_path: "/dev/null".into(),
        container_path: "/var/run/nvidia-container-devices/void".into(),
        options: VOID_OPTIONS.map(String::from).to_vec(),
    });
    match program {
        Some(program) => common.hooks = hooks(program, libraries),
        None => {
            common.mounts.extend(soname_mounts(libraries));
            warnings.push(
                "nvidia-cdi-hook was not found on the host, so containers find the driver's libraries only through their \
                 own search path, and cannot use a newer CUDA by its compatibility libraries: install the NVIDIA Container \
                 Toolkit, or name the program in NVIDIA_CDI_HOOK_PATH"
                    .into(),
            );
        }
    }
    common.additional_gids = group_ids(&common);
    common
}

/// The device nodes of one part, with the groups that may open them.
fn part_edits(
    part: &Part,
    driver: &Driver,
    capabilities: &str,
    warnings: &mut Vec<String>,
) -> ContainerEdits {
    let nodes = part_nodes(part, capabilities);
    if part.minor.is_none() {
        warnings.push(format!(
            "{}: NVML reports no minor number of it, by which its device node is found",
            part.id
        ));
    }
    for name in &nodes.unlisted {
        warnings.push(format!(
            "{}: the driver lists no MIG capability {name} in {}, so containers cannot open this MIG instance",
            part.id,
            driver.capabilities.display()
        ));
    }
    let mut paths = nodes.paths;
    // Display devices belong to whole GPUs, and to MIG instances with graphics.
    if part.mig.as_ref().is_none_or(|mig| mig.profile.contains("+gfx")) {
        paths.extend(driver.display_nodes(part.pci_bus));
    }
    let mut edits = ContainerEdits::default();
    for path in &paths {
        match driver.node(path) {
            Some(node) => edits.device_nodes.push(device_node(path, &node)),
            None => {
                let minor = path.strip_prefix("dev/nvidia").filter(|rest| rest.parse::<u32>().is_ok());
                let fix = minor.map(|minor| format!(": run `nvidia-modprobe -c={minor}` on the node"));
                warnings.push(format!("{}: /{path} does not exist{}", part.id, fix.unwrap_or_default()));
            }
        }
    }
    edits.additional_gids = group_ids(&edits);
    edits
}

/// What a specification depends on, as a text: as long as it is the same, so is the specification. It is cheap: no
/// library is opened.
///
/// # Errors
/// If the driver's libraries are not found.
pub fn fingerprint(parts: &[&Part], driver: &Driver) -> Result<String, DriverError> {
    let version = driver.version()?;
    let mut text = format!("{version}\n{:?}\n", driver.library_names(&version));
    if let Some(hook) = driver.find_hook() {
        let _ = writeln!(text, "{hook:?} {:?}", hook.states());
    }
    let capabilities = fs::read_to_string(&driver.capabilities).unwrap_or_default();
    text += &capabilities;
    let node = |text: &mut String, path: &str| {
        let found = driver.node(path);
        let number = found.as_ref().and_then(|node| fs::metadata(&node.seen).ok()).map(|node| node.rdev());
        let _ = writeln!(text, "{path} {found:?} {number:?}");
    };
    for path in REQUIRED_NODES.into_iter().chain(OPTIONAL_NODES) {
        node(&mut text, path);
    }
    for part in parts {
        let _ = writeln!(text, "{} {:?} {:?} {:?}", part.id, part.minor, part.mig, part.mig_index());
        for path in part_nodes(part, &capabilities).paths.iter().chain(&driver.display_nodes(part.pci_bus)) {
            node(&mut text, path);
        }
    }
    let _ = writeln!(text, "{:?} {:?}", driver.programs(), driver.sockets());
    Ok(text)
}

/// The names of a part: by index, where it has one, and by UUID.
fn names(part: &Part) -> Vec<String> {
    let index = match (&part.mig, part.mig_index()) {
        (None, _) => Some(part.gpu_index.to_string()),
        (Some(_), Some(index)) => Some(format!("{}:{index}", part.gpu_index)),
        (Some(_), None) => None,
    };
    index.into_iter().chain([part.id.to_string()]).collect()
}

fn libraries_variable(libraries: &Libraries) -> String {
    let folders: Vec<_> = libraries.folders.iter().map(|folder| folder.display().to_string()).collect();
    format!("NVIDIA_CTK_LIBCUDA_DIR={}", folders.join(":"))
}

fn mount(path: &Path, file: &HostFolder, options: &[&str]) -> Mount {
    Mount {
        host_path: file.host.display().to_string(),
        container_path: path.display().to_string(),
        options: options.iter().map(|option| (*option).to_owned()).collect(),
    }
}

/// The node with its numbers and mode, so that a runtime need not find it at the same path.
fn device_node(path: &str, node: &HostFolder) -> DeviceNode {
    let (path, host) = (format!("/{path}"), node.host.display().to_string());
    let mut found = DeviceNode { host_path: (host != path).then_some(host), path, ..DeviceNode::default() };
    let Ok(metadata) = fs::metadata(&node.seen) else { return found };
    if metadata.mode() & 0o170_000 == CHARACTER_DEVICE {
        found.major = Some(rustix::fs::major(metadata.rdev()));
        found.minor = Some(rustix::fs::minor(metadata.rdev()));
        found.file_mode = Some(metadata.mode() & 0o7777).filter(|mode| *mode != 0);
        found.permissions = Some("rwm".into());
        found.gid = Some(metadata.gid()).filter(|gid| *gid != 0);
    }
    found
}

/// The groups of the nodes, which a container's process needs to open them if it is not root.
fn group_ids(edits: &ContainerEdits) -> Vec<u32> {
    let others_may = |node: &&DeviceNode| node.file_mode.is_none_or(|mode| mode & 0o006 == 0o006);
    let groups = edits.device_nodes.iter().filter(|node| !others_may(node)).filter_map(|node| node.gid);
    groups.collect::<BTreeSet<_>>().into_iter().collect()
}

/// The hooks of the NVIDIA Container Toolkit that every container needs, as far as the installed version has them.
fn hooks(program: &HookProgram, libraries: &Libraries) -> Vec<OciHook> {
    let flagged = |flag: &str, values: BTreeSet<String>| -> Vec<String> {
        values.into_iter().flat_map(|value| [flag.to_owned(), value]).collect()
    };
    let all_links: BTreeSet<String> = libraries.all.iter().flat_map(links).collect();
    let folders = libraries.all.iter().filter_map(|library| library.path.parent());
    let folders: BTreeSet<String> = folders.map(|folder| folder.display().to_string()).collect();
    let wanted = [
        ("create-symlinks", flagged("--link", all_links)),
        ("enable-cuda-compat", vec![format!("--host-driver-version={}", libraries.version)]),
        ("update-ldcache", flagged("--folder", folders)),
        ("disable-device-node-modification", Vec::new()),
        ("update-application-profile", Vec::new()),
    ];
    let names: Vec<&str> = wanted.iter().map(|(name, _)| *name).collect();
    let known = program.known(&names);
    let known = wanted.into_iter().filter(|(name, arguments)| {
        known.contains(name) && (*name != "create-symlinks" || !arguments.is_empty())
    });
    known.map(|(name, arguments)| hook(program, "createContainer", name, arguments)).collect()
}

/// The hook of a whole GPU: limits of CUDA's use of the machine's memory, where GPU and processor share it.
fn memory_hook(program: &HookProgram, part: &Part, driver: &Driver) -> OciHook {
    let root = driver.root.host.display().to_string();
    let arguments = vec!["--driver-root".into(), root, "--gpu-id".into(), part.id.to_string()];
    hook(program, "createRuntime", MEMORY_HOOK, arguments)
}

fn hook(program: &HookProgram, when: &str, subcommand: &str, arguments: Vec<String>) -> OciHook {
    let name = program.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let fixed = (name == "nvidia-ctk").then(|| "hook".to_owned());
    let args = [name].into_iter().chain(fixed).chain([subcommand.to_owned()]).chain(arguments);
    OciHook {
        hook_name: when.into(),
        path: program.path.display().to_string(),
        args: args.collect(),
        env: vec!["NVIDIA_CTK_DEBUG=false".into()],
    }
}

/// Each library once more under its soname and, where the host has it, under its name without a version, in place of
/// the links that the hooks make.
fn soname_mounts(libraries: &Libraries) -> Vec<Mount> {
    let mut mounts = Vec::new();
    for library in &libraries.all {
        let mut names: BTreeSet<String> = soname(&library.file.seen).ok().flatten().into_iter().collect();
        names.extend(links(library).iter().filter_map(|link| link_name(link)));
        names.retain(|name| Some(name.as_str()) != library.path.file_name().and_then(|n| n.to_str()));
        mounts.extend(
            names.iter().map(|name| mount(&library.path.with_file_name(name), &library.file, &FILE_OPTIONS)),
        );
    }
    mounts
}

/// The name of the link of `target::/folder/name`.
fn link_name(link: &str) -> Option<String> {
    let (_, path) = link.split_once("::")?;
    Path::new(path).file_name()?.to_str().map(String::from)
}
