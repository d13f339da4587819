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

/** How long nothing is requested again after a failure, milliseconds. */
const FAILED_MS = 10_000;

/** An answer, or its failure, and until when it is used: a failure is kept as well, so that it is not repeated at once. */
function keep(answer, ms) {
  const kept = { answer, until: Infinity };
  answer.then(() => ms, () => FAILED_MS).then((wait) => { kept.until = performance.now() + wait; });
  return kept;
}
const isKept = (kept) => kept && performance.now() < kept.until;

/** Events with newer ones before them, except those that are there already: the stream may repeat one that was read. */
function extended(events, newer) {
  const keyOf = ({ at, kind, gpu, words }) => [at, kind, gpu, words].join(' ');
  const known = new Set(events.map(keyOf));
  return [...newer.filter((event) => !known.has(keyOf(event))), ...events].slice(0, EVENTS_MAX);
}

export class Past {
  #model;
  #hours = new Map();
  #hoursAt = -Infinity;
  #graphs = new Map();
  #events;

  constructor(model) { this.#model = model; }

  /** The last hour of each GPU. Lines that could not be read stay as they were, until they are due again. */
  async hours(gpus) {
    if (performance.now() - this.#hoursAt < HOUR_MS) return this.#hours;
    this.#hoursAt = performance.now();
    const lines = new Map();
    const read = async ({ uuid }) => {
      const answer = await this.#model.optional(`/gpus/${uuid}/history?last=1h&points=${HOUR_POINTS}`);
      if (answer) lines.set(uuid, answer.items);
    };
    const rest = [...gpus];
    try {
      // One after the other until one is read: a daemon without history gets one request.
      while (rest.length > 0 && lines.size === 0) await read(rest.shift());
      await Promise.all(rest.map(read));
      this.#hours = lines;
    } catch (problem) {
      if (!problem.title) throw problem;
    }
    return this.#hours;
  }

  /** The past of one GPU. From the last read if that is recent. */
  async graph(uuid, last) {
    const key = `${uuid} ${last}`;
    if (!isKept(this.#graphs.get(key))) {
      this.#graphs.delete(key);
      if (this.#graphs.size >= GRAPHS_MAX) this.#graphs.delete(this.#graphs.keys().next().value);
      this.#graphs.set(key, keep(this.#model.optional(`/gpus/${uuid}/history?last=${last}&points=${GRAPH_POINTS}`), GRAPH_MS[last]));
    }
    return this.#graphs.get(key).answer;
  }

  /** The events of the last day, newest first; undefined where the daemon keeps none. */
  async events() {
    if (!isKept(this.#events)) {
      const kept = keep(this.#model.optional(`/events/history?last=24h&limit=${EVENTS_MAX}`), Infinity);
      // Events of the stream are added before the answer arrives, too.
      kept.items = [];
      kept.answer = kept.answer.then((read) => {
        if (read) kept.items = extended(read.items, kept.items);
        return read;
      });
      this.#events = kept;
    }
    const kept = this.#events;
    return (await kept.answer) && kept.items;
  }

  /** The events that are known so far. */
  get lastEvents() { return this.#events?.items; }

  /** Adds an event of the stream. */
  add(event) {
    if (!this.#events || !OPERATOR_KINDS.has(event.kind)) return;
    this.#events.items = extended(this.#events.items, [event]);
  }

  /** Events were missed: they are read again. */
  forgetEvents() { this.#events = undefined; }
}

/** The page's own kind of event: the start of the daemon. */
export const START = 'start';

/** Kinds of event that the daemon keeps for operators, by the row of the timeline in which they are drawn. */
export const LANES = {
  Health: ['gpuHealth', 'gpuFound', 'gpuForgotten'],
  Drains: ['gpuCordoned', 'gpuDraining', 'gpuDrained', 'gpuUncordoned', 'gpuVia', 'eviction'],
  Refusals: ['requestRefused'],
  Policies: ['stackActivated', 'policyUploaded', 'policyDeleted', 'policyFault', 'policySuspended', 'policyAskedAgain'],
  Node: [START, 'hold', 'noDeviceStrategy', 'deviceNodesMissing', 'resourceWithdrawn', 'bypass', 'bypassOver', 'allocationContested', 'limitNotSet', 'limitChanged', 'grantForged', 'containerBypass', 'guard'],
};
const OPERATOR_KINDS = new Set(Object.values(LANES).flat());
