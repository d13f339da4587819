#!/usr/bin/env python3
"""NVIDIA's own tests of its DRA driver against Berth's: `just e2e-nvidia-dra CHECKOUT`. It needs what run.py needs.

The tests are run as they are in a checkout of kubernetes-sigs/dra-driver-nvidia-gpu: the Ginkgo suite test/e2e, tests of
tests/bats, and the pods of demo/specs/quickstart/v1. The GPUs are simulated.
Exit status: 0 all passed, 1 a case failed, 2 the test could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import stat
import sys
from pathlib import Path

# As in run.py.
sys.dont_write_bytecode = True

import containerd  # noqa: E402
import controlplane  # noqa: E402
import kubelet  # noqa: E402
import machine  # noqa: E402
import nvidia_driver  # noqa: E402
import places  # noqa: E402
import process  # noqa: E402
from nvidia_dra_cases import BATS, LEFT_OUT, SHARES, SUITE  # noqa: E402
from nvidia_dra_node import ClaimsBerth, Node  # noqa: E402
from say import Score, TestError, note, problem, until  # noqa: E402

_GPUS = 4
_PACKAGES = {
    "bats": "/usr/bin/bats",
    "bats-support": "/usr/lib/bats/bats-support/load.bash",
    "bats-assert": "/usr/lib/bats/bats-assert/load.bash",
    "bats-file": "/usr/lib/bats/bats-file/load.bash",
    "bash-static": "/bin/bash-static",
    "bc": "/usr/bin/bc",
    "jq": "/usr/bin/jq",
    "yq": "/usr/bin/yq",
}
#: Where NVIDIA's tests load the libraries of bats; Debian has them elsewhere.
_LIBRARIES, _DEBIAN_LIBRARIES = Path("/bats-libraries"), Path("/usr/lib/bats")
#: What a failed test of bats may leave behind.
_KINDS = "deployments,jobs,pods,resourceclaims,resourceclaimtemplates"


class Table(Score):
    """Remembers the result of each case, for the table at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[tuple[str, str]] = []

    def ok(self, name: str, detail: str = "") -> None:
        super().ok(name, detail)
        self._rows.append((name, "passed"))

    def fail(self, name: str, why: object) -> None:
        super().fail(name, why)
        self._rows.append((name, "failed"))

    def skip(self, name: str, why: str) -> None:
        super().skip(name, why)
        self._rows.append((name, f"left out: {why}"))

    def show(self) -> None:
        width = max(len(name) for name, _ in self._rows)
        for name, result in self._rows:
            print(f"{name:{width}}  {result}")

    def last_line(self) -> str:
        return f"nvidia-dra: {self.passed} passed, {self.failed} failed"


