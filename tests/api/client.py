"""The Python client at work: it lists GPUs, cordons one on a condition, uploads a policy, reads pages,
and finds problems where there are some. Run by lint.py with the client on its path."""

import io
import pathlib
import sys
import time

from berth_client import AuthenticatedClient
from berth_client.api.events import stream_events
from berth_client.api.gpus import cordon_gpu, get_drain_of_gpu, get_gpu, list_gpus, uncordon_gpu
from berth_client.api.node import get_node
from berth_client.api.policies import get_policy_module, list_policies, upload_policy
from berth_client.api.stack import activate_stack, get_stack
from berth_client.models import Cordon, Gpu, PolicyDetail, Problem, StackEntrySpec, StackSpec
from berth_client.types import UNSET, File

# Longest wait for an event: it arrives within a tenth of a second.
EVENT_S = 10


def main():
    url, token, module = sys.argv[1:]
    client = AuthenticatedClient(base_url=url, token=token)
    assert get_node.sync(client=client).counts.gpus == 8
    gpus = list_gpus.sync(client=client).items
    assert [gpu.index for gpu in gpus] == list(range(8)), gpus

    uuid = gpus[0].uuid
    tag = get_drain_of_gpu.sync_detailed(uuid, client=client).headers["etag"]
    cordoned = cordon_gpu.sync(uuid, client=client, body=Cordon(reason="api-lint"), if_match=tag)
    assert isinstance(cordoned, Gpu) and cordoned.drain.state == "cordoned", cordoned
    late = cordon_gpu.sync_detailed(uuid, client=client, body=Cordon(reason="again"), if_match=tag)
    assert late.status_code == 412 and isinstance(late.parsed, Problem), late
    assert late.parsed.type_ == "/problems/changed-meanwhile", late.parsed
    page = client.get_httpx_client().get(late.parsed.type_)
    assert page.status_code == 200 and "What to do" in page.text, page
    assert uncordon_gpu.sync(uuid, client=client).drain.state == "active"
    missing = get_gpu.sync("GPU-00000000-0000-0000-0000-000000000000", client=client)
    assert isinstance(missing, Problem) and missing.status == 404, missing

    data = pathlib.Path(module).read_bytes()
    send = lambda: upload_policy.sync_detailed(client=client, body=File(io.BytesIO(data)), reason="api-lint")
    first, again = send(), send()
    assert isinstance(first.parsed, PolicyDetail), first
    assert (first.status_code, again.status_code) == (201, 200) and first.parsed == again.parsed, again
    got = get_policy_module.sync_detailed(first.parsed.digest, client=client)
    assert got.content == data, len(got.content)
    names, cursor = [], UNSET
    while True:
        listed = list_policies.sync(client=client, limit=2, cursor=cursor)
        names += [policy.name for policy in listed.items]
        if not listed.next_:
            break
        cursor = listed.next_
    assert first.parsed.name in names and len(names) >= 9, names

    entry = StackEntrySpec(policy=first.parsed.name, digest=first.parsed.digest)
    stack = activate_stack.sync(client=client, body=StackSpec(entries=[entry], reason="api-lint"))
    assert stack.revision == get_stack.sync(client=client).revision, stack
    deadline = time.monotonic() + EVENT_S
    while True:
        events = stream_events.sync_detailed(client=client, since="0", follow=False).content
        if b"event: stackActivated" in events:
            break
        assert time.monotonic() < deadline, events[-400:]
    stranger = AuthenticatedClient(base_url=url, token="x" * 64)
    refused = list_gpus.sync(client=stranger)
    assert isinstance(refused, Problem) and refused.status == 401, refused
    print(f"Python client: {len(gpus)} GPUs, {len(names)} policies, stack {stack.revision}")


main()
