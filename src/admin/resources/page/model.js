// Fetches and combines the data that the page shows.

import { now } from './clock.js';
import { usageOn } from './words.js';

/** Newest decisions of each hook that are shown: offers name all GPUs, and are long. */
const DECISIONS = { admit: 40, place: 40, triage: 10, offer: 5 };
/** Refusals that are pinned. */
const REFUSALS = 10;
/** Allocations per page of the API, and most pages that are requested. */
const PAGE = 500;
const PAGES_MAX = 10;

/** Memory that the driver itself may use, MiB. */
export const DRIVER_MIB = 600;

export class Model {
  #api;
  #details = new Map();
  #allocations = { items: [], total: 0 };
  /** What this daemon does not have, or does not let the caller read: it is not requested again. */
  #absent = new Set();

  constructor(api) { this.#api = api; }

  /**
   * Loads the state. `wants` says what is needed besides node and GPUs: `allocations`, `stack`, `decisions`, `access`.
   * The details of a GPU are requested only if its summary has changed.
   */
  async load(wants) {
    const [node, gpus, allocations, stack, history, decisions, refusals, access] = await Promise.all([
      this.#api.get('/node'),
      this.#api.get('/gpus'),
      wants.allocations ? this.#loadAllocations() : this.#allocations,
      // Its ETag is the revision, which does not change when calls and faults are counted: never conditional.
      wants.stack ? this.#api.get('/stack', { conditional: false }) : undefined,
      wants.stack ? this.#api.get('/stack/history') : undefined,
      wants.decisions ? this.#newest() : undefined,
      wants.decisions ? this.#refusals() : undefined,
      wants.access ? this.optional('/access') : undefined,
    ]);
    this.#allocations = allocations;
    const byGpu = new Map();
    for (const allocation of allocations.items) {
      for (const gpu of allocation.gpus) byGpu.set(gpu, [...(byGpu.get(gpu) ?? []), allocation]);
    }
    const whole = await Promise.all(gpus.items.map((gpu) => this.#detail(gpu, byGpu.get(gpu.uuid) ?? [], node.stackRevision)));
    for (const uuid of this.#details.keys()) {
      if (!gpus.items.some((gpu) => gpu.uuid === uuid)) this.#details.delete(uuid);
    }
    const shown = whole.filter((gpu) => gpu !== null);
    for (const gpu of shown) gpu.name = nameOf(gpu, shown);
    return {
      node,
      stack,
      history: history?.items,
      decisions: decisions && { ...decisions, refusals },
      access,
      allocations: allocations.items,
      allocationsTotal: allocations.total,
      pods: podsOf(allocations.items, shown),
      gpus: shown,
      gpu: new Map(shown.map((gpu) => [gpu.uuid, gpu])),
    };
  }

  /** A GET of what an older daemon may lack, or the caller may not read: undefined then. */
  async optional(path) {
    const kind = path.replace(/\?.*|[A-Z]+-[^/]*/g, '');
    if (this.#absent.has(kind)) return undefined;
    try {
      return await this.#api.get(path, { conditional: false });
    } catch (problem) {
      if (![403, 404].includes(problem.status)) throw problem;
      // This 404 is about one GPU, which was just forgotten; the others may have a history.
      if (problem.type !== '/problems/unknown-gpu') this.#absent.add(kind);
      return undefined;
    }
  }

  async #loadAllocations() {
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
  async #decisions(path) {
    try {
      return await this.#api.get(path);
    } catch (problem) {
      if (problem.status !== 409) throw problem;
      return { items: [], problem };
    }
  }

  async #newest() {
    const lists = await Promise.all(Object.entries(DECISIONS).map(([hook, limit]) => this.#decisions(`/decisions?hook=${hook}&limit=${limit}`)));
    return { items: lists.flatMap((list) => list.items).sort((a, b) => b.seq - a.seq), problem: lists[0].problem };
  }

  async #refusals() {
    const lists = await Promise.all(['denied', 'refused'].map((outcome) => this.#decisions(`/decisions?outcome=${outcome}&limit=${REFUSALS}`)));
    return lists.flatMap((list) => list.items).sort((a, b) => b.seq - a.seq).slice(0, REFUSALS);
  }

  async #detail(summary, allocations, revision) {
    const { uuid, health, drain, resources, present } = summary;
    const sign = JSON.stringify([health.state, present, resources, drain.state, allocations.map((a) => a.id), revision]);
    let known = this.#details.get(uuid);
    if (known?.sign !== sign) {
      try {
        known = { sign, gpu: await this.#api.get(`/gpus/${encodeURIComponent(uuid)}`) };
      } catch (problem) {
        // The GPU was forgotten between the two requests; the next load omits it.
        if (problem.status === 404) return null;
        throw problem;
      }
      this.#details.set(uuid, known);
    }
    // The summary is newer. Its seconds are of this moment; the page counts them down.
    const { progress } = drain;
    if (progress?.secondsLeft !== undefined) progress.until ??= now() + progress.secondsLeft * 1000;
    return { ...known.gpu, ...summary, allocations };
  }
}

/** `GPU 3`; of one that vanished and whose index another GPU has now, the beginning of its UUID. */
function nameOf(gpu, gpus) {
  const isTaken = !gpu.present && gpus.some((other) => other.present && other.index === gpu.index);
  return isTaken ? `${gpu.uuid.slice(0, 12)} (GPU ${gpu.index} before)` : `GPU ${gpu.index}`;
}

/** Pods by `namespace/name`, with their allocations and GPUs; those whose pod is not known yet are listed one by one. */
function podsOf(allocations, gpus) {
  const pods = new Map();
  for (const allocation of allocations) {
    const { namespace, pod } = allocation.holder ?? {};
    const key = pod ? `${namespace}/${pod}` : `allocation ${allocation.id}`;
    const known = pods.get(key) ?? { key, namespace, pod, allocations: [] };
    known.allocations.push(allocation);
    pods.set(key, known);
  }
  const byIndex = gpus.toSorted((a, b) => a.index - b.index);
  for (const pod of pods.values()) {
    const held = new Set(pod.allocations.flatMap((a) => a.gpus));
    pod.gpus = byIndex.filter((gpu) => held.has(gpu.uuid));
  }
  return pods;
}

/** All devices of a GPU, with the allocation that holds each. */
export function devicesOf(gpu) {
  const byId = new Map(gpu.allocations.map((a) => [a.id, a]));
  return gpu.parts.flatMap((part) => part.devices.map((device) => ({ ...device, part, allocation: byId.get(device.allocations.at(-1)) })));
}

/** MiB of a GPU that live allocations were granted. */
export function grantedMiB(gpu) {
  if (gpu.memoryGrantedMiB !== undefined) return gpu.memoryGrantedMiB;
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

/** The pods on a GPU, those with the most devices first, then those with the most memory in use. */
export function podsOn(gpu) {
  const pods = new Map();
  for (const { state, allocation, allocations, resource } of devicesOf(gpu)) {
    if (state !== 'held') continue;
    const { namespace, pod } = allocation?.holder ?? {};
    const key = pod ? `${namespace}/${pod}` : `allocation ${allocation?.id ?? allocations[0]}`;
    const known = pods.get(key) ?? { key, namespace, pod, resource, devices: 0, allocations: new Set() };
    known.devices += 1;
    if (allocation) known.allocations.add(allocation);
    pods.set(key, known);
  }
  for (const pod of pods.values()) pod.usedMiB = [...pod.allocations].reduce((sum, allocation) => sum + (usageOn(allocation, gpu).used ?? 0), 0);
  return [...pods.values()].sort((a, b) => b.devices - a.devices || b.usedMiB - a.usedMiB || a.key.localeCompare(b.key));
}
