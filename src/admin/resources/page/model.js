// Fetches and combines the data that the page shows.

/** Number of decisions shown. */
const DECISIONS = 20;
/** Allocations per page of the API, and most pages that are requested. */
const PAGE = 500;
const PAGES_MAX = 10;

export class Model {
  #api;
  #details = new Map();

  constructor(api) { this.#api = api; }

  /** Loads everything. The details of a GPU are requested only if its summary has changed. */
  async load() {
    const [node, gpus, allocations, stack, decisions] = await Promise.all([
      this.#api.get('/node'),
      this.#api.get('/gpus'),
      this.#allocations(),
      // Its ETag is the revision, which does not change when calls and faults are counted: never conditional.
      this.#api.get('/stack', { conditional: false }),
      this.#decisions(),
    ]);
    const byGpu = new Map();
    for (const allocation of allocations.items) {
      for (const gpu of allocation.gpus) byGpu.set(gpu, [...(byGpu.get(gpu) ?? []), allocation]);
    }
    const whole = await Promise.all(gpus.items.map((gpu) => this.#detail(gpu, byGpu.get(gpu.uuid) ?? [], stack)));
    for (const uuid of this.#details.keys()) {
      if (!gpus.items.some((gpu) => gpu.uuid === uuid)) this.#details.delete(uuid);
    }
    return {
      node,
      stack,
      decisions,
      allocations: allocations.items,
      allocationsTotal: allocations.total,
      gpus: whole.filter((gpu) => gpu !== null),
      name: new Map(gpus.items.map((gpu) => [gpu.uuid, `GPU ${gpu.index}`])),
    };
  }

  async #allocations() {
    const items = [];
    let answer = await this.#api.get(`/allocations?state=live&limit=${PAGE}`);
    items.push(...answer.items);
    for (let page = 1; answer.next && page < PAGES_MAX; page += 1) {
      // Cursors change with each grant, so caching these pages gains nothing.
      answer = await this.#api.get(`/allocations?state=live&limit=${PAGE}&cursor=${encodeURIComponent(answer.next)}`, { conditional: false });
      items.push(...answer.items);
    }
    return { items, total: answer.total };
  }

  /** A daemon without a journal answers 409; the page shows its message. */
  async #decisions() {
    try {
      return await this.#api.get(`/decisions?limit=${DECISIONS}`);
    } catch (problem) {
      if (problem.status !== 409) throw problem;
      return { items: [], problem };
    }
  }

  async #detail(summary, allocations, stack) {
    const { memoryUsedMiB, processes, drain, ...steady } = summary;
    const sign = JSON.stringify([steady, drain.state, allocations.map((a) => a.id), stack.revision]);
    let known = this.#details.get(summary.uuid);
    if (known?.sign !== sign) {
      try {
        known = { sign, gpu: await this.#api.get(`/gpus/${encodeURIComponent(summary.uuid)}`) };
      } catch (problem) {
        // The GPU was forgotten between the two requests; the next load omits it.
        if (problem.status === 404) return null;
        throw problem;
      }
      this.#details.set(summary.uuid, known);
    }
    // The summary is newer.
    return { ...known.gpu, ...summary, allocations };
  }
}

/** MiB of a GPU that live allocations were granted. */
export function grantedMiB(gpu) {
  let sum = 0;
  for (const part of gpu.parts) {
    for (const device of part.devices) {
      if (device.state === 'held') sum += device.consumes.whole ? part.memoryMiB ?? 0 : device.consumes.memoryMiB;
    }
  }
  return Math.min(sum, gpu.memoryMiB ?? sum);
}

/** `namespace/pod/container`, as far as it is known. */
export function holderName(allocation) {
  const holder = allocation?.holder;
  if (!holder?.pod) return 'pod not known yet';
  return [holder.namespace, holder.pod, holder.container].filter(Boolean).join('/');
}
