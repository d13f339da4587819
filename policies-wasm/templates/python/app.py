"""`my-policy`: offers every GPU as `shares` equal shares, and fills one GPU before the next one is used.

A starting point for a policy. Every method is one hook of wit/policy.wit; None means "pass": the next policy
of the stack is called. Each call runs in a fresh instance, so no state is kept. The types are generated from
the contract: `componentize-py -d wit -w policy bindings bindings` writes them to files for an editor.
"""

import functools
import json

import wit_world
from wit_world.imports import types

RESOURCE = "nvidia.com/gpu.shared"
SHARES_MAX = 64

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Parameters of my-policy",
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "shares": {
            "description": "Shares of each GPU.",
            "type": "integer",
            "minimum": 1,
            "maximum": SHARES_MAX,
            "default": 2,
        }
    },
}


def hook(implementation):
    """Logs the message of an exception, which would be lost otherwise: the daemon shows the last logged line."""

    @functools.wraps(implementation)
    def wrapped(*args):
        try:
            return implementation(*args)
        except Exception as error:
            wit_world.log(str(error))
            raise

    return wrapped


def shares_of(ctx):
    given = json.loads(ctx.parameters or "{}")
    shares = given.pop("shares", 2)
    if given:
        raise ValueError(f"parameters: unknown field {next(iter(given))}; expected shares")
    if type(shares) is not int or not 1 <= shares <= SHARES_MAX:
        raise ValueError(f"parameters: shares: {shares} is out of range; write 1 to {SHARES_MAX}")
    return shares


class WitWorld(wit_world.WitWorld):
    def describe(self):
        return types.Description(
            name="my-policy",
            version="0.1.0",
            summary="Offers every GPU as shares, and fills one GPU before the next one.",
            hooks=types.Hooks.OFFER | types.Hooks.PLACE | types.Hooks.ADMIT,
            parameters_schema=json.dumps(SCHEMA),
        )

    @hook
    def offer(self, ctx):
        """What each GPU is advertised as. GPUs that are not named are left to the next policy."""
        shares = shares_of(ctx)
        parts = []
        for index, part in enumerate(ctx.node.parts):
            if part.parent is not None or part.mig_enabled:
                continue
            share = types.Slice(part.memory_mib // shares, 100 // shares)
            line = types.OfferLine(RESOURCE, shares, types.Consumes_Slice(share))
            parts.append(types.PartOffer(index, [line]))
        return types.OfferAnswer(parts, None)

    @hook
    def place(self, ctx, request):
        """Which devices to choose: those on the GPU with the fewest available ones, as indices into node.devices."""
        part = [device.part for device in ctx.node.devices]
        left = [part[device] for device in request.available]
        others = [device for device in request.available if device not in request.required]
        others.sort(key=lambda device: (left.count(part[device]), part[device], device))
        devices = (request.required + others)[: request.size]
        return types.Placement(devices, "fills one GPU before the next one")

    @hook
    def admit(self, ctx, request):
        """Allows every request, and sets the memory limit of the container to that of its smallest share."""
        if ctx.node.resources[request.request.resource] != RESOURCE:
            return None
        consumed = [ctx.node.devices[device].consumes for device in request.devices]
        memory = [c.value.memory_mib for c in consumed if isinstance(c, types.Consumes_Slice)]
        limits = types.Limits(min(memory, default=None), None)
        return types.Verdict_Allow(types.GrantTerms([], limits, "a share"))

    def triage(self, ctx, reading):
        return None
