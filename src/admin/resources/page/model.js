// All that the page shows, fetched and put together.

/** Newest decisions that are shown. */
const DECISIONS = 20;
/** Allocations of one answer, and most answers that are asked for. */
const PAGE = 500;
const PAGES_MAX = 10;

export class Model {
  #api;
  #details = new Map();

  constructor(api) { this.#api = api; }

  /** Everything at once. A GPU is looked at closely only where what is known of it has changed. */
  async load() {
    const [node, gpus, allocations, stack, decisions] = await Promise.all([
      this.#api.get('/node'),
      this.#api.get('/gpus'),
      this.#allocations(),
      // Its ETag is the revision, which stays while calls and faults are counted: never conditional.
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
      // A cursor is another one with each grant, so nothing is gained by keeping what it led to.
      answer = await this.#api.get(`/allocations?state=live&limit=${PAGE}&cursor=${encodeURIComponent(answer.next)}`, { conditional: false });
      items.push(...answer.items);
    }
    return { items, total: answer.total };
  }

  /** A daemon that keeps no record says so with a 409; the page shows its words. */
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
        // Forgotten between the two questions: the next look knows.
        if (problem.status === 404) return null;
        throw problem;
      }
      this.#details.set(summary.uuid, known);
    }
    // The summary is the fresher of the two.
    return { ...known.gpu, ...summary, allocations };
  }
}

/** MiB that live allocations were promised of a GPU: a whole part is all of it. */
export function grantedMiB(gpu) {
  let sum = 0;
  for (const part of gpu.parts) {
    for (const device of part.devices) {
      if (device.state === 'held') sum += device.consumes.whole ? part.memoryMiB : device.consumes.memoryMiB;
    }
  }
  return Math.min(sum, gpu.memoryMiB);
}

/** `namespace/pod/container`, as far as it is known. */
export function holderName(allocation) {
  const holder = allocation?.holder;
  if (!holder?.pod) return 'pod not known yet';
  return [holder.namespace, holder.pod, holder.container].filter(Boolean).join('/');
}
