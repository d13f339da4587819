// `my-policy`: offers every GPU as `shares` equal shares, and fills one GPU before the next one is used.
//
// A starting point for a policy. Every export is one hook of wit/policy.wit; null means "pass": the next
// policy of the stack is called. Each call runs in a fresh instance, so no state is kept. Names of the
// contract are in camelCase, lists are arrays, a u64 is a BigInt, a variant is {tag, val}.

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
    summary: "Offers every GPU as shares, and fills one GPU before the next one.",
    hooks: { offer: true, place: true, admit: true },
    parametersSchema: JSON.stringify(SCHEMA),
  };
}

// Logs the message of an error, which would be lost otherwise: the daemon shows the last line that was logged.
function hook(implementation) {
  return (...args) => {
    try {
      return implementation(...args);
    } catch (error) {
      log(error.message);
      throw error;
    }
  };
}

function parameters(ctx) {
  const { shares = 2, ...others } = JSON.parse(ctx.parameters || "{}");
  const unknown = Object.keys(others)[0];
  if (unknown !== undefined) throw new Error(`parameters: unknown field ${unknown}; expected shares`);
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

// Which devices to choose: those on the GPU with the fewest available ones. Devices are indices into node.devices.
export const place = hook((ctx, request) => {
  const part = (device) => ctx.node.devices[device].part;
  const available = Array.from(request.available);
  const required = Array.from(request.required);
  const left = (device) => available.filter((other) => part(other) === part(device)).length;
  const others = available.filter((device) => !required.includes(device));
  others.sort((a, b) => left(a) - left(b) || part(a) - part(b) || a - b);
  const devices = required.concat(others).slice(0, request.size);
  return { devices, reason: "fills one GPU before the next one" };
});

// Allows every request, and sets the memory limit of the container to that of its smallest share.
export const admit = hook((ctx, request) => {
  if (ctx.node.resources[request.request.resource] !== RESOURCE) return null;
  const consumed = Array.from(request.devices, (device) => ctx.node.devices[device].consumes);
  const memory = consumed.filter((c) => c.tag === "slice").map((c) => c.val.memoryMib);
  const least = memory.length === 0 ? null : Math.min(...memory);
  const limits = { memoryMib: least, computePercent: null };
  return { tag: "allow", val: { environment: [], limits, reason: "a share" } };
});

export function triage() {
  return null;
}
