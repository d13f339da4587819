// What is shown, in the fragment of the URL: a link shows the same to someone else. The daemon never gets the fragment.

/** Time ranges of graphs and of the timeline, milliseconds. */
export const RANGES_MS = { '1h': 3_600_000, '24h': 24 * 3_600_000 };

/** The keys, and their values in an address without them. */
const DEFAULTS = {
  view: 'gpus', // gpus, pods, timeline, policies, decisions, links
  q: '', // what is searched for
  state: '', // states of GPUs, separated by commas
  why: '', // an error of the status line
  layout: 'table', // table, tiles
  gpu: '', // the UUID of the GPU in the drawer
  pod: '', // the namespace/name of the pod in the drawer
  last: '1h', // 1h, 24h: of graphs and of the timeline
  lane: '', // the row of the timeline whose events are shown; none: all
  keys: 'on', // on, off: keyboard shortcuts of one key
};

export class Route {
  #values = { ...DEFAULTS };
  #changed;

  constructor(changed) {
    this.#changed = changed;
    this.#read();
    addEventListener('popstate', () => {
      this.#read();
      this.#changed();
    });
  }

  get(key) { return this.#values[key]; }

  /** The address of this page with these values changed. */
  link(changes) {
    const query = new URLSearchParams();
    for (const [key, value] of Object.entries({ ...this.#values, ...changes })) {
      if (value !== DEFAULTS[key]) query.set(key, value);
    }
    return `#${query}`;
  }

  /** Shows something else. With `replace`, Back does not return to what was shown before, as while one types. */
  set(changes, { replace = false } = {}) {
    const link = this.link(changes);
    if (link === this.link({})) return;
    Object.assign(this.#values, changes);
    history[replace ? 'replaceState' : 'pushState'](null, '', link === '#' ? location.pathname : link);
    this.#changed();
  }

  #read() {
    const query = new URLSearchParams(location.hash.slice(1));
    for (const [key, value] of Object.entries(DEFAULTS)) this.#values[key] = query.get(key) ?? value;
    // The daemon would refuse a time range that no button sets.
    if (!Object.hasOwn(RANGES_MS, this.#values.last)) this.#values.last = DEFAULTS.last;
  }
}
