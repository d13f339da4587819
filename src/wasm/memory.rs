//! The compiler's memory limit.
//!
//! With cgroup v2 the kubelet has all processes of a container killed when one exceeds the memory limit, so a
//! compilation must fail by a lower limit of its own. With cgroup v1 only the compiler is killed, and no other limit
//! is necessary.

use std::fs;
use std::path::Path;

use super::limits::{COMPILE_MEMORY_BYTES_MAX, COMPILE_MEMORY_BYTES_MIN, DAEMON_MEMORY_BYTES};

/// Address space for one compilation, bytes.
///
/// # Errors
/// If the memory limit of this process' cgroup is too low.
pub(super) fn compiler_memory_bytes() -> Result<u64, String> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    share_of(limit(&own, Path::new("/sys/fs/cgroup")))
}

fn share_of(limit: Option<u64>) -> Result<u64, String> {
    let Some(limit) = limit else {
        return Ok(COMPILE_MEMORY_BYTES_MAX);
    };
    let left = limit.saturating_sub(DAEMON_MEMORY_BYTES);
    if left < COMPILE_MEMORY_BYTES_MIN {
        return Err(format!(
            "the memory limit of this container is {} MiB, but compiling needs {} MiB; raise the \
             limit, 832 MiB are enough for every policy",
            limit >> 20,
            (COMPILE_MEMORY_BYTES_MIN + DAEMON_MEMORY_BYTES) >> 20
        ));
    }
    Ok(left.min(COMPILE_MEMORY_BYTES_MAX))
}

/// The lowest `memory.max` of this process' cgroup and its ancestors; `None` without a limit or without cgroup v2.
fn limit(own: &str, root: &Path) -> Option<u64> {
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let folder = root.join(own);
    let groups = folder.ancestors().take_while(|group| group.starts_with(root));
    let limits = groups.filter_map(|group| {
        let text = fs::read_to_string(group.join("memory.max")).ok()?;
        // `max` means that there is no limit.
        text.trim().parse::<u64>().ok()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_lowest_limit_of_all_ancestors_counts() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        fs::create_dir_all(root.join("pods/one")).unwrap();
        assert_eq!(limit("0::/pods/one\n", root), None);
        fs::write(root.join("pods/one/memory.max"), "max\n").unwrap();
        assert_eq!(limit("0::/pods/one\n", root), None);
        fs::write(root.join("pods/memory.max"), "1000\n").unwrap();
        assert_eq!(limit("4:memory:/x\n0::/pods/one\n", root), Some(1000));
        fs::write(root.join("pods/one/memory.max"), "999\n").unwrap();
        assert_eq!(limit("0::/pods/one\n", root), Some(999));
        // A container sees its own group as the root.
        fs::write(root.join("memory.max"), "500\n").unwrap();
        assert_eq!(limit("0::/\n", root), Some(500));
        assert_eq!(limit("4:memory:/x\n", root), None);
    }

    #[test]
    fn the_compiler_gets_the_memory_that_the_daemon_does_not_need() {
        assert_eq!(share_of(None), Ok(768 * MIB));
        assert_eq!(share_of(Some(8192 * MIB)), Ok(768 * MIB));
        assert_eq!(share_of(Some(512 * MIB)), Ok(448 * MIB));
        let error = share_of(Some(128 * MIB)).unwrap_err();
        assert!(error.contains("128 MiB") && error.contains("192 MiB"), "{error}");
    }
}
