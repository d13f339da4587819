"""Takes away what a run leaves: containers, shims, mounts, cgroups, folders, kernel settings.

It is the same code at the end of a run and before the next one, so a run that was
killed with -9 is cleaned up by the next.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import machine
import process
from places import CONTAINER_LOGS, CONTAINERD_SOCKET, KUBELET, LIB, MARKER, RUN
from say import TestError, problem

_CGROUPS = Path("/sys/fs/cgroup")
_BEFORE = LIB / "before.json"
#: Every shim of every containerd keeps its socket here; the folder is fixed in containerd's source.
_SHIMS = Path("/run/containerd")


def remember_machine() -> None:
    """Makes this run's folders and notes the kernel settings, before anything changes them."""
    for folder in (RUN, LIB, KUBELET):
        folder.mkdir(parents=True, exist_ok=True)
    MARKER.write_text("Made by Berth's end-to-end test, which removes this folder.\n", encoding="utf-8")
    before = {"kernel": machine.kernel_settings(), "shims": _SHIMS.exists()}
    _BEFORE.write_text(json.dumps(before), encoding="utf-8")


def clean() -> None:
    """Leaves the machine as it was. containerd and the kubelet must have ended before."""
    if not MARKER.exists() and not LIB.exists() and not RUN.exists():
        return
    kill_containers()
    _unmount_all()
    _remove_log_links()
    if _BEFORE.exists():
        before = json.loads(_BEFORE.read_text(encoding="utf-8"))
        machine.restore_kernel_settings(before["kernel"])
        if not before["shims"]:
            shutil.rmtree(_SHIMS, ignore_errors=True)
    for folder in (RUN, LIB, KUBELET):
        _remove(folder)


def kill_containers() -> None:
    """Ends every process in the kubelet's cgroups, and the shims of this test's containerd."""
    end = time.monotonic() + 10
    while True:
        left = container_pids() + _shim_pids()
        if not left:
            break
        if time.monotonic() > end:
            raise TestError(f"processes {left} of containers do not end")
        for pid in left:
            _kill(pid)
        time.sleep(0.05)
    for group in _kubepods():
        _remove_cgroup(group)


def _kubepods() -> list[Path]:
    """The kubelet's cgroup in each hierarchy: one for each controller with version 1, a single one with version 2.

    Safe to empty, since `machine` refuses to run beside another kubelet.
    """
    found = [_CGROUPS / "kubepods", *_CGROUPS.glob("*/kubepods")]
    return [path for path in found if path.is_dir()] if MARKER.exists() else []


def container_pids() -> list[int]:
    """Every process in a container of the kubelet, sandboxes included."""
    pids = set()
    for group in _kubepods():
        # os.walk skips groups that vanish while it runs.
        for folder, _, _ in os.walk(group):
            try:
                listing = Path(folder, "cgroup.procs").read_text(encoding="ascii")
            except OSError:
                continue
            pids.update(int(line) for line in listing.split())
    return sorted(pids - {0})


def _shim_pids() -> list[int]:
    mine = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            args = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"containerd-shim" in args[0] and str(CONTAINERD_SOCKET).encode() in args:
            mine.append(int(entry.name))
    return mine


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _remove_cgroup(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            # Its last process may not be reaped yet; an empty cgroup left over harms nothing.
            continue


def _mounts_at(folders: tuple) -> list[str]:
    """Mount points on the folders and below; the kubelet mounts its root onto itself to share it."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if any(f"{point}/".startswith(f"{folder}/") for folder in folders):
            points.append(point)
    return points


def _unmount_all() -> None:
    folders = (RUN, LIB, KUBELET) if MARKER.exists() else (RUN, LIB)
    for point in reversed(_mounts_at(folders)):
        try:
            process.run(["umount", point], f"unmount {point}")
        except TestError:
            process.run(["umount", "-l", point], f"unmount {point}")


def _remove_log_links() -> None:
    """Removes the dangling links that the kubelet made for the logs of this test's containers."""
    if not CONTAINER_LOGS.is_dir():
        return
    for link in CONTAINER_LOGS.iterdir():
        if link.is_symlink() and "-berth-e2e_" in link.name:
            link.unlink()


def _remove(folder: Path) -> None:
    """Removes one of our folders, unless something is still mounted in it."""
    if folder == KUBELET and not MARKER.exists():
        return
    if _mounts_at((folder,)):
        problem(f"{folder} still has mounts and is left as it is")
        return
    if folder == KUBELET:
        # The marker goes last, so that a clean-up cut short can be done again.
        for entry in folder.iterdir():
            if entry != MARKER:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    shutil.rmtree(folder, ignore_errors=True)
