"""Where the test keeps its things, and the only folders that it removes.

`/var/lib/kubelet` cannot be chosen: the kubelet's device plugin folder is fixed
in its source. A marker file in it says that this test made it.
"""

from __future__ import annotations

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

#: Sockets, settings, static pods, what pods write. Short: a unix socket's path has at most 107 bytes.
RUN = Path("/run/berth-e2e")
#: containerd's images and snapshots, Berth's state.
LIB = Path("/var/lib/berth-e2e")
#: The kubelet's root, see above.
KUBELET = Path("/var/lib/kubelet")
MARKER = KUBELET / ".made-by-berth-e2e"
#: Another root for the kubelet, as k0s has one; its folder of device plugins stays in the first.
OTHER_KUBELET_ROOT = LIB / "kubelet"
#: Where the kubelet puts one link for each container's log; the folder is fixed in its source.
CONTAINER_LOGS = Path("/var/log/containers")
#: Held for the whole run, so that two runs never share the folders above.
LOCK = Path("/run/berth-e2e.lock")

CONTAINERD_CONFIG = RUN / "containerd.toml"
CONTAINERD_DROP_INS = RUN / "containerd.d"
CONTAINERD_SOCKET = RUN / "containerd.sock"
#: Where plugins of the runtime connect to containerd.
NRI_SOCKET = RUN / "nri.sock"
GUARD_SOCKET = RUN / "guard.sock"
MANIFESTS = RUN / "manifests"
PODS = RUN / "pods"
CDI_SPECS = RUN / "cdi"

#: Runs whose logs are kept; older ones are removed.
KEPT_LOGS = 5


def cache() -> Path:
    """The folder of everything that is built once: `BERTH_E2E_CACHE`, else `.cache/e2e` of the repository."""
    chosen = os.environ.get("BERTH_E2E_CACHE")
    return Path(chosen).resolve() if chosen else REPO / ".cache" / "e2e"
