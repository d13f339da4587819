"""The registry of the CNCF (distribution), with and without TLS and a password, and oras, a client of registries."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import process
from gomodule import GoModule
from places import RUN
from say import TestError, until

MODULE = GoModule("registry", "github.com/distribution/distribution/v3", ["cmd/registry"])
ORAS = GoModule("oras", "oras.land/oras", ["cmd/oras"])

_FOLDER = RUN / "registry"
#: Files that Berth's configuration names.
CREDENTIALS = _FOLDER / "config.json"
CA = _FOLDER / "ca.crt"
USER, PASSWORD = "node", "p"
#: bcrypt of the password.
_HASH = "$2b$05$abcdefghijklmnopqrstuuqwWMzKt5N8p.u2GX5MuH1t19BMWuLOW"
_NEW = "openssl req -x509 -days 2 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1".split()


class Registry:
    """One registry on loopback, which keeps what it has over a restart. `secured`: with TLS and a password."""

    def __init__(self, name: str, port: int, secured: bool) -> None:
        self.host = f"localhost:{port}"
        self._secured = secured
        folder = _FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        http: dict = {"addr": f"127.0.0.1:{port}"}
        settings = {"version": 0.1, "log": {"level": "info"}, "http": http, "storage": {"filesystem": {"rootdirectory": str(folder / "data")}}}
        if secured:
            _make_certificates(folder)
            http["tls"] = {"certificate": str(folder / "tls.crt"), "key": str(folder / "tls.key")}
            passwords = folder / "htpasswd"
            passwords.write_text(f"{USER}:{_HASH}\n", encoding="utf-8")
            settings["auth"] = {"htpasswd": {"realm": "e2e", "path": str(passwords)}}
        # JSON is YAML.
        file = folder / "config.yml"
        file.write_text(json.dumps(settings), encoding="utf-8")
        self._process = process.Process(f"registry {name}", [MODULE.folder / "registry", "serve", file], folder / "log")

    def start(self) -> None:
        self._process.start()

        def answers() -> bool:
            self._process.check()
            process.run([ORAS.folder / "oras", "repo", "ls", *self._access(), self.host], "oras repo ls")
            return True

        until(f"the registry {self.host} answers", 20, answers)

    def stop(self) -> None:
        self._process.stop()

    def oras(self, command: str, *args: str | Path, folder: Path = _FOLDER) -> str:
        """Runs `oras COMMAND ARGS` in a folder; files are named relative to it."""
        words = [ORAS.folder / "oras", *command.split(), *self._access(), *args]
        return process.run(["env", "-C", folder, *words], f"oras {command}")

    def _access(self) -> list:
        if not self._secured:
            return ["--plain-http"]
        # For localhost oras omits TLS otherwise.
        return ["--plain-http=false", "--ca-file", CA, "--username", USER, "--password", PASSWORD]


def write_credentials(*hosts: str) -> None:
    """Berth's credentials: the right ones for these hosts, and none for others."""
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    CREDENTIALS.write_text(json.dumps({"auths": {host: {"auth": auth} for host in hosts}}), encoding="utf-8")


def _make_certificates(folder: Path) -> None:
    """A certificate authority that is valid for two days, and its certificate for localhost."""
    key = folder / "ca.key"
    process.run([*_NEW, "-subj", "/CN=registry-ca", "-keyout", key, "-out", CA], "make a certificate authority")
    leaf = [*_NEW, "-subj", "/CN=localhost", "-keyout", folder / "tls.key", "-out", folder / "tls.crt", "-CA", CA, "-CAkey", key]
    leaf += ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", "subjectAltName=DNS:localhost"]
    process.run(leaf, "make the registry's certificate (openssl 3)")


class Signer:
    """An Ed25519 key, and signatures by it as openssl makes them."""

    def __init__(self, name: str) -> None:
        _FOLDER.mkdir(parents=True, exist_ok=True)
        self._key = _FOLDER / f"{name}.pem"
        process.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", self._key], "make a key")
        self.public = process.run(["openssl", "pkey", "-in", self._key, "-pubout"], "read the public key")

    def sign(self, file: Path) -> Path:
        signature = file.with_suffix(".sig")
        words = ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", self._key, "-in", file, "-out", signature]
        process.run(words, "sign a policy")
        if signature.stat().st_size != 64:
            raise TestError(f"{signature} is no Ed25519 signature")
        return signature
