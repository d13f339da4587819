"""Cases of policies that a node pulls from a registry (CNCF distribution) or reads from a folder. The node activates a policy only if its
configuration allows the repository, and the digest, type, size and signature are right. Otherwise the active stack stays, and the
GPUNode shows the reason."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import fleet
import registry
from bench import Bench
from berth import SHARED, WHOLE, Setup
from places import REPO, RUN
from registry import Registry, Signer
from say import TestError, until
from scenario import Scenario

GPUS = 2
#: Without TLS and password, and with both.
_PLAIN, _SECURED = 5000, 5443
_LAYOUTS = RUN / "layouts"
_FILES = RUN / "policies"
_POLICY = (REPO / "policies-wasm" / "prebuilt" / "timeslice.wasm").read_bytes()
#: A pull that failed is tried again after 2.5 to 5 s, then after twice that time; the status is written within 5 s, or 10 s after that.
_PULLED_SECONDS = 60
_PARAMETERS = json.dumps({"replicas": 2, "resource": SHARED})


class _Shared:
    """What the cases share: made before Berth starts, since its configuration names them."""

    def __init__(self) -> None:
        self.signer = Signer("trusted")
        self.plain = Registry("plain", _PLAIN, secured=False)
        self.secured = Registry("secured", _SECURED, secured=True)
        self._revision = 0

    def revision(self) -> str:
        """Another one each time."""
        self._revision += 1
        return f"{self._revision:012x}"


_shared: list[_Shared] = []


def _settings() -> dict:
    """Settings of Berth's configuration file."""
    _shared[:] = [_Shared()]
    registry.write_credentials(_shared[0].secured.host)
    _FILES.mkdir(exist_ok=True)
    return {
        "fleet": {
            "enabled": True,
            "repositories": [f"http://{_shared[0].plain.host}/gpu", f"{_shared[0].secured.host}/gpu"],
            "layouts": [str(_LAYOUTS)],
            "credentialsFile": str(registry.CREDENTIALS),
            "caFile": str(registry.CA),
        },
        "trustedKeys": [{"name": "release", "key": _shared[0].signer.public}],
    }


def _policy(name: str) -> Path:
    """A file with a policy of its own digest: a custom section of the component has the name."""
    section = bytes([len(name)]) + name.encode()
    file = _FILES / f"{name}.wasm"
    file.write_bytes(_POLICY + bytes([0, len(section)]) + section)
    return file


def _pack(bench: Bench, name: str, to: str, *more: str | Path, signed: bool = True) -> dict:
    """Packs a policy; returns the entry that names it."""
    file = _policy(name)
    signature = ["--signature", _shared[0].signer.sign(file)] if signed else []
    packed = json.loads(bench.berth.cli("policy", "pack", str(file), to, *map(str, [*signature, *more]), "-o", "json"))
    if packed["layer"] != f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}":
        raise TestError(f"it shows {packed}, and the file has another digest")
    return {key: packed[key] for key in ("name", "ref", "manifest", "layer") if key in packed}


def _name(bench: Bench, entry: dict) -> str:
    """Names a stack of one policy in the GPUNode; returns the revision."""
    revision = _shared[0].revision()
    fleet.name_stack(bench, revision, [{**entry, "parameters": _PARAMETERS}])
    return revision


def _until_active(bench: Bench, entry: dict, seconds: float = _PULLED_SECONDS) -> None:
    """Names it, and waits until the node has pulled and activated it."""
    revision = _name(bench, entry)
    fleet.until_phase(bench, "Soaking", seconds=seconds, active=revision)
    _has_reason(bench, "True", "Pulled")


def _has_reason(bench: Bench, status: str, reason: str) -> None:
    found = fleet.condition(fleet.gpu_node(bench)["status"], "PolicyPulled")
    if found != (status, reason):
        raise TestError(f"its condition is {found}")


def _until_reason(bench: Bench, entry: dict, phase: str, reason: str) -> str:
    """Names a policy that cannot be pulled, and waits until the status says why. The active stack stays. Returns the words."""
    before = bench.berth.stack()
    _name(bench, entry)

    def look() -> bool:
        status = fleet.gpu_node(bench)["status"]
        found = status["stack"].get("phase"), *fleet.condition(status, "PolicyPulled")
        if found != (phase, "False", reason):
            raise TestError(f"it shows {found}")
        return True

    until(f"the GPUNode shows {phase} and {reason}", _PULLED_SECONDS, look)
    if bench.berth.stack() != before:
        raise TestError(f"the active stack was {before} and is {bench.berth.stack()}")
    (shown,) = [one for one in fleet.gpu_node(bench)["status"]["conditions"] if one["type"] == "PolicyPulled"]
    return shown["message"]


def pulled(bench: Bench) -> str:
    """What `berth policy pack` has pushed is what oras reads; the node pulls it by its digests and activates it. The node lists it with its
    key, and where it came from."""
    plain = _shared[0].plain
    plain.start()
    fleet.install(bench)
    bench.berth.start()
    bench.berth.registered(WHOLE)
    until("the GPUNode is reported", fleet.REPORTED_SECONDS, lambda: "status" in fleet.gpu_node(bench))
    entry = _pack(bench, "first", f"oci+http://{plain.host}/gpu/first:1.0")
    shown = json.loads(plain.oras("manifest fetch", f"{plain.host}/gpu/first:1.0"))
    if shown["layers"][0]["digest"] != entry["layer"] or shown["config"]["mediaType"] != "application/vnd.wasm.config.v0+json":
        raise TestError(f"oras shows {shown}")
    plain.oras("pull", "--output", "pulled", f"{plain.host}/gpu/first:1.0", folder=_FILES)
    if (_FILES / "pulled" / "timeslice.wasm").read_bytes() != _policy("first").read_bytes():
        raise TestError("oras pulls another file")
    _until_active(bench, entry)
    bench.allocatable({SHARED: 2 * GPUS})
    listed = json.loads(bench.berth.cli("policy", "list", "-o", "json"))["items"]
    (policy,) = [one for one in listed if f"sha256:{one['digest'].removeprefix('sha256:')}" == entry["layer"]]
    if policy["signedBy"] != "release" or entry["manifest"] not in policy["why"] or policy["by"] != "team-share":
        raise TestError(f"the node lists {policy}")
    return policy["why"]