class Suites:
    """NVIDIA's tests on one node, with one Berth at a time."""

    def __init__(self, source: Path, ginkgo: Path, node: Node, args: argparse.Namespace, logs: Path, table: Table) -> None:
        self._source = source
        self._ginkgo = ginkgo
        self._node = node
        self._args = args
        self._logs = logs
        self._table = table

    def run(self) -> None:
        with self._berth(nvidia_driver.H200):
            if self._is_chosen("test/e2e"):
                self._run_ginkgo()
            for number, case in enumerate((self._own_gpus, self._same_in_containers, self._same_in_pods), 1):
                self._quickstart(number, case)
            with _BatsLibraries():
                for file, name in BATS:
                    self._bats(file, name)
        with self._berth(nvidia_driver.A100, ("1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb")):
            self._quickstart(4, self._own_instances)
        for file, name, why in LEFT_OUT:
            label = f"{file}: {name}"
            if self._is_chosen(label):
                self._table.skip(label, why)

    def _is_chosen(self, label: str) -> bool:
        return not self._args.only or any(text in label for text in self._args.only)

    def _berth(self, model: nvidia_driver.Model, split: tuple[str, ...] = ()) -> _Running:
        """Berth on GPUs of that model; with `split` all are in MIG mode, and split into instances of these profiles."""
        fake, driver = nvidia_driver.install(model, _GPUS, self._args.nvml_library)
        if split:
            driver.set_mig(True)
            driver.create(*split)
        self._node.environment |= {**SUITE, **fake.environment}
        berth = ClaimsBerth(self._logs, self._args.berth, fake, _GPUS, self._node.cluster.berth_kubeconfig)
        return _Running(berth, self._node)

    # test/e2e

    def _run_ginkgo(self) -> None:
        report = self._logs / "ginkgo.json"
        command = [self._ginkgo, "-test.timeout=30m", "-ginkgo.v", "-ginkgo.no-color", f"-ginkgo.json-report={report}"]
        folder = self._source / "test" / "e2e"
        script = ["sh", "-c", 'cd "$0" && exec "$@"', folder, *command]
        code, said = process.ended(script, "NVIDIA's Ginkgo suite", self._node.environment, seconds=1900)
        (self._logs / "ginkgo.log").write_text(said, encoding="utf-8")
        if not report.exists():
            self._table.fail("test/e2e", f"exit {code}: {said.strip()[-400:]}")
            return
        reports = json.loads(report.read_text(encoding="utf-8"))[0]["SpecReports"]
        for one in reports:
            name, state = f"test/e2e: {one['LeafNodeText'] or one['LeafNodeType']}", one["State"]
            why = one.get("Failure", {}).get("Message", "")
            if one["LeafNodeType"] != "It" and state == "passed":
                continue
            if state == "passed":
                self._table.ok(name, f"seconds={one['RunTime'] / 1e9:.1f}")
            elif state == "skipped" and "ConsumableShares" in why:
                self._table.skip(name, SHARES)
            else:
                self._table.fail(name, f"{state}: {why}")

    # tests/bats

    def _bats(self, file: str, name: str) -> None:
        label = f"{file}: {name}"
        if not self._is_chosen(label):
            return
        begins = "^" + re.sub(r"([().])", r"\\\1", name)
        scratch = places.RUN / "bats"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        env = {**self._node.environment, "TMPDIR": str(scratch), "USER": "root", "LC_ALL": "C.UTF-8"}
        command = ["bats", "--tap", "--filter", begins, f"tests/bats/test_{file}.bats"]
        script = ["sh", "-c", 'cd "$0" && exec "$@"', self._source, *command]
        code, said = process.ended(script, f"bats {file}", env, seconds=900)
        with open(self._logs / f"bats-{file}.log", "a", encoding="utf-8") as log:
            log.write(f"--- {name}\n{said}\n")
        skipped = re.search(r"^ok 1 .*# skip (.*)$", said, re.M)
        if code == 0 and skipped:
            # Only tests that must run are named, so one that skips itself has failed.
            self._table.fail(label, f"it was skipped: {skipped.group(1)}")
        elif code == 0 and re.search(r"^ok 1 ", said, re.M) and "\nok 2 " not in said:
            self._table.ok(label)
        else:
            self._table.fail(label, _reason(said))
            self._tidy()

    def _tidy(self) -> None:
        """Removes what a failed test has left, as NVIDIA's clean-up does."""
        args = ("delete", _KINDS, "--all", "-n", "default", "--wait=false")
        self._node.kubectl(*args)

        def gone() -> bool:
            left = self._node.kubectl("get", "pods", "-n", "default", "-o", "name")
            if left.strip():
                raise TestError(left)
            return True

        until("the pods of the failed test are gone", 90, gone, every=1)

    # demo/specs/quickstart/v1

    def _quickstart(self, number: int, check) -> None:
        name = f"gpu-test{number}"
        label = f"quickstart: {name}"
        if not self._is_chosen(label):
            return
        file = self._source / "demo" / "specs" / "quickstart" / "v1" / f"{name}.yaml"
        try:
            self._node.kubectl("apply", "-f", file)
            if number == 4:
                self._node.kubectl("rollout", "status", "deployment/pod", "-n", name, "--timeout=110s")
            else:
                self._node.kubectl("wait", "pods", "--all", "--for=condition=Ready", "-n", name, "--timeout=110s")
            seen = self._node.gpus_seen(name)
            if not check(seen):
                raise TestError(f"nvidia-smi showed {seen}")
            self._table.ok(label)
        except TestError as why:
            self._table.fail(label, why)
            _, described = self._try("describe", "pods", "-n", name)
            (self._logs / f"{name}.log").write_text(described, encoding="utf-8")
        self._try("delete", "-f", file, "--ignore-not-found", "--timeout=110s")

    def _try(self, *args) -> tuple[int, str]:
        """kubectl, which may fail."""
        return process.ended(["kubectl", *args], f"kubectl {args[0]}", self._node.environment)

    @staticmethod
    def _own_gpus(seen: dict) -> bool:
        """Two pods, a GPU each."""
        sets = [one for pod in seen.values() for one in pod.values()]
        return [len(one) for one in sets] == [1, 1] and len(frozenset.union(*sets)) == 2

    @staticmethod
    def _same_in_containers(seen: dict) -> bool:
        """One pod, whose two containers share a GPU."""
        return [len(pod) for pod in seen.values()] == [2] and _one_gpu(seen)

    @staticmethod
    def _same_in_pods(seen: dict) -> bool:
        """Two pods that share a GPU."""
        return [len(pod) for pod in seen.values()] == [1, 1] and _one_gpu(seen)

    @staticmethod
    def _own_instances(seen: dict) -> bool:
        """Four pods on a GPU each, and an instance of it in each of their four containers."""
        gpus, instances = set(), set()
        for pod in seen.values():
            of_pod = {uuid for one in pod.values() for uuid in one}
            gpus.add(frozenset(uuid for uuid in of_pod if uuid.startswith("GPU-")))
            instances |= {uuid for uuid in of_pod if uuid.startswith("MIG-")}
            if any(sum(uuid.startswith("MIG-") for uuid in one) != 1 for one in pod.values()):
                return False
        return len(seen) == 4 and len(instances) == 16 and len(gpus) == 4 and all(len(one) == 1 for one in gpus)


