"""What schemathesis needs to know of this API: how policies are sent, which names there are, that a
stream of events must be asked to end; and the count of what was sent."""

import atexit
import collections
import json
import os
import pathlib
import random

import schemathesis

GPUS = os.environ["API_FUZZ_GPUS"].split(",")
DIGESTS = os.environ["API_FUZZ_DIGESTS"].split(",")
COUNTS = pathlib.Path(os.environ["API_FUZZ_COUNTS"])
MODULE = pathlib.Path(os.environ["API_FUZZ_MODULE"]).read_bytes()
# How many of the requests that fit the document are about what is really there.
REAL = 0.7

counts = collections.Counter()
chance = random.Random(int(os.environ["API_FUZZ_SEED"]))


@schemathesis.serializer("application/wasm")
def wasm(context, value):
    if is_real_upload(context.case):
        return MODULE
    data = getattr(value, "data", value)
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    return data if isinstance(data, bytes) else json.dumps(data).encode()


def is_real_upload(case):
    """A component that compiles takes a second, so one in some uploads is one. The other phases leave something out
    on purpose. It is put in where the body is written: a body that a hook sets is taken for one that does not fit."""
    meta = case.meta
    if meta is None or meta.generation.mode.value != "positive" or meta.phase.name.value != "fuzzing":
        return False
    return case.operation.definition.raw.get("operationId") == "uploadPolicy" and chance.random() < 0.05


@schemathesis.hook
def filter_case(context, case):
    """Where a body is optional, the API takes `null` as none: clients of generators send it for a body that is left out.
    The document does not say so, or they would have a type for it."""
    body = case.operation.definition.raw.get("requestBody", {"required": True})
    return case.body is not None or body.get("required", False)


@schemathesis.hook
def before_call(context, case, kwargs):
    query = case.query if isinstance(case.query, dict) else {}
    if case.path == "/api/v1/events" and query.get("follow", "true") in (True, "true"):
        case.query = {**query, "follow": "false"}
    if case.meta is None or case.meta.generation.mode.value != "positive" or chance.random() > REAL:
        return
    names = dict(case.path_parameters or {})
    if "uuid" in names:
        names["uuid"] = chance.choice(GPUS)
    if "digest" in names:
        names["digest"] = chance.choice(DIGESTS)
    if names:
        case.path_parameters = names


@schemathesis.hook
def after_call(context, case, response):
    counts["requests"] += 1
    counts[f"{case.method.upper()} {case.path} {response.status_code}"] += 1


@schemathesis.hook
def after_network_error(context, case, request):
    counts["requests"] += 1
    counts["network_errors"] += 1


@atexit.register
def write():
    COUNTS.write_text(json.dumps(counts, indent=1, sort_keys=True))