def pushed_by_oras(bench: Bench) -> None:
    """An artifact that oras has pushed, with the signature as an annotation of the manifest."""
    plain, file = _shared[0].plain, _policy("by-oras")
    signature = base64.b64encode(_shared[0].signer.sign(file).read_bytes()).decode()
    _until_active(bench, _push_by_oras(plain, file, annotation=signature))


def secured(bench: Bench) -> str:
    """A registry with TLS by its own certificate authority, and a password: without credentials the status says so; once the file has them, the node pulls."""
    secured = _shared[0].secured
    secured.start()
    registry.write_credentials(secured.host)
    access = ["--credentials", registry.CREDENTIALS, "--registry-ca", registry.CA]
    entry = _pack(bench, "secret", f"oci://{secured.host}/gpu/secret:1", *access)
    registry.write_credentials("elsewhere.example")
    said = _until_reason(bench, entry, "Pulling", "RegistryUnavailable")
    if "401" not in said or "none are known" not in said:
        raise TestError(f"it says {said}")
    registry.write_credentials(secured.host)
    fleet.until_phase(bench, "Soaking", seconds=_PULLED_SECONDS)
    _has_reason(bench, "True", "Pulled")
    return said


def registry_down(bench: Bench) -> str:
    """The registry is down: the active stack stays, and the node pulls once the registry is back."""
    plain = _shared[0].plain
    entry = _pack(bench, "away", f"oci+http://{plain.host}/gpu/away:1")
    plain.stop()
    said = _until_reason(bench, entry, "Pulling", "RegistryUnavailable")
    plain.start()
    fleet.until_phase(bench, "Soaking", seconds=_PULLED_SECONDS)
    return said


def refused(bench: Bench) -> str:
    """What has another digest, type, size or signature, or is in a repository that is not allowed, is refused before it is compiled."""
    plain = _shared[0].plain
    good = _pack(bench, "refused", f"oci+http://{plain.host}/gpu/refused:1")
    other = _pack(bench, "other", f"oci+http://{plain.host}/gpu/refused:2")
    unsigned = _pack(bench, "unsigned", f"oci+http://{plain.host}/gpu/unsigned:1", signed=False)
    elsewhere = {**good, "ref": f"{plain.host}/other/refused"}
    image = _push_by_oras(plain, _policy("image"), layer="application/vnd.oci.image.layer.v1.tar")
    large = _FILES / "large.wasm"
    large.write_bytes(_POLICY + bytes(33 << 20))
    for entry, reason, words in (
        ({**good, "layer": other["layer"]}, "DigestMismatch", "the layer of the manifest is"),
        (image, "WrongMediaType", "its layer has the media type"),
        (_push_by_oras(plain, large), "TooLarge", "more than 33554432 bytes"),
        (unsigned, "SignatureInvalid", "has no signature"),
        (elsewhere, "RepositoryNotAllowed", "`fleet.repositories`"),
    ):
        said = _until_reason(bench, entry, "Refused", reason)
        if words not in said:
            raise TestError(f"{reason}: it says {said}")
    return f"examples=5; {said}"


def from_layout(bench: Bench) -> None:
    """Without any registry, the same reference is read from a folder of layouts, which oras reads, too."""
    plain = _shared[0].plain
    plain.stop()
    entry = _pack(bench, "by-hand", f"layout:{_LAYOUTS}:1")
    shown = json.loads(plain.oras("manifest fetch --oci-layout", f"{_LAYOUTS}:1", folder=RUN))
    if shown["layers"][0]["digest"] != entry["layer"]:
        raise TestError(f"oras shows {shown}")
    _until_active(bench, {**entry, "ref": f"{plain.host}/gpu/by-hand"})
    _shared[0].secured.stop()


def _push_by_oras(to: Registry, file: Path, layer: str = "application/wasm", annotation: str = "") -> dict:
    """Pushes a policy without Berth; returns the entry that names it."""
    config = _FILES / "config.json"
    config.write_text("{}", encoding="utf-8")
    repository = f"{to.host}/gpu/{file.stem}"
    more = ["--annotation", f"dev.berth.signature.ed25519={annotation}"] if annotation else []
    more += ["--config", "config.json:application/vnd.wasm.config.v0+json", "--format", "json"]
    pushed = json.loads(to.oras("push", *more, f"{repository}:1", f"{file.name}:{layer}", folder=_FILES))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"name": "timeslice", "ref": repository, "manifest": pushed["digest"], "layer": f"sha256:{digest}"}


SCENARIOS = [
    Scenario(
        "policies",
        Setup(gpus=GPUS, api_server=True, more_settings=_settings),
        {
            "a policy that was packed is pulled by its digests and activated": pulled,
            "a policy that oras has pushed is pulled": pushed_by_oras,
            "a policy is pulled from a registry with TLS and a password": secured,
            "a registry that is down changes nothing until it is back": registry_down,
            "a policy with another digest, type, size, signature or repository is refused": refused,
            "a policy is read from a folder where no registry can be reached": from_layout,
        },
        cluster=True,
        berth_first=False,
        modules=(registry.MODULE, registry.ORAS),
    ),
]
