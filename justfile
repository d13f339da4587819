# The one list of commands; .ci/run calls the same ones.

# What there is
default:
    @just --list

# Everything that must be green
ci: lint test policies-test same-answers policy-templates

# Formatting, the lock file of the fuzz targets, clippy with warnings as errors, rustdoc without warnings
lint:
    .ci/words
    cargo fmt --all --check
    cargo fmt --manifest-path tests/fuzz/Cargo.toml --check
    cargo metadata --locked --format-version 1 --manifest-path tests/fuzz/Cargo.toml > /dev/null
    cargo clippy --workspace --all-targets --locked -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

# Situations that users of GPU nodes reported, each a test of tests/it with its report; `just reports TEXT` runs some
reports *TEXT:
    python3 tests/reports/run.py {{TEXT}}

# The README's test command, and the members' own tests
test:
    cargo test --locked
    cargo test --locked -p berth-proto -p demo -p fake-nvml -p gpu-check -p harness -p kubelet-standin

# The policies' native unit tests and lints
policies-test:
    cargo fmt --manifest-path policies-wasm/Cargo.toml --all --check
    cargo clippy --manifest-path policies-wasm/Cargo.toml --all-targets --locked -- -D warnings
    cargo test --manifest-path policies-wasm/Cargo.toml --locked

# Compile the shipped policies to policies-wasm/prebuilt (needs a wasm target; installs Debian's where rustup has none)
policies:
    policies-wasm/build.sh
    UPDATE_EXPECT=1 cargo test --locked --test it the_descriptions_of_the_shipped_policies

# Every shipped policy on random nodes: as WebAssembly, in two instances, and natively the answers are the same
same-answers NODES="10000" *ARGS:
    cargo run --quiet --locked -p harness -- same-answers {{NODES}} {{ARGS}}

# Seconds of a processor, installation included: JavaScript 14, Python 70, C 23, Rust 155 where std is built for it.
# What `berth policy new` writes, built, checked and tested; languages whose tools are not here are named and skipped
policy-templates *LANGS:
    cargo build --locked
    policies-wasm/try-templates.sh {{LANGS}}

# Licences, bans and sources of dependencies (cargo install cargo-deny); advisories need the open internet
deny:
    cargo deny --all-features check licenses bans sources

# The simulated node, the stand-in kubelet and a workload
demo *ARGS:
    cargo build --profile quick --locked -p berth -p demo
    target/quick/demo {{ARGS}}

# kill -9 at random and at every named step of a turn, and a check after each restart
crash ROUNDS="10000" *ARGS:
    cargo run --release --locked -p harness -- crash kill {{ROUNDS}} {{ARGS}}

# Power cuts at random points of the store's writes, with every legal loss of what was not synced
crash-power ROUNDS="10000" *ARGS:
    cargo run --release --locked -p harness -- crash power {{ROUNDS}} {{ARGS}}

# The store's size and speed under allocations that come and go
crash-grow APPENDS="200000":
    cargo run --release --locked -p harness -- crash grow {{APPENDS}}

# Stacks activated and rolled back on a busy node: how many, at how many Allocates a second
soak-activation ACTIVATIONS="200" RATE="500":
    cargo run --release --locked -p harness -- soak {{ACTIVATIONS}} {{RATE}}

# The admin API read 5,000 times a second while pods come: reads' p99, and Allocate's loaded over unloaded (`--tls`)
load-admin *ARGS:
    cargo build --release --locked -p berth -p harness
    target/release/harness load-admin {{ARGS}}

# Budgets measured in one run, with a table at its end
bench *ARGS:
    cargo build --release --locked -p berth -p harness
    target/release/harness bench {{ARGS}}

# NVIDIA's device plugin and Berth measured in turn: Allocate, start, exit, at rest; `--glance`, `--only calls`; needs root
bench-peer *ARGS:
    cargo build --release --locked -p berth -p harness -p fake-nvml
    python3 tests/compat/peer.py {{ARGS}}

# Berth's DRA driver at a real API server: prepare, bursts, slices, memory; `--nvidia PLUGIN`, `--glance`; needs root and Go
bench-dra *ARGS:
    cargo build --release --locked -p berth -p harness -p fake-nvml
    python3 tests/e2e/bench_dra.py {{ARGS}}

# On a machine with a GPU, without a kubelet: a verdict and figures in ten minutes (docs/gpu.md); builds only where cargo is
gpu *ARGS:
    if command -v cargo >/dev/null; then cargo build --release --locked -p berth -p gpu-check; fi
    target/release/gpu-check {{ARGS}}

# Against a real kubelet and a whole control plane: installs containerd and runc, builds the rest from Go modules, needs root
e2e *ARGS:
    cargo build --release --locked -p berth -p fake-nvml
    python3 tests/e2e/run.py {{ARGS}}

# 50 simulated nodes at a real API server, and how a bad policy is halted on them; needs root (`--build`, the first time)
demo-fleet *ARGS:
    cargo build --profile quick --locked -p berth -p demo
    python3 tests/fleet/demo.py {{ARGS}}

# Rollouts to simulated nodes at a real API server, which is built from Go modules; needs root
fleet *ARGS:
    cargo build --release --locked -p berth -p demo
    python3 tests/fleet/run.py {{ARGS}}

# NVIDIA's own tests of its DRA driver, against Berth's; CHECKOUT is one of kubernetes-sigs/dra-driver-nvidia-gpu; needs root
e2e-nvidia-dra CHECKOUT *ARGS:
    cargo build --release --locked -p berth -p fake-nvml
    python3 tests/e2e/nvidia_dra.py --source {{CHECKOUT}} {{ARGS}}

