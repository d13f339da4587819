// The past of GPUs: fetched when it is shown. Lines of the last hour are read again after a minute, graphs after one of
// their steps; events are kept and extended by the stream.

/** How long the line of an hour is shown before it is read again, milliseconds: the length of its steps. */
const HOUR_MS = 60_000;
/** Steps of the line of an hour, and of a graph. */
const HOUR_POINTS = 60;
const GRAPH_POINTS = 240;
/** Between two reads of a graph that is open, by its time range, milliseconds. */
const GRAPH_MS = { '1h': 15_000, '24h': 120_000 };
/** Graphs that are kept: those of the GPUs of a pod. */
const GRAPHS_MAX = 8;
/** Events of the timeline. */
export const EVENTS_MAX = 500;

export class Past {
  #model;
  #hours = new Map();
  #hoursAt = -Infinity;
  #graphs = new Map();
  #events;

  constructor(model) { this.#model = model; }

  /** The last hour of each GPU, if it is due. Undefined: nothing new. */
  async hours(gpus) {
    if (performance.now() - this.#hoursAt < HOUR_MS) return undefined;
    this.#hoursAt = performance.now();
    const read = async ({ uuid }) => [uuid, (await this.#model.optional(`/gpus/${uuid}/history?last=1h&points=${HOUR_POINTS}`))?.items];
    // One first: a daemon without history gets one request.
    const [first, ...rest] = gpus;
    if (!first) return undefined;
    const all = [await read(first)];
    if (all[0][1]) all.push(...await Promise.all(rest.map(read)));
    this.#hours = new Map(all);
    return this.#hours;
  }

  /** The kept lines of the last hour. */
  get lastHours() { return this.#hours; }

  /** The past of one GPU. From the last read if that is recent. */
  async graph(uuid, last) {
    const key = `${uuid} ${last}`;
    const known = this.#graphs.get(key);
    if (known && performance.now() - known.at < GRAPH_MS[last]) return known.data;
    const data = await this.#model.optional(`/gpus/${uuid}/history?last=${last}&points=${GRAPH_POINTS}`);
    if (!known && this.#graphs.size >= GRAPHS_MAX) this.#graphs.delete(this.#graphs.keys().next().value);
    this.#graphs.set(key, { at: performance.now(), data });
    return data;
  }

  /** The events of the last day, newest first; undefined where the daemon keeps none. */
  async events() {
    if (!this.#events) {
      const read = await this.#model.optional(`/events/history?last=24h&limit=${EVENTS_MAX}`);
      this.#events = read && { items: read.items };
    }
    return this.#events?.items;
  }

  /** The events that were read, if they were. */
  get lastEvents() { return this.#events?.items; }

  /** Adds an event of the stream. */
  add(event) {
    if (!this.#events || !OPERATOR_KINDS.has(event.kind)) return;
    this.#events.items = [event, ...this.#events.items].slice(0, EVENTS_MAX);
  }

  /** Events were missed: they are read again. */
  forgetEvents() { this.#events = undefined; }
}

/** Kinds of event that the daemon keeps for operators, by the row of the timeline in which they are drawn. */
export const LANES = {
  Health: ['gpuHealth', 'gpuFound', 'gpuForgotten'],
  Drains: ['gpuCordoned', 'gpuDraining', 'gpuDrained', 'gpuUncordoned', 'eviction'],
  Refusals: ['requestRefused'],
  Policies: ['stackActivated', 'policyUploaded', 'policyDeleted', 'policyFault', 'policySuspended', 'policyAskedAgain'],
  Node: ['hold', 'noDeviceStrategy', 'deviceNodesMissing', 'bypass', 'bypassOver'],
};
const OPERATOR_KINDS = new Set(Object.values(LANES).flat());
