"""`just api-lint`: the document passes a linter, and clients that three generators make of it work."""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

from daemon import CACHE, ROOT, daemon

HERE = pathlib.Path(__file__).resolve().parent
TOOLS = pathlib.Path(sys.executable).parent
NPM = CACHE / "npm" / "node_modules" / ".bin"
MODULE = ROOT / "policies-wasm" / "prebuilt" / "timeslice.wasm"
# As openapi/README.md recommends: with them, a client reads properties and values that a later release adds.
GO_SETTINGS = "packageName=berth,withGoMod=false,disallowAdditionalPropertiesIfNotPresent=false,enumUnknownDefaultCase=true"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", default=ROOT / "target" / "debug" / "berth")
    args = parser.parse_args()
    with daemon(args.binary, log=CACHE / "daemon.log") as berth:
        document = CACHE / "openapi.json"
        document.write_bytes(berth.get("/openapi.json"))
        # It would check the internet for a newer version, and report its use.
        quiet = {"REDOCLY_SUPPRESS_UPDATE_NOTICE": "true", "REDOCLY_TELEMETRY": "off"}
        step([NPM / "redocly", "lint", document, "--config", HERE / "redocly.yaml"], quiet)
        for client in (python_client, go_client, typescript_client):
            command, environment = client(document)
            step([*command, berth.url, berth.token, own_module(client.__name__)], environment)
    print("api-lint: linter=clean clients=python,go,typescript")


def own_module(name):
    """A file with a policy that the daemon does not have: a shipped one with a custom section of its own."""
    module = CACHE / f"{name}.wasm"
    section = bytes([len(name)]) + name.encode()
    module.write_bytes(MODULE.read_bytes() + bytes([0, len(section)]) + section)
    return module


def python_client(document):
    """The client of openapi-python-client, without any setting: it leaves out the bodies that are no JSON, with a
    warning for each."""
    package = fresh("python") / "berth_client"
    step([TOOLS / "openapi-python-client", "generate", "--path", document, "--output-path", package, "--meta", "none"],
         {"PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"})  # It calls ruff by its name.
    return [sys.executable, HERE / "client.py"], {"PYTHONPATH": str(package.parent)}


def go_client(document):
    """The client of openapi-generator, compiled with the module mode of Go and nothing but its standard library."""
    folder = fresh("go")
    step([TOOLS / "openapi-generator-cli", "generate", "--input-spec", document, "--generator-name", "go", "--output",
          folder / "berth", "--additional-properties", GO_SETTINGS, "--global-property", "apiTests=false,modelTests=false"])
    shutil.copy(HERE / "client.go", folder / "main.go")
    (folder / "go.mod").write_text("module client\n\ngo 1.23\n")
    step(["go", "build", "-C", folder, "-o", folder / "client", "."], {"GOFLAGS": "-mod=mod", "GOWORK": "off"})
    return [folder / "client"], {}


def typescript_client(document):
    """The client of @hey-api/openapi-ts, checked by the strict compiler and run by Node."""
    folder = fresh("typescript")
    for name in ("client.ts", "tsconfig.json"):
        shutil.copy(HERE / name, folder)
    (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
    output = {"path": "berth", "importFileExtension": ".js"}
    settings = {"input": str(document), "output": output, "plugins": ["@hey-api/client-fetch"]}
    (folder / "openapi-ts.config.mjs").write_text(f"export default {json.dumps(settings)}\n")
    (folder / "node_modules").symlink_to(CACHE / "npm" / "node_modules")
    step([NPM / "openapi-ts"], cwd=folder)
    step([NPM / "tsc"], cwd=folder)
    return ["node", folder / "out" / "client.js"], {}


def fresh(name):
    """An empty folder for a client."""
    folder = CACHE / "clients" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def step(command, environment=None, cwd=None):
    """Runs a tool, whose output says what is wrong."""
    done = subprocess.run([str(part) for part in command], env={**os.environ, **(environment or {})}, cwd=cwd)
    if done.returncode:
        raise SystemExit(f"api-lint: {pathlib.Path(command[0]).name} failed")


if __name__ == "__main__":
    main()