# NVIDIA's device plugin and Berth under the same configurations: device lists and Allocate answers; builds the plugin, needs root
compat *ARGS:
    cargo build --locked -p berth -p fake-nvml
    cargo build --locked -p kubelet-standin --example node
    python3 tests/compat/run.py {{ARGS}}

# The same two under faults of GPUs, with a table of what each lists and logs: 15 minutes, `--only TEXT`; needs root
compat-faults *ARGS:
    cargo build --locked -p berth -p fake-nvml
    cargo build --locked -p kubelet-standin --example node
    python3 tests/compat/faults.py {{ARGS}}

# The guard's connection to the container runtime against containerd's own NRI library, in two versions; builds it from Go modules
nri:
    cargo build --release --locked -p berth-guard --example observe
    python3 tests/nri/run.py

# What the guard adds to a container's start, at containerd's own NRI library, and its memory and wake-ups while idle
bench-guard *ARGS:
    cargo build --release --locked -p berth -p fake-nvml
    python3 tests/nri/bench.py {{ARGS}}

# Berth's own CDI specification compared with that of NVIDIA's nvidia-ctk, which Go modules build; needs root for device nodes
cdi-compare *ARGS:
    cargo build --locked -p berth -p fake-nvml
    python3 tests/e2e/cdi_compare.py {{ARGS}}

# What each containerd makes of the configuration files in tests/runtimes, for Berth's reader; builds seven of them, needs root
runtimes *ARGS:
    python3 tests/runtimes/regenerate.py {{ARGS}}

# Swagger UI and the page at / in a headless Chromium (Debian: apt-get install chromium); screenshots in target/browser
browser *ARGS:
    cargo build --release --locked -p berth
    cargo build --release --locked -p kubelet-standin --example node
    python3 -m venv target/browser/venv
    target/browser/venv/bin/pip install --quiet --disable-pip-version-check -r tests/browser/requirements.txt
    target/browser/venv/bin/python tests/browser/run.py {{ARGS}}

# deploy/ without a cluster: the chart by values, the plain manifests, alert rules, dashboard, Dockerfile; brings its tools
deploy-check: deploy-tools
    cargo build --release --locked
    PATH="$(tests/deploy/tools.sh):$PATH" python3 tests/deploy/check.py

# The tools of deploy-check, into .cache/deploy
deploy-tools:
    tests/deploy/tools.sh

# Render the plain manifests and the dashboard
deploy-render: deploy-tools
    python3 deploy/grafana/dashboard.py
    PATH="$(tests/deploy/tools.sh):$PATH" python3 tests/deploy/chart.py --write

# The image for amd64 and arm64 without Docker, as target/image/berth.tar; `just image release amd64`: another profile, one architecture
image PROFILE="dist" *ARCHITECTURES:
    python3 deploy/image/build.py --profile {{PROFILE}} {{ARCHITECTURES}}

# deploy/ on a real control plane, Berth in its pod on a real kubelet; `--image target/image/berth.tar`: that image; needs root, Helm
deploy-cluster *ARGS: deploy-tools
    {{ if ARGS =~ "--image" { "" } else { "cargo build --release --locked" } }}
    PATH="$(tests/deploy/tools.sh):$PATH" python3 tests/e2e/deployed.py {{ARGS}}

# Write the API's document
openapi:
    cargo run --quiet --locked -- openapi > openapi/berth.json

# The API's document passes a linter, and the Go, Python and TypeScript clients made of it list, cordon and upload; needs npm and Go
api-lint *ARGS:
    cargo build --locked
    tests/api/run.sh lint {{ARGS}}

# So many requests made up from the API's document, fitting and not: no server error, no answer that it does not describe
api-fuzz REQUESTS="20000" *ARGS:
    cargo build --locked
    tests/api/run.sh fuzz {{REQUESTS}} {{ARGS}}

# Simulated histories with every invariant checked after every turn: `just sim 10000`, `just sim --help`
sim *ARGS:
    cargo run --release --quiet --locked -p harness -- sim {{ARGS}}

# Simulated rollouts with every write of the controller checked: `just fleet-plan 10000`, `just fleet-plan --seed 17`
fleet-plan *ARGS:
    cargo run --release --quiet --locked -p harness -- fleet-plan {{ARGS}}

# Hostile guests against the real daemon: `just hostile --uploads 100`
hostile *ARGS:
    cargo build --release --locked -p berth -p harness
    target/release/harness hostile {{ARGS}}

# Floods of clients against the admin API of the real daemon, good ones among them: `just flood-admin --help`
flood-admin *ARGS:
    cargo build --release --locked -p berth -p harness
    target/release/harness flood-admin {{ARGS}}

# A fuzz target (answer, lift, upload) for so many seconds, on the stable toolchain; what it finds new joins tests/fuzz/corpus
fuzz TARGET="answer" SECONDS="60" *ARGS:
    RUSTC_WRAPPER={{justfile_directory()}}/tests/fuzz/rustc.sh cargo build --locked --manifest-path tests/fuzz/Cargo.toml --bin {{TARGET}}
    mkdir -p tests/fuzz/scratch/{{TARGET}} tests/fuzz/artifacts
    tests/fuzz/target/debug/{{TARGET}} -max_total_time={{SECONDS}} -timeout=30 -artifact_prefix=tests/fuzz/artifacts/{{TARGET}}- \
        {{ARGS}} tests/fuzz/scratch/{{TARGET}} tests/fuzz/corpus/{{TARGET}}

# Keep of a target's corpus and of what it found what reaches different code
fuzz-merge TARGET:
    mkdir -p tests/fuzz/corpus/{{TARGET}}
    tests/fuzz/target/debug/{{TARGET}} -set_cover_merge=1 -timeout=30 tests/fuzz/corpus/{{TARGET}} tests/fuzz/scratch/{{TARGET}}
