"""A node without a cluster: the daemon on simulated GPUs, and the stand-in kubelet beside it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from say import TestError, until

CONFIG = """
gpus: sim:8xh100
nodeName: browser-node
adminListen: 127.0.0.1:0
admin:
  tokens:
    - { name: viewer, sha256: VIEWER, right: read }
stack:
  - policy: mixed
    parameters: { replicas: 4 }
health: { pollSeconds: 1 }
rounds: { listEveryMs: 250, listEveryCordonedMs: 250, roundEveryMs: 1000 }
timing: { roundsApartMs: 300, kubeletSettleMs: 500, replySettleMs: 500, retireMs: 5000, namedMs: 1000 }
"""
#: 16 GPUs of 10 shares, of which a test can break some.
SIXTEEN = CONFIG.replace("sim:8xh100", "sim:MACHINE").replace("policy: mixed", "policy: timeslice").replace("replicas: 4", "replicas: 10")
#: A token that reads and changes nothing.
VIEWER = "v" * 40
WHOLE = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"
#: Requests go to this machine, whatever proxies the environment names.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Node:
    """Started by `with`; everything of it is gone afterwards."""

    config = CONFIG
    #: A resource and how many devices of it are there once the node is up.
    devices = (WHOLE, 8)

    def __init__(self, berth: Path, kubelet: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="berth-browser-"))
        self._berth = berth
        self._kubelet = kubelet
        self._processes: list[subprocess.Popen] = []
        self._log = self.folder / "berth.log"
        self.base = ""
        self.token = ""

    def __enter__(self) -> "Node":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        kubelet_dir = self.folder / "kubelet"
        self._standin = subprocess.Popen(
            [self._kubelet, kubelet_dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._processes.append(self._standin)
        self._answer("the start")
        config = self.folder / "config.yaml"
        self.machine("model: h100\ncount: 16\n")
        text = self.config.replace("MACHINE", str(self.folder / "machine.yaml"))
        config.write_text(text.replace("VIEWER", hashlib.sha256(VIEWER.encode()).hexdigest()))
        self._start_daemon()
        self.tell("wait {} {}".format(*self.devices))

    def _start_daemon(self) -> None:
        config, kubelet_dir, state_dir = (self.folder / name for name in ("config.yaml", "kubelet", "state"))
        command = [self._berth, "serve", "--config", config, "--kubelet-dir", kubelet_dir, "--state-dir", state_dir]
        with self._log.open("w") as log:
            daemon = subprocess.Popen(command, stderr=log, stdout=log)
        self._processes.append(daemon)

        def address() -> str:
            if daemon.poll() is not None:
                raise TestError(f"the daemon ended: {self._log.read_text()[-2000:]}")
            _, found, rest = self._log.read_text().partition("Swagger UI at ")
            return rest.split("/swagger-ui")[0] if found else ""

        self.base = until("the daemon's address in its log", address)
        self.token = (state_dir / "token").read_text().strip()

    def restart(self) -> None:
        """Ends the daemon and starts it again, at another address."""
        daemon = self._processes.pop()
        daemon.terminate()
        daemon.wait(60)
        self._start_daemon()

    def machine(self, text: str) -> None:
        """Another simulated machine, as docs/simulated-gpus.md describes: the daemon reads it within a second."""
        new = self.folder / "new.yaml"
        new.write_text(text)
        new.rename(self.folder / "machine.yaml")

    def tell(self, line: str) -> None:
        """One line to the kubelet."""
        self._standin.stdin.write(line + "\n")
        self._standin.stdin.flush()
        self._answer(line)

    def _answer(self, what: str) -> None:
        answer = self._standin.stdout.readline().strip()
        if answer != "ok":
            raise TestError(f"the stand-in kubelet, {what}: {answer or 'it ended'}")

    def ask(self, method: str, path: str, body=None, headers=None):
        """The API from outside the browser: (status, answer)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base}/api/v1{path}", data=data, method=method)
        request.add_header("Authorization", f"Bearer {self.token}")
        if data is not None:
            request.add_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            with OPENER.open(request, timeout=20) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def gpus(self) -> list[dict]:
        return self.ask("GET", "/gpus")[1]["items"]

    def gpu_of(self, pod: str) -> dict:
        """The first GPU that a pod holds."""
        held = self.ask("GET", f"/allocations?state=live&pod={pod}")[1]["items"][0]["gpus"][0]
        return next(gpu for gpu in self.gpus() if gpu["uuid"] == held)

    def drain_state(self, index: int) -> str:
        return self.gpus()[index]["drain"]["state"]

    def with_events(self) -> bool:
        """Whether the daemon has an event stream."""
        request = urllib.request.Request(f"{self.base}/api/v1/events")
        request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with OPENER.open(request, timeout=5) as answer:
                return answer.status == 200
        except urllib.error.HTTPError as error:
            return error.code != 404

    def pods(self) -> None:
        """Some pods that hold something, with names that a page must not take for markup."""
        for pod, resource, count in [
            ("team-a/train-0", WHOLE, 2),
            ("team-b/notebook-0", SHARED, 1),
            ("team-b/<img/src=x>", SHARED, 1),
            ("team-c/web-0", SHARED, 2),
        ]:
            self.tell(f"run {pod} {resource} {count}")

        def known() -> bool:
            items = self.ask("GET", "/allocations?state=live")[1]["items"]
            return len(items) == 4 and all((a.get("holder") or {}).get("pod") for a in items)

        until("the holders' names", known, 60)

    def quiet(self, seconds: float) -> None:
        """Gives what must not happen the time to happen."""
        time.sleep(seconds)


class SixteenGpuNode(Node):
    """16 GPUs with 10 shares each: one fell off the bus, one vanished, one needs a reset, one has XID 79, and one is cordoned."""

    config = SIXTEEN
    devices = (SHARED, 160)
    bad = {3: "fell off the bus", 5: "vanished", 7: "needs a reset", 12: "fell off the bus"}
    cordoned = 9
    apps = ["ml-train/llama", "notebooks/jupyter", "inference/vllm", "batch/etl", "research/sweep", "ml-train/eval", "inference/embed"]

    def pods(self) -> None:
        for i in range(63):
            self.tell(f"run {self.apps[i % 7]}-{i:02d} {SHARED} {1 + i % 3 // 2 + i % 5 // 4}")
        # Beyond the largest process id of Linux, 4,194,304: no process of this machine has one.
        running = [
            f"  - {{ index: {i}, running: [{{ pid: {4_200_000 + i}, memoryMiB: {3000 + 3300 * i}, kind: compute }}] }}\n"
            for i in range(16)
            if i not in self.bad
        ]
        broken = (
            "  - { index: 3, lost: true }\n  - { index: 5, absent: true }\n  - { index: 7, trouble: needs a reset }\n"
        )
        xid = "events: [{ seq: 1, gpu: 12, xid: 79 }]\n"
        self.machine("model: h100\ncount: 16\ngpus:\n" + "".join(running) + broken + xid)
        self.ask("PUT", f"/gpus/{self.gpus()[self.cordoned]['uuid']}/cordon", {"reason": "fan replacement"})

        def known() -> bool:
            items = self.ask("GET", "/allocations?state=live")[1]["items"]
            states = [gpu["health"]["state"] for gpu in self.gpus()]
            return all((a.get("holder") or {}).get("pod") for a in items) and sum(s != "healthy" for s in states) == 4

        until("the holders' names and four bad GPUs", known, 60)
