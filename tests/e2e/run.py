#!/usr/bin/env python3
"""Berth against a real kubelet, standalone and of a whole control plane: `just e2e`, or `sudo -E python3 tests/e2e/run.py`.

It needs root, Go and a machine that is no Kubernetes node. See README.md beside this file.
Exit status: 0 all passed, 1 a case failed, 2 the test could not be run.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from pathlib import Path

# Run by root in a user's checkout: leave no compiled files there that only root can remove.
sys.dont_write_bytecode = True

import bypass  # noqa: E402
import cases  # noqa: E402
import cdi  # noqa: E402
import changeover  # noqa: E402
import containerd  # noqa: E402
import controlplane  # noqa: E402
import dra  # noqa: E402
import dra_conformance  # noqa: E402
import dra_slices  # noqa: E402
import drains  # noqa: E402
import fleet  # noqa: E402
import fullnode  # noqa: E402
import guard  # noqa: E402
import limits  # noqa: E402
import kubelet  # noqa: E402
import machine  # noqa: E402
import nvidia  # noqa: E402
import places  # noqa: E402
import policies  # noqa: E402
import reuse  # noqa: E402
from bench import Bench  # noqa: E402
from berth import Berth  # noqa: E402
from gomodule import GoModule  # noqa: E402
from gpus import FakeGpus  # noqa: E402
from node import Node  # noqa: E402
from say import Score, TestError, note, problem  # noqa: E402
from scenario import Scenario  # noqa: E402

#: Those of a standalone kubelet first: a kubelet that has joined a cluster stays in it. The full node's own come before
#: all others of a cluster, whose devices a kubelet goes on to count for five minutes: the first of them wants a new node.
_FILES = (cases, cdi, fullnode, guard, limits, bypass, changeover, drains, dra, dra_conformance, dra_slices, fleet, policies, reuse)
SCENARIOS = sorted((scenario for file in _FILES for scenario in file.SCENARIOS), key=lambda s: s.cluster)


_CONTAINERD_HELP = (
    "`build` (the default) makes a containerd 2, which has CDI, from Go modules; `path` takes the one of PATH; or a folder with one"
)


def main() -> int:
    args = _arguments()
    for sort in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sort, _interrupted)
    try:
        held = machine.lock()
        machine.check_no_other_kubelet()
        machine.check_no_other_berth()
        _announce(args)
        for program in (args.berth, args.guard, args.nvml_library):
            if not program.is_file():
                raise TestError(f"{program} is not there: run `cargo build --release -p berth -p fake-nvml` first")
        machine.install(machine.missing_packages())
        for module in _modules(args):
            module.build()
        # Building may have taken a while.
        machine.check_no_other_berth()
        score = _play(args)
    except TestError as reason:
        problem(str(reason))
        return 2
    except KeyboardInterrupt:
        problem("interrupted; everything is stopped and removed")
        return 2
    held.close()
    print(score.last_line(), flush=True)
    return 0 if score.failed == 0 and score.passed > 0 else 1


def _play(args: argparse.Namespace) -> Score:
    score = Score()
    logs = _new_logs()
    try:
        binaries = {"build": str(containerd.MODULE.folder), "path": ""}.get(args.containerd, args.containerd)
        with Node(logs, binaries) as node:
            note(f"kubelet {kubelet.MODULE.version}, containerd {node.containerd.version}; logs in {logs}")
            for scenario in _chosen(args):
                reason = _lacking(scenario, node)
                if reason:
                    for name in scenario.cases:
                        score.skip(name, reason)
                    continue
                _play_scenario(node, scenario, args, logs, score)
    finally:
        if score.failed:
            problem(f"logs of containerd, kubelet, berth and the pods: {logs}")
    return score


def _lacking(scenario: Scenario, node: Node) -> str:
    """Why this setup cannot be played here; empty if it can."""
    if (scenario.setup.cdi or scenario.setup.auto) and not node.containerd.has_cdi:
        return f"containerd {node.containerd.version} has no CDI"
    if int(kubelet.MODULE.version.split(".")[1]) < scenario.first_minor:
        return f"Kubernetes {kubelet.MODULE.version} is older than 1.{scenario.first_minor}"
    return ""


def _play_scenario(node: Node, scenario: Scenario, args: argparse.Namespace, logs: Path, score: Score) -> None:
    """One Berth with one setup on a node without pods. What goes wrong fails the cases that it touches, never the run."""
    berth = bench = None
    begin = time.monotonic()
    left = dict(scenario.cases)
    try:
        kubeconfig = None
        if scenario.cluster:
            node.join()
            kubeconfig = node.cluster.berth_kubeconfig
        node.kubelet.root = places.OTHER_KUBELET_ROOT if scenario.setup.other_root else places.KUBELET
        node.kubelet.status_seconds = 10 if scenario.setup.slow_status else 1
        node.renew()
        scenario.before()
        scenario.install(args.nvml_library)
        fake = FakeGpus(scenario.setup.gpus, args.nvml_library)
        scenario.change_gpus(fake)
        berth = Berth(logs, args.berth, fake, scenario.setup, kubeconfig)
        berth.guard_binary = args.guard
        if scenario.berth_first:
            berth.start()
        bench = Bench(node, berth, logs)
        for name, case in scenario.cases.items():
            left.pop(name)
            try:
                score.ok(name, case(bench) or "")
            except Exception as why:  # noqa: BLE001 - whatever a case meets is its failure
                score.fail(name, why if str(why) else repr(why))
    except Exception as why:  # noqa: BLE001 - as above: the setup could not be made
        for name in left:
            score.fail(name, why if str(why) else repr(why))
    finally:
        for undo in bench.at_end if bench else ():
            undo()
        if berth is not None:
            berth.stop()
    note(f"setup '{scenario.name}' took {time.monotonic() - begin:.0f} s")


def _announce(args: argparse.Namespace) -> None:
    missing = machine.missing_packages()
    print("Berth against a real kubelet. On this machine it")
    print(f"  - installs with apt-get: {' '.join(missing) if missing else 'nothing, all packages are there'}")
    for module in _modules(args):
        state = "already built" if module.is_built else f"built now with {machine.go()}, some minutes once"
        print(f"  - keeps {module.name} {module.version} in {module.folder} ({state})")
    print(f"  - keeps the logs of the last {places.KEPT_LOGS} runs in {places.cache() / 'logs'}")
    print(f"  - makes {places.RUN}, {places.LIB}, {places.KUBELET} and removes them at the end")
    print(f"  - tests {args.berth} with {args.nvml_library}", flush=True)


def _chosen(args: argparse.Namespace) -> list[Scenario]:
    return [s for s in SCENARIOS if not args.only or s.name in args.only]


def _modules(args: argparse.Namespace) -> list[GoModule]:
    """What the chosen setups need, and no more."""
    modules = [kubelet.MODULE]
    if args.containerd == "build":
        modules.append(containerd.MODULE)
    if any(not s.berth_first for s in _chosen(args)):
        modules.append(nvidia.MODULE)
    if any(s.cluster for s in _chosen(args)):
        modules += [controlplane.ETCD, controlplane.MODULE]
    return modules + [module for s in _chosen(args) for module in s.modules]


def _new_logs() -> Path:
    folder = places.cache() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.iterdir())[: -(places.KEPT_LOGS - 1)]:
        shutil.rmtree(old)
    mine = folder / time.strftime("%Y%m%d-%H%M%S")
    mine.mkdir()
    return mine


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Berth against a real kubelet. Needs root and Go; see tests/e2e/README.md."
    )
    parser.add_argument("--berth", type=Path, default=places.REPO / "target" / "release" / "berth")
    parser.add_argument("--guard", type=Path, help="berth of another release, for the guard alone; default: --berth")
    parser.add_argument("--nvml-library", type=Path, help="libfake_nvml.so; default: beside berth")
    parser.add_argument(
        "--kubernetes",
        metavar="1.MINOR.PATCH",
        help="builds the kubelet and the control plane of this version, and keeps them for later runs",
    )
    parser.add_argument("--containerd", default="build", metavar="build|path|FOLDER", help=_CONTAINERD_HELP)
    parser.add_argument(
        "--only", action="append", choices=[s.name for s in SCENARIOS], help="only this setup; repeatable"
    )
    args = parser.parse_args()
    if args.kubernetes:
        for module in (kubelet.MODULE, controlplane.MODULE):
            module.choose(f"v{args.kubernetes.removeprefix('v')}")
    args.berth = args.berth.resolve()
    args.guard = (args.guard or args.berth).resolve()
    args.nvml_library = (args.nvml_library or args.berth.parent / "libfake_nvml.so").resolve()
    return args


def _interrupted(*_) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