class _Running:
    """A Berth that runs, and whose devices are published, while the block does."""

    def __init__(self, berth: ClaimsBerth, node: Node) -> None:
        self._berth = berth
        self._node = node

    def __enter__(self) -> None:
        try:
            self._berth.start()
            until("the kubelet has registered the driver", 30, lambda: self._berth.node()["dra"]["registered"])
            said = process.run(["helm", "upgrade"], "the node's slices", self._node.environment)
            note(said.strip())
        except BaseException:
            self._berth.stop()
            raise

    def __exit__(self, *_) -> None:
        self._berth.stop()


class _BatsLibraries:
    """The libraries of bats where NVIDIA's tests load them."""

    def __enter__(self) -> None:
        if not _LIBRARIES.exists():
            _LIBRARIES.symlink_to(_DEBIAN_LIBRARIES)

    def __exit__(self, *_) -> None:
        if _LIBRARIES.is_symlink() and _LIBRARIES.readlink() == _DEBIAN_LIBRARIES:
            _LIBRARIES.unlink()


class _DeviceNodes:
    """The GPUs' device nodes in /dev, which one test counts. They have the numbers of /dev/null, which no driver's have, so
    those that a killed run left are removed, too."""

    _NUMBERS = os.makedev(1, 3)
    _PATHS = tuple(Path(f"/dev/nvidia{gpu}") for gpu in range(_GPUS))

    def __enter__(self) -> None:
        for path in self._PATHS:
            if path.exists() and path.stat().st_rdev != self._NUMBERS:
                raise TestError(f"{path} exists: run this on a machine without NVIDIA's driver")
        self._remove()
        for path in self._PATHS:
            os.mknod(path, stat.S_IFCHR | 0o666, self._NUMBERS)

    def __exit__(self, *_) -> None:
        self._remove()

    def _remove(self) -> None:
        for path in self._PATHS:
            path.unlink(missing_ok=True)


