//! The state folder (space, permissions, the token, use by another daemon), and the ports of the listeners, which a
//! daemon that already runs with this configuration may use.

use super::line::Line;
use berth_api::Node;
use berth_cli::client::Client;
use berth_cli::endpoint::ClientArgs;
use berth_cli::endpoint::is_berth_at;
use berth_config::Config;
use berth_files::{USABLE_BY_OTHERS, WRITABLE_BY_OTHERS};
use rustix::fs::{Access, access, major, minor, statvfs};
use std::fs::{metadata, read_to_string};
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const CHECK: &str = "state folder";
/// Free space below which a warning is due: the store takes up to about 20 MiB, a policy with its compiled form up to
/// about 100 MiB.
const FREE_BYTES_MIN: u64 = 256 * 1024 * 1024;
/// Free space below which the daemon may not start or records nothing: an empty store takes 2 MiB and keeps 4 MiB free
/// in its own file.
const FREE_BYTES_START: u64 = 6 * 1024 * 1024;
/// The fix for an unusable folder.
const UNWRITABLE_HINT: &str = "make it writable, or choose another with --state-dir";

pub(super) fn folder(config: &Config) -> Line {
    let path = &config.node.state_dir;
    let shown = path.display();
    // Missing folders are created at the start, so the first existing parent is checked.
    let Some(existing) = path.ancestors().find(|p| p.exists()) else {
        return Line::fail(CHECK, format!("{shown} cannot be inspected"), UNWRITABLE_HINT);
    };
    if !existing.is_dir() {
        return Line::fail(CHECK, format!("{} is not a folder", existing.display()), UNWRITABLE_HINT);
    }
    if let Err(error) = access(existing, Access::WRITE_OK | Access::EXEC_OK) {
        return Line::fail(
            CHECK,
            format!("{} is not writable: {error}", existing.display()),
            UNWRITABLE_HINT,
        );
    }
    let finding = token(&config.admin.token_file)
        .or_else(|| lost_store(path))
        .or_else(|| in_use(config))
        .or_else(|| exposed(path, WRITABLE_BY_OTHERS))
        .or_else(|| {
            let stat = statvfs(existing).ok()?;
            free_space(path, stat.f_bavail.saturating_mul(stat.f_frsize))
        });
    finding.unwrap_or_else(|| match existing == path {
        true => Line::ok(CHECK, format!("{shown} exists and is writable")),
        false => Line::ok(CHECK, format!("{shown} will be created at the first start")),
    })
}

/// The error of the token file, if there is one.
fn token(path: &Path) -> Option<Line> {
    if let Err(error) = berth_http::check_token_file(path) {
        let fix = format!("correct {}, or delete it: the daemon creates a new one", path.display());
        return Some(Line::fail(CHECK, format!("{:#}", anyhow::Error::new(error)), fix));
    }
    exposed(path, USABLE_BY_OTHERS)
}

/// A warning if others can use this file or folder.
fn exposed(path: &Path, mode_bits: u32) -> Option<Line> {
    let found = berth_files::exposures(path, &metadata(path).ok()?, mode_bits);
    let (what, fixes): (Vec<_>, Vec<_>) = found.into_iter().map(|one| (one.what, one.fix)).unzip();
    (!what.is_empty()).then(|| Line::warn(CHECK, what.join("; "), fixes.join(" && ")))
}

/// A failure if the store existed and is missing now.
fn lost_store(path: &Path) -> Option<Line> {
    (path.join("store.made").exists() && !path.join("store/data").exists()).then(|| {
        let detail = format!("the store in {} is missing, although one was created there", path.display());
        let dir = path.display();
        let fix = format!(
            "restore store/data, or run `berth state import FILE --state-dir {dir}`; `berth state init --state-dir {dir}` \
             creates an empty store"
        );
        Line::fail(CHECK, detail, fix)
    })
}

/// A failure if a process has the store, unless it is the daemon of this configuration.
fn in_use(config: &Config) -> Option<Line> {
    let lock = metadata(config.node.state_dir.join("store/lock")).ok()?;
    let locks = read_to_string("/proc/locks").ok()?;
    if !is_locked(&locks, lock.dev(), lock.ino()) || is_running(config) {
        return None;
    }
    let detail = format!("{} is in use by another process", config.node.state_dir.display());
    Some(Line::fail(CHECK, detail, "stop it, or choose another folder with --state-dir"))
}

/// Whether `/proc/locks` has an exclusive lock on this file. Trying the lock could fail a daemon that starts meanwhile.
fn is_locked(locks: &str, device: u64, inode: u64) -> bool {
    let file = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    locks.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|fields| {
        fields.get(1) == Some(&"FLOCK")
            && fields.get(3) == Some(&"WRITE")
            && fields.get(5) == Some(&file.as_str())
    })
}

/// The finding for too little free space, if there is one.
fn free_space(path: &Path, bytes: u64) -> Option<Line> {
    let fix = format!(
        "free space on it ({} MiB are enough), or choose another disk with --state-dir",
        FREE_BYTES_MIN >> 20
    );
    let detail = format!("{} has {} MiB of free space", path.display(), bytes >> 20);
    if bytes < FREE_BYTES_START {
        return Some(Line::fail(CHECK, detail + ", too little for the store", fix));
    }
    (bytes < FREE_BYTES_MIN).then(|| Line::warn(CHECK, detail, fix))
}

/// Whether a daemon with this configuration runs: it accepts the token of this state folder. With TLS, whether any
/// Berth daemon answers, since its certificate may name no address of this node.
fn is_running(config: &Config) -> bool {
    match url(config) {
        Some(url) => node(config, url).is_some(),
        None => is_berth_at("https", config.admin.listen),
    }
}

