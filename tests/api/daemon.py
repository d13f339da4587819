"""The daemon on simulated GPUs, without a kubelet, for as long as a `with` block lasts."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "api"
# Longest wait for the daemon to be ready: a debug build on a busy machine.
READY_S = 60


class Daemon:
    def __init__(self, process, url, token, state):
        self.process = process
        self.url = url
        self.token = token
        self.state = state

    def get(self, path, **headers):
        headers.setdefault("Authorization", f"Bearer {self.token}")
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read()

    def alive(self):
        return self.process.poll() is None


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ready_but_for_the_kubelet(url):
    """Whether everything is ready except the kubelet, which this test does not have."""
    try:
        urllib.request.urlopen(url + "/readyz", timeout=5).close()
        return True
    except urllib.error.HTTPError as error:
        checks = json.loads(error.read()).get("checks", [])
        return bool(checks) and all(check["ok"] or check["name"] == "kubelet" for check in checks)


@contextlib.contextmanager
def daemon(binary, gpus="sim:8xh100", log=None):
    """Starts `binary`, waits until it is ready, and stops it in the end."""
    with tempfile.TemporaryDirectory(prefix="berth-api-") as folder:
        folder = pathlib.Path(folder)
        (folder / "kubelet" / "device-plugins").mkdir(parents=True)
        port = free_port()
        command = [
            str(binary), "serve", "--gpus", gpus, "--kubelet-dir", str(folder / "kubelet"),
            "--state-dir", str(folder / "state"), "--admin-listen", f"127.0.0.1:{port}",
        ]
        output = open(log, "w") if log else subprocess.DEVNULL
        # Nothing of the caller's environment may change what the daemon does.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("BERTH_")}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            token = folder / "state" / "token"
            deadline = time.monotonic() + READY_S
            while True:
                try:
                    if ready_but_for_the_kubelet(url):
                        break
                    error = "it waits for more than a kubelet"
                except OSError as failed:
                    error = failed
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{binary} did not become ready: {error}; see {log}")
                time.sleep(0.05)
            yield Daemon(process, url, token.read_text().strip(), folder / "state")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