def _one_gpu(seen: dict) -> bool:
    sets = {one for pod in seen.values() for one in pod.values()}
    return len(sets) == 1 and len(next(iter(sets))) == 1


def _reason(said: str) -> str:
    """Where a test of bats failed, and its last words."""
    lines = [line.lstrip("# ") for line in said.splitlines() if line.strip("# ")]
    starts = [n for n, line in enumerate(lines) if line.startswith(("(in test file", "(from function"))]
    if not starts:
        return " ".join(lines[-4:]) or "the suite has no such test"
    ends = [n for n in range(starts[0], len(lines)) if lines[n].endswith("' failed")]
    where = lines[starts[0] : ends[0] + 1] if ends else lines[starts[0] : starts[0] + 1]
    return " ".join([*where, *lines[-2:]])


def _commit(source: Path) -> str:
    git = ["git", "-C", source, "-c", f"safe.directory={source}"]
    commit = process.run([*git, "rev-parse", "HEAD"], f"the commit of {source}").strip()
    changed = process.run([*git, "status", "--porcelain", "--untracked-files=no"], f"the changes of {source}").splitlines()
    return f"{commit}{f' with {len(changed)} changed files' if changed else ''}"


def _build_ginkgo(source: Path) -> Path:
    """Builds the suite as a program: minutes at first, seconds later."""
    made = places.cache() / "nvidia-dra" / "e2e.test"
    made.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-c", "-buildvcs=false", "-mod=vendor", "-tags=e2e", "-o", made]
    command = [machine.go(), "test", "-C", source, *flags, "./test/e2e"]
    note("building NVIDIA's Ginkgo suite, which takes minutes once")
    process.run(command, "build NVIDIA's Ginkgo suite", {"CGO_ENABLED": "0"}, seconds=3600)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description="NVIDIA's tests of its DRA driver against Berth. Needs root and Go.")
    parser.add_argument("--source", type=Path, required=True, help="a checkout of kubernetes-sigs/dra-driver-nvidia-gpu")
    parser.add_argument("--berth", type=Path, default=places.REPO / "target" / "release" / "berth")
    parser.add_argument("--nvml-library", type=Path, help="libfake_nvml.so; default: beside berth")
    parser.add_argument("--only", action="append", metavar="TEXT", help="only cases with this text in their name; repeatable")
    args = parser.parse_args()
    args.berth = args.berth.resolve()
    args.nvml_library = (args.nvml_library or args.berth.parent / "libfake_nvml.so").resolve()
    source = args.source.resolve()
    for sort in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sort, _interrupted)
    table = Table()
    logs = places.cache() / "logs" / "nvidia-dra"
    try:
        held = machine.lock()
        machine.check_no_other_kubelet()
        machine.check_no_other_berth()
        print(f"NVIDIA's tests of its DRA driver at {_commit(source)}, against {args.berth}", flush=True)
        for file in (args.berth, args.nvml_library):
            if not file.is_file():
                raise TestError(f"{file} is not there: run `cargo build --release -p berth -p fake-nvml` first")
        lacking = [name for name, witness in _PACKAGES.items() if not Path(witness).exists()]
        machine.install(machine.missing_packages() + lacking)
        for module in (kubelet.MODULE, containerd.MODULE, controlplane.ETCD, controlplane.MODULE):
            module.build()
        ginkgo = _build_ginkgo(source)
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        with _DeviceNodes(), Node(logs, str(containerd.MODULE.folder)) as node:
            note(f"kubelet {kubelet.MODULE.version}; logs in {logs}")
            node.prepare()
            Suites(source, ginkgo, node, args, logs, table).run()
    except TestError as reason:
        problem(str(reason))
        return 2
    except KeyboardInterrupt:
        problem("interrupted; everything is stopped and removed")
        return 2
    held.close()
    print()
    table.show()
    print(table.last_line(), flush=True)
    return 0 if table.failed == 0 and table.passed > 0 else 1


def _interrupted(*_) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
