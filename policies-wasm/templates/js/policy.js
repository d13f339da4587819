// `my-policy`: every GPU in `shares` equal shares; one GPU is filled before the next is begun.
//
// A place to begin. Every export is one hook of wit/policy.wit; null is "pass": the next policy of the
// stack is asked. Each call runs in a fresh instance, so nothing is remembered. Names of the contract are
// in camelCase here, lists are arrays, a u64 is a BigInt, a variant is {tag, val}.

const RESOURCE = "nvidia.com/gpu.shared";

const SCHEMA = {
  $schema: "https://json-schema.org/draft/2020-12/schema",
  title: "Parameters of my-policy",
  type: "object",
  additionalProperties: false,
  properties: {
    shares: { description: "Shares of each GPU.", type: "integer", minimum: 1, maximum: 64, default: 2 },
  },
};

export function describe() {
  return {
    name: "my-policy",
    version: "0.1.0",
    summary: "Every GPU in shares, one GPU filled before the next.",
    hooks: { offer: true, place: true, admit: true },
    parametersSchema: JSON.stringify(SCHEMA),
  };
}

// An error ends the call, and its text would be lost: the daemon shows the last line that was logged.
function hook(answer) {
  return (...question) => {
    try {
      return answer(...question);
    } catch (error) {
      log(error.message);
      throw error;
    }
  };
}

function parameters(ctx) {
  const { shares = 2, ...others } = JSON.parse(ctx.parameters || "{}");
  const strange = Object.keys(others)[0];
  if (strange !== undefined) throw new Error(`parameters: unknown field ${strange}; known is shares`);
  if (!Number.isInteger(shares) || shares < 1 || shares > 64) {
    throw new Error(`parameters: shares: ${shares} is out of range; write 1 to 64`);
  }
  return { shares };
}

// What each GPU is advertised as. GPUs that are not named are left to the next policy.
export const offer = hook((ctx) => {
  const { shares } = parameters(ctx);
  const parts = [];
  ctx.node.parts.forEach((part, index) => {
    if (part.parent != null || part.migEnabled) return;
    const slice = {
      memoryMib: Math.floor(part.memoryMib / shares),
      computePercent: Math.floor(100 / shares),
    };
    const line = { resource: RESOURCE, count: shares, consumes: { tag: "slice", val: slice } };
    parts.push({ part: index, lines: [line] });
  });
  return { parts, againAfterSeconds: null };
});

// Which devices to prefer: those on the GPU with the fewest left. Devices are indices into node.devices.
export const place = hook((ctx, request) => {
  const part = (device) => ctx.node.devices[device].part;
  const available = Array.from(request.available);
  const required = Array.from(request.required);
  const left = (device) => available.filter((other) => part(other) === part(device)).length;
  const others = available.filter((device) => !required.includes(device));
  others.sort((a, b) => left(a) - left(b) || part(a) - part(b) || a - b);
  const devices = required.concat(others).slice(0, request.size);
  return { devices, reason: "fills one GPU before the next" };
});

// Yes, and how much memory the container may use. The smallest of its shares counts.
export const admit = hook((ctx, request) => {
  if (ctx.node.resources[request.request.resource] !== RESOURCE) return null;
  const taken = Array.from(request.devices, (device) => ctx.node.devices[device].consumes);
  const memory = taken.filter((c) => c.tag === "slice").map((c) => c.val.memoryMib);
  const least = memory.length === 0 ? null : Math.min(...memory);
  const limits = { memoryMib: least, computePercent: null };
  return { tag: "allow", val: { environment: [], limits, reason: "a share" } };
});

export function triage() {
  return null;
}
