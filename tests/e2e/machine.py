"""What the machine must have: root, Go, a few Debian packages, and no kubelet of its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from pathlib import Path

import process
from places import KUBELET, LOCK, MARKER
from say import TestError, note

#: Package, and a file that shows it is there. A machine that has the file by other means is left alone.
PACKAGES = {
    "containerd": "/usr/bin/containerd",
    "runc": "/usr/sbin/runc",
    "busybox-static": "/bin/busybox",
    "gcc": "/usr/bin/cc",
    "libc6-dev": "/usr/include/stdlib.h",
    "openssl": "/usr/bin/openssl",
}

#: Where the hierarchies of cgroup v1 are mounted, if there are any.
CGROUP1 = Path("/sys/fs/cgroup")
#: Where cgroup v2 is mounted: on a machine with both versions it has no controllers, but the containers' cgroups.
CGROUP2 = next(
    (root for root in map(Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")) if (root / "cgroup.controllers").exists()),
    Path("/sys/fs/cgroup"),
)

#: Ports of the kubelet on loopback; not the usual ones, so that they are likely to be free.
KUBELET_PORT = 20250
KUBELET_READ_ONLY_PORT = 20255
KUBELET_HEALTH_PORT = 20248
#: That of Berth's admin API: the default one, as pods and people know it.
ADMIN_PORT = 9470
#: Those of the API server and of its etcd, on loopback, too.
API_SERVER_PORT = 26443
ETCD_PORT = 22379
ETCD_PEER_PORT = 22380

#: What every kubelet sets for the whole machine at its start; put back at the end.
KERNEL_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


def lock():
    """Takes the machine for this run. Keep the returned file open: closing it lets go."""
    if os.geteuid() != 0:
        raise TestError("this test runs containerd and a kubelet, so it needs root: run it with `sudo -E just e2e`")
    held = open(LOCK, "w", encoding="utf-8")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise TestError(f"another run of this test is under way (it holds {LOCK})") from error
    return held


def check_no_other_kubelet() -> None:
    """Refuses where another kubelet runs, or where its folder holds what this test did not make."""
    for pid in _pids():
        if _program(pid) in ("kubelet", "k3s", "k0s", "microk8s"):
            raise TestError(
                f"process {pid} ({_program(pid)}) is a kubelet. Its device plugin folder is fixed at {KUBELET}, "
                "so there can be only one: run this test on a machine that is no node"
            )
    if KUBELET.exists() and any(KUBELET.iterdir()) and not MARKER.exists():
        raise TestError(f"{KUBELET} holds another kubelet's files: run this test on a machine that is no node")


def check_no_other_berth() -> None:
    """Refuses if another process listens on the port of Berth's admin API, which a case could not distinguish from a fault."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(("127.0.0.1", ADMIN_PORT)) == 0:
            raise TestError(
                f"port {ADMIN_PORT} of this machine is taken, perhaps by another Berth or its demo "
                "(`ss -ltnp` shows by whom): stop it and run the test again"
            )


def missing_packages() -> list[str]:
    return [name for name, witness in PACKAGES.items() if not Path(witness).exists()]


def install(packages: list[str]) -> None:
    """apt-get install of exactly the packages named."""
    if not packages:
        return
    by_hand = f"install {' '.join(packages)} by this machine's own means and run the test again"
    if shutil.which("apt-get") is None:
        raise TestError(f"this machine has no apt-get: {by_hand}")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    process.run(["apt-get", "update"], "apt-get update", env, seconds=300)
    apt = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    process.run(apt, f"apt-get install ({by_hand})", env, seconds=600)
    note(f"installed {' '.join(packages)}")


def go() -> str:
    """The path of Go. Its own toolchain switch fetches the version that go.mod asks for."""
    path = shutil.which("go")
    if path is None and Path("/usr/local/go/bin/go").exists():
        path = "/usr/local/go/bin/go"
    if path is None:
        raise TestError("the kubelet is built from Go modules, and there is no `go` here: install Go 1.21 or newer")
    return path


def kernel_settings() -> dict[str, str]:
    found = {}
    for name in KERNEL_SETTINGS:
        path = Path("/proc/sys") / name
        if path.exists():
            found[name] = path.read_text(encoding="ascii").strip()
    return found


def restore_kernel_settings(saved: dict[str, str]) -> None:
    for name, value in saved.items():
        path = Path("/proc/sys") / name
        if name in KERNEL_SETTINGS and path.read_text(encoding="ascii").strip() != value:
            path.write_text(value, encoding="ascii")


def _pids() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]


def _program(pid: int) -> str:
    """The program's name; empty for one that has ended, even if its parent has not noticed yet."""
    try:
        if not Path(f"/proc/{pid}/cmdline").read_bytes():
            return ""
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