fn node(config: &Config, url: String) -> Option<Node> {
    let args = ClientArgs {
        server: url,
        token_file: Some(config.admin.token_file.clone()),
        ..ClientArgs::default()
    };
    Client::new(&args).and_then(|client| client.get::<Node>("/node")).ok()
}

/// The running daemon's checks of its registrations, and of whether allocations of ended pods can end; none if no
/// daemon answers without TLS.
pub(super) fn running(config: &Config) -> Vec<Line> {
    let Some(node) = url(config).and_then(|url| node(config, url)) else {
        return Vec::new();
    };
    let line = |(check, title, ok, fix): (&str, &'static str, &str, &str)| {
        let check = node.checks.iter().find(|one| one.name == check)?;
        Some(match &check.detail {
            None => Line::ok(title, ok),
            Some(detail) if check.ok => Line::warn(title, detail, fix),
            Some(detail) => Line::fail(title, detail, fix),
        })
    };
    let checks = [
        (
            "kubelet",
            "registration",
            "the kubelet has every resource of the running daemon",
            "see the kubelet folder and kubelet socket above; `berth node show` has the state of each resource",
        ),
        (
            "evidence",
            "evidence",
            "the allocations of ended pods can end",
            "let the daemon read the kubelet's folders; `berth allocation list` shows the allocations",
        ),
    ];
    checks.into_iter().filter_map(line).collect()
}

/// The admin API's URL for a daemon with this configuration; `None` if only TLS is served.
fn url(config: &Config) -> Option<String> {
    match (&config.admin.access.socket, &config.admin.access.tls) {
        (Some(path), _) => Some(format!("unix://{}", path.display())),
        (None, Some(_)) => None,
        (None, None) => Some(format!("http://{}", config.admin.listen)),
    }
}

pub(super) fn ports(config: &Config) -> Line {
    const CHECK: &str = "admin API";
    let addresses =
        [(Some(config.admin.listen), "--admin-listen"), (config.admin.health_listen, "--health-listen")];
    for (address, flag) in addresses.into_iter().filter_map(|(address, flag)| Some((address?, flag))) {
        let Err(error) = TcpListener::bind(address) else { continue };
        if is_running(config) {
            return Line::ok(CHECK, format!("berth answers at {} already", config.admin.listen));
        }
        if is_berth_at("http", config.admin.listen) {
            let (at, file) = (config.admin.listen, config.admin.token_file.display());
            let detail = format!("a Berth daemon answers at {at}, and the token in {file} is not its own");
            let fix = format!(
                "if it is this node's daemon, give its --state-dir or --config; else choose another address with {flag}"
            );
            return Line::fail(CHECK, detail, fix);
        }
        let detail = format!("cannot listen on {address}: {error}");
        let fix =
            format!("stop the program that uses it (see ss -ltnp), or choose another address with {flag}");
        return Line::fail(CHECK, detail, fix);
    }
    Line::ok(CHECK, format!("{} is free", config.admin.listen))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::line::Level;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_full_disk_fails_and_little_space_is_a_warning() {
        let level = |bytes| free_space(Path::new("/s"), bytes).map(|line| line.level);
        assert_eq!(level(0), Some(Level::Fail));
        assert_eq!(level(FREE_BYTES_START - 1), Some(Level::Fail));
        assert_eq!(level(FREE_BYTES_START), Some(Level::Warn));
        assert_eq!(level(FREE_BYTES_MIN), None);
    }

    #[test]
    fn a_lost_store_fails_and_a_store_that_never_existed_does_not() {
        let dir = tempfile::tempdir().unwrap();
        assert!(lost_store(dir.path()).is_none());
        std::fs::write(dir.path().join("store.made"), "").unwrap();
        assert_eq!(lost_store(dir.path()).map(|line| line.level), Some(Level::Fail));
        std::fs::create_dir_all(dir.path().join("store/data")).unwrap();
        assert!(lost_store(dir.path()).is_none());
    }

    #[test]
    fn locks_are_found_by_device_and_inode() {
        let locks = "1: POSIX  ADVISORY  WRITE 7 fe:00:5 0 EOF\n2: FLOCK  ADVISORY  READ 7 fe:00:6 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 7 fe:00:7 0 EOF\n3: -> FLOCK  ADVISORY  WRITE 8 fe:00:9 0 EOF\n";
        let device = rustix::fs::makedev(0xfe, 0);
        let locked: Vec<_> = (5..10).filter(|inode| is_locked(locks, device, *inode)).collect();
        assert_eq!(locked, [7]);
        assert!(!is_locked(locks, rustix::fs::makedev(0xfd, 0), 7));
    }

    #[test]
    fn an_invalid_token_file_fails() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        assert!(token(&path).is_none());
        let with = |text: &str, mode| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            token(&path).map(|line| line.level)
        };
        assert_eq!(with(&"0".repeat(64), 0o600), None);
        assert_eq!(with(&"0".repeat(64), 0o644), Some(Level::Warn));
        assert_eq!(with(&"0".repeat(64), 0o622), Some(Level::Fail));
        assert_eq!(with("short", 0o600), Some(Level::Fail));
    }

    #[test]
    fn a_folder_that_others_can_change_is_a_warning_with_the_command_that_mends_it() {
        let dir = tempfile::tempdir().unwrap();
        let with = |mode| {
            std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(mode)).unwrap();
            exposed(dir.path(), WRITABLE_BY_OTHERS).map(|line| (line.level, line.fix))
        };
        assert_eq!(with(0o755), None);
        let fix = format!("chmod go-w {}", dir.path().display());
        assert_eq!(with(0o777), Some((Level::Warn, Some(fix))));
    }
}
