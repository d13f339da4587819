#!/usr/bin/env python3
"""A fleet of simulated nodes at a real API server, and how a bad policy is halted on it: `just demo-fleet`.

It rolls a good policy out, then one that traps, and shows the halt. Then it waits until Ctrl-C; kubectl can be used meanwhile.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cluster import Fleet, controlplane, machine, places, steps, timeslice  # noqa: E402
from say import TestError  # noqa: E402

POLICY = "team-share"
#: Of the whole demo, so that it does not wait for ever.
_ROLLOUT_SECONDS = 600


def main() -> int:
    parser = argparse.ArgumentParser(description="A fleet of simulated nodes, and how a bad policy is halted. Needs root; Go, the first time.")
    default = places.REPO / "target" / "quick"
    parser.add_argument("--programs", type=Path, default=default, help="the folder of berth and simulated-nodes; default: target/quick")
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--once", action="store_true", help="end after the halt")
    parser.add_argument("--build", action="store_true", help="build etcd and the API server, if they are missing: some 10 minutes")
    args = parser.parse_args()
    modules = (controlplane.ETCD, controlplane.MODULE)
    missing = [module.name for module in modules if not module.is_built]
    if missing and not args.build:
        print(f"The demo needs a real API server and etcd. {' and '.join(missing)} must be built once from Go modules, which takes some")
        print("10 minutes and needs Go and the network: `just demo-fleet --build`. They are kept in .cache/e2e.")
        return 2
    try:
        held = machine.lock()
        for module in modules:
            module.build()
        logs = places.cache() / "logs" / time.strftime("demo-%Y%m%d-%H%M%S")
        logs.mkdir(parents=True)
        fleet = Fleet(args.programs, logs, args.nodes)
        try:
            show(fleet, args.once)
        except KeyboardInterrupt:
            pass
        finally:
            print("\nstopping: the nodes, the controller, the API server")
            fleet.stop()
    except TestError as reason:
        print(f"demo-fleet: {reason}", file=sys.stderr)
        return 1
    held.close()
    return 0


def show(fleet: Fleet, is_once: bool) -> None:
    say(f"{fleet.size} nodes are started; each is a whole daemon with two simulated GPUs, and pods come and go")
    fleet.start()
    say("kubectl for another terminal:")
    print(f"  export KUBECONFIG={fleet.cluster.kubeconfig}\n  {fleet.cluster.program} get gsp,gn")
    say("A good policy is rolled out: one node of each model, then 10 %, then all")
    fleet.apply(POLICY, [timeslice(fleet.pack("timeslice", "good"), 2)], rollout=steps(10, 100))
    follow(fleet, ("Complete",))
    say("A policy whose `admit` traps is rolled out, without a gate")
    fleet.apply(POLICY, [timeslice(fleet.pack("timeslice", "traps", trap="admit"), 3)], rollout=steps(10, 100, soak="1m"))
    begin = time.monotonic()
    follow(fleet, ("Halted",))
    good = fleet.policy(POLICY)["status"]["good"]["revision"]
    end = time.monotonic() + _ROLLOUT_SECONDS
    while set(fleet.active().values()) != {good} or "still to be" in fleet.reason(POLICY, "Stalled")[2]:
        if time.monotonic() > end:
            raise TestError(f"not all nodes have revision {good} again: {fleet.active()}")
        time.sleep(0.5)
    say(f"Halted, and all nodes have revision {good} again, {time.monotonic() - begin:.0f} s after the change:")
    print(fleet.cluster.kubectl("get", "gsp"))
    print(fleet.reason(POLICY, "Stalled")[2])
    print("demo-fleet: ok")
    if not is_once:
        print("Ctrl-C ends the demo")
        signal.pause()


def follow(fleet: Fleet, phases: tuple[str, ...]) -> None:
    """Prints each change of a rollout until it has one of these phases."""
    generation, shown = fleet.policy(POLICY)["metadata"]["generation"], None
    end = time.monotonic() + _ROLLOUT_SECONDS
    while time.monotonic() < end:
        status = fleet.policy(POLICY).get("status", {})
        rollout = status.get("rollout")
        if rollout and status.get("resolved", {}).get("generation") == generation:
            if rollout != shown:
                words = "step {step}, {phase}: {assigned} of {total} nodes assigned, {settled} settled, {failed} failed"
                print(f"  {time.strftime('%H:%M:%S')}  {words.format(**rollout)}", flush=True)
            shown = rollout
            if rollout["phase"] in phases:
                return
        time.sleep(0.3)
    raise TestError(f"the rollout is not {' or '.join(phases)} after {_ROLLOUT_SECONDS} s: {shown}")


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
