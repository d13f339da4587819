"""`just api-lint`: the document passes a linter, and a client that is generated from it works."""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

from daemon import CACHE, ROOT, daemon

HERE = pathlib.Path(__file__).resolve().parent


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", default=ROOT / "target" / "debug" / "berth")
    args = parser.parse_args()
    with daemon(args.binary, log=CACHE / "daemon.log") as berth:
        document = CACHE / "openapi.json"
        document.write_bytes(berth.get("/openapi.json"))
        redocly = CACHE / "npm" / "node_modules" / ".bin" / "redocly"
        # It would check the internet for a newer version, and report its use.
        quiet = {"REDOCLY_SUPPRESS_UPDATE_NOTICE": "true", "REDOCLY_TELEMETRY": "off"}
        step([redocly, "lint", document, "--config", HERE / "redocly.yaml"], quiet)
        package = CACHE / "client" / "berth_client"
        shutil.rmtree(package.parent, ignore_errors=True)
        package.parent.mkdir(parents=True)
        tools = pathlib.Path(sys.executable).parent
        generator = tools / "openapi-python-client"
        step([
            generator, "generate", "--path", document, "--output-path", package, "--meta", "none",
            "--config", HERE / "client.yaml", "--fail-on-warning",
        ], {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"})  # It calls ruff by its name.
        module = ROOT / "policies-wasm" / "prebuilt" / "timeslice.wasm"
        step(
            [sys.executable, HERE / "client.py", berth.url, berth.token, module],
            {"PYTHONPATH": str(package.parent)},
        )
    print("api-lint: linter=clean client=works")


def step(command, environment=None):
    """Runs a tool; its own words say what is wrong."""
    done = subprocess.run([str(word) for word in command], env={**os.environ, **(environment or {})})
    if done.returncode:
        raise SystemExit(f"api-lint: {pathlib.Path(command[0]).name} failed")


if __name__ == "__main__":
    main()
