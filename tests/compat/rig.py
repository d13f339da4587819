"""One node for both programs: a fake NVML, device nodes, and a stand-in kubelet, made again for each run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from outcome import Outcome
from say import TestError

#: What programs without GPUs need of /dev.
PLAIN_NODES = ["null", "zero", "full", "random", "urandom", "tty"]
#: What the driver makes there.
NVIDIA_NODES = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", *(f"nvidia{minor}" for minor in range(8))]
#: How long a program has to end or to register: NVIDIA's plugin needs less than one, Berth in a debug build a few.
START_SECONDS = 15
#: A list that is not the expected one and stays so long will not become it.
STUCK_SECONDS = 4
#: For so long a list must stay as it is.
STILL_SECONDS = 0.6
#: After an event of a GPU a change is waited for, or that there is none.
EVENT_SECONDS = 3.0
#: Where the chart mounts the driver, and NVIDIA's plugin searches for it.
DRIVER_ROOT = Path("/driver-root")
#: That of tests/fake-nvml.
DRIVER_VERSION = "570.172.08"
KUBELET = Path("/var/lib/kubelet")
#: Folders that programs use and that are covered by empty ones: those whose paths are fixed in NVIDIA's plugin, and that of the
#: container runtime's configuration. Of the kubelet's folder the parent is covered: if a kubelet outside removed the
#: folder itself, a mount on it would end, and this script would then empty the folder of the next kubelet.
COVERED = ["/var/lib", "/run", str(DRIVER_ROOT), "/etc/containerd"]
#: Between the id of a device and the number of a share of it.
SHARE = "::"
#: For containers of so many shares it is asked which are preferred: on two GPUs, packed and distributed differ in both.
PREFERRED = (1, 3)


def mount(*words: object) -> None:
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TestError(f"mount {' '.join(map(str, words))}: {done.stderr.strip()}")


def berth_command(program: Path, rig: "Rig") -> list[object]:
    return [program, "serve", "--state-dir", rig.state, "--admin-listen", "127.0.0.1:0", "--api-server", "off"]


class Rig:
    def __init__(self, folder: Path, library: Path, kubelet: Path | None) -> None:
        """`kubelet`: the stand-in kubelet that `serving` starts."""
        self.folder = folder
        self.state = folder / "state"
        self._warm = folder / "warm"
        self._kubelet_program = kubelet
        for number, path in enumerate(COVERED):
            own = folder / f"covered{number}"
            own.mkdir()
            mount("--bind", own, path)
        KUBELET.mkdir()
        Path("/run/cdi").mkdir()
        # Without a file or a flag both pass GPUs by the variable: NVIDIA's plugin always, Berth where that works.
        runtime = '[plugins."io.containerd.grpc.v1.cri".containerd]\ndefault_runtime_name = "nvidia"\n'
        Path("/etc/containerd/config.toml").write_text(f"version = 2\n{runtime}", encoding="ascii")
        # NVIDIA's plugin names the driver's libraries in its CDI specification.
        libraries = DRIVER_ROOT / "usr/lib64"
        libraries.mkdir(parents=True)
        for name in ("libcuda.so", "libnvidia-ml.so"):
            (libraries / f"{name}.{DRIVER_VERSION}").touch()
        self._devices()
        self._capabilities()
        self._library = folder / "lib"
        self._library.mkdir()
        (self._library / "libnvidia-ml.so.1").symlink_to(library.resolve())
        self._gpus = folder / "gpus.json"
        self._log = folder / "program.log"

    def _devices(self) -> None:
        """A /dev with NVIDIA's nodes: what they are does not matter, only that they are there."""
        dev = self.folder / "dev"
        dev.mkdir()
        for name in PLAIN_NODES:
            (dev / name).touch()
            mount("--bind", f"/dev/{name}", dev / name)
        for minor, name in enumerate(NVIDIA_NODES):
            os.mknod(dev / name, stat.S_IFCHR | 0o666, os.makedev(195, minor))
        mount("--rbind", dev, "/dev")
        (DRIVER_ROOT / "dev").mkdir()
        mount("--rbind", dev, DRIVER_ROOT / "dev")

    def _capabilities(self) -> None:
        """The driver's table of MIG capabilities."""
        mount("-t", "tmpfs", "none", "/proc/driver")
        caps = Path("/proc/driver/nvidia-caps")
        caps.mkdir()
        lines, minor = ["config 1", "monitor 2"], 3
        for gpu in range(8):
            for instance in range(15):
                for name in (f"gpu{gpu}/gi{instance}/access", f"gpu{gpu}/gi{instance}/ci0/access"):
                    lines.append(f"{name} {minor}")
                    minor += 1
        (caps / "mig-minors").write_text("\n".join(lines) + "\n", encoding="ascii")

    def warm(self, program: Path) -> None:
        """Compiles the shipped policies once; each run begins with a copy of what came of it."""
        from configurations import WARM

        found = self.run(WARM, berth_command(program, self), None)
        if not found.lists:
            raise TestError(f"{program} serves nothing with {WARM.name}: {found.log[-2000:]}")
        policies = self.state / "policies"
        if policies.is_dir():
            shutil.copytree(policies, self._warm)

    def run(self, case, command: list, expected: Outcome | None) -> Outcome:
        """Starts the program under the case and gives what came of it. `expected` shortens the wait."""
        flags, env = list(case.flags), dict(case.env)
        if case.file is not None:
            path = self.folder / "config.yaml"
            path.write_text(case.file, encoding="utf-8")
            if case.by == "env":
                env["CONFIG_FILE"] = str(path)
            else:
                flags.append(f"--config-file={path}")
        with self.serving([*command, *flags], case.gpus(), env, case.driver) as (program, kubelet):
            outcome = self._observe(case, program, kubelet, expected)
        outcome.log = self.log()
        return outcome

    @contextmanager
    def serving(self, command: list, gpus: dict, env: dict[str, str], driver: bool = True) -> Iterator[tuple]:
        """The program, just started, and the stand-in kubelet, on an empty node with these GPUs. Both are stopped at the end."""
        self._clean()
        if self._warm.is_dir():
            self.state.mkdir(mode=0o700)
            shutil.copytree(self._warm, self.state / "policies")
        self.write(gpus)
        env = {"PATH": os.environ["PATH"], "HOME": "/root", "FAKE_NVML_CONFIG": str(self._gpus), **env}
        if driver:
            env.setdefault("LD_LIBRARY_PATH", str(self._library))
        kubelet = Kubelet(self._kubelet_program, self.folder / "kubelet.log")
        with open(self._log, "wb") as log:
            program = subprocess.Popen([*map(str, command)], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield program, kubelet
        finally:
            program.send_signal(signal.SIGTERM)
            try:
                program.wait(10)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
            kubelet.stop()

    def log(self) -> str:
        """The output of the last program."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _observe(self, case, program: subprocess.Popen, kubelet: "Kubelet", expected: Outcome | None) -> Outcome:
        lists = self._settled(program, kubelet, expected.first if expected else None, case.serves_nothing)
        if program.poll() is not None:
            return Outcome(refused=True, status=program.returncode)
        outcome = Outcome(first=lists, lists=lists)
        for resource, devices in lists.items():
            healthy = sorted(id for id, health in devices.items() if health == "Healthy")
            for count in range(1, min(len(healthy), 2) + 1):
                outcome.answers[f"{resource} x{count}"] = kubelet.allocate(resource, healthy[:count])
                if count == 1 and SHARE in healthy[0]:
                    outcome.preferred |= self._preferred(kubelet, resource, healthy[0], healthy[1:])
        if case.events:
            self.write(case.gpus(events=True))
            end = time.monotonic() + EVENT_SECONDS
            while time.monotonic() < end:
                outcome.lists = kubelet.devices()
                if expected and outcome.lists == expected.lists != expected.first:
                    break
                time.sleep(0.1)
        return outcome

    @staticmethod
    def _preferred(kubelet: "Kubelet", resource: str, held: str, left: list[str]) -> dict:
        """Where the next shares are to be. Which of equally held devices, and which of a device's shares, is chance."""
        found = {}
        for count in PREFERRED:
            if count <= len(left):
                found[f"{resource} x{count}"] = ids = kubelet.prefer(resource, count, left)
                if not isinstance(ids, str):
                    by_device = Counter(id.partition(SHARE)[0] for id in ids)
                    beside = by_device.pop(held.partition(SHARE)[0], 0)
                    found[f"{resource} x{count}"] = {"beside": beside, "elsewhere": sorted(by_device.values())}
        return found

    @staticmethod
    def _settled(program: subprocess.Popen, kubelet: "Kubelet", wanted: dict | None, nothing: bool) -> dict:
        """The lists, once they stay as they are. `wanted`: no longer waited for than until they are that."""
        end = time.monotonic() + START_SECONDS
        quiet_end = time.monotonic() + (5 if nothing else START_SECONDS)
        last, since = None, time.monotonic()
        while time.monotonic() < end and program.poll() is None:
            lists = kubelet.devices()
            if lists != last:
                last, since = lists, time.monotonic()
            still = time.monotonic() - since > STILL_SECONDS
            if still and lists and (wanted is None or lists == wanted):
                return lists
            # Something else than wanted, for long: it will not change.
            if lists and time.monotonic() - since > STUCK_SECONDS:
                return lists
            if not lists and time.monotonic() > quiet_end:
                return lists
            time.sleep(0.05)
        return last or {}

    def write(self, state: dict) -> None:
        """Replaces the state file of the fake NVML."""
        draft = self._gpus.with_suffix(".new")
        draft.write_text(json.dumps(state), encoding="utf-8")
        draft.rename(self._gpus)

    def _clean(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        for specification in Path("/run/cdi").iterdir():
            specification.unlink()
        for entry in KUBELET.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


class Kubelet:
    """tests/kubelet-standin's example `node`: a line in, a line out."""

    def __init__(self, program: Path, log: Path) -> None:
        self._child = subprocess.Popen(
            [program, KUBELET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(log, "ab"), text=True, bufsize=1
        )
        if self._child.stdout.readline().strip() != "ok":
            raise TestError(f"the stand-in kubelet does not start: {log.read_text()[-500:]}")

    def _ask(self, line: str) -> tuple[bool, str]:
        self._child.stdin.write(line + "\n")
        answer = self._child.stdout.readline().strip()
        return answer.startswith("ok"), answer.removeprefix("ok").removeprefix("no:").strip()

    def devices(self) -> dict[str, dict[str, str]]:
        ok, text = self._ask("devices")
        if not ok:
            raise TestError(f"the stand-in kubelet: {text}")
        # A resource that was served and is empty is not offered.
        return {resource: devices for resource, devices in json.loads(text).items() if devices}

    def allocate(self, resource: str, ids: list[str]) -> dict | str:
        ok, text = self._ask(f"allocate {resource} {','.join(ids)}")
        return json.loads(text) if ok else "refused"

    def prefer(self, resource: str, count: int, of: list[str]) -> list[str] | str:
        ok, text = self._ask(f"prefer {resource} {count} {','.join(of)}")
        return json.loads(text) if ok else "refused"

    def stop(self) -> None:
        self._child.stdin.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
