"""`just api-fuzz`: schemathesis asks the daemon what its document allows and what it does not, until as
many requests were sent as were asked for. No answer may be a server error, or one that the document
does not describe. Ends with 1 where one is, or the daemon ended."""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys

from daemon import CACHE, ROOT, daemon

# What is held against each answer. Not among them: that whatever fits the document is taken, since a
# name may fit and nothing be called so, and a value fit by itself and not beside the others.
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
    "missing_required_header",
]
# Codes of its findings: 5xx; and answers that the document does not describe, by status, media type,
# headers or schema.
SERVER_ERROR = ["ST101", "ST102"]
UNDOCUMENTED = [f"ST{n}" for n in range(103, 112)]
# Characters of a line of schemathesis's output that are shown.
LINE = 2_000


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requests", type=int, nargs="?", default=20_000, help="at least so many")
    parser.add_argument("--binary", default=ROOT / "target" / "debug" / "berth")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; each round has the next")
    parser.add_argument("--examples", type=int, default=150, help="for each operation and round")
    args = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    found, requests, statuses, rounds = collections.Counter(), 0, collections.Counter(), 0
    log = CACHE / "schemathesis.log"
    with daemon(args.binary, log=CACHE / "daemon.log") as berth:
        document = CACHE / "openapi.json"
        document.write_bytes(berth.get("/openapi.json"))
        gpus = [gpu["uuid"] for gpu in json.loads(berth.get("/api/v1/gpus"))["items"]]
        policies = json.loads(berth.get("/api/v1/policies"))["items"]
        while requests < args.requests and berth.alive():
            seed = args.seed + rounds
            rounds += 1
            report, counts = CACHE / "report.json", CACHE / "counts.json"
            for old in (report, counts):
                old.unlink(missing_ok=True)
            run_round(args, berth, document, gpus, policies, seed, report, counts, log)
            counted = json.loads(counts.read_text())
            requests += counted.pop("requests", 0)
            statuses.update(counted)
            result = json.loads(report.read_text())
            news = collections.Counter({f["code"]: f["count"] for f in result["failures"]})
            news["error"] = len(result["errors"])
            print(f"round {rounds}, seed {seed}: {requests} requests, {news.total()} findings", flush=True)
            if news.total():
                # A module in the body would be a megabyte of escapes.
                print("\n".join(line[:LINE] for line in log.read_text(errors="replace").splitlines()))
            found.update(news)
        died = not berth.alive()
    (CACHE / "statuses.json").write_text(json.dumps(statuses, indent=1, sort_keys=True))
    if died:
        print("the daemon ended; see", CACHE / "daemon.log")
    errors = sum(found[code] for code in SERVER_ERROR) + statuses["network_errors"]
    undocumented = sum(found[code] for code in UNDOCUMENTED)
    other = found.total() + statuses["network_errors"] - errors - undocumented
    if other:
        print(f"other findings: {other}")
    print(f"api-fuzz: requests={requests} server_errors={errors} undocumented={undocumented}")
    return 1 if died or errors or undocumented or other else 0


def run_round(args, berth, document, gpus, policies, seed, report, counts, log):
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "hooks",
        "PYTHONPATH": str(pathlib.Path(__file__).parent),
        "API_FUZZ_GPUS": ",".join(gpus),
        "API_FUZZ_DIGESTS": ",".join(policy["digest"] for policy in policies),
        "API_FUZZ_MODULE": str(ROOT / "policies-wasm" / "prebuilt" / "timeslice.wasm"),
        "API_FUZZ_COUNTS": str(counts),
        "API_FUZZ_SEED": str(seed),
    }
    command = [
        str(pathlib.Path(sys.executable).parent / "schemathesis"), "--config-file",
        str(pathlib.Path(__file__).parent / "schemathesis.toml"), "run", str(document), "--url", berth.url,
        "--header", f"Authorization: Bearer {berth.token}", "--checks",
        ",".join(CHECKS), "--phases", "examples,coverage,fuzzing",
        "--max-examples", str(args.examples), "--seed", str(seed), "--continue-on-failure", "--no-shrink",
        "--request-timeout", "30", "--generation-database", "none", "--suppress-health-check", "all",
        "--warnings", "off", "--report", "json", "--report-json-path", str(report), "--no-color",
    ]
    with open(log, "w") as output:
        done = subprocess.run(command, env=environment, cwd=CACHE, stdout=output, stderr=subprocess.STDOUT)
    if not report.exists() or not counts.exists():
        print(log.read_text()[-4000:])
        raise SystemExit(f"schemathesis ended with {done.returncode} and no report")


if __name__ == "__main__":
    sys.exit(main())
