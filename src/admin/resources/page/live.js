// Loads the state again when the daemon's event stream reports a change. The stream is read with fetch because
// EventSource cannot send an Authorization header. Without a stream, the page polls every few seconds.

const EVENTS = '/events';
/** Between loads without a stream, milliseconds. */
const POLL_MS = 3000;
/** Between loads while the stream is open: no event reports memory in use and time left. */
const SLOW_MS = 15_000;
/** First and longest wait before the stream is opened again. */
const AGAIN_MS = 1000;
const AGAIN_MAX_MS = 30_000;
/** A stream that sends no data for this time, not even a comment, counts as interrupted. */
const SILENT_MS = 60_000;
/** A burst of events causes one load; on a busy node there is one a second, and fewer where one is expensive. */
const GATHER_MS = 200;
const INTERVAL_MIN_MS = 1000;
const INTERVAL_MAX_MS = 5000;
/**
 * After a load that took t milliseconds the next one starts 40 t later, but not after more than INTERVAL_MAX_MS: loads of up
 * to 125 ms take at most 1/40 of the processor.
 */
const WAIT_PER_COST = 40;

/**
 * Calls `update` when something changed: it gets the kinds of the events since its last call, and returns how long it kept
 * the processor, milliseconds. Calls `onState` with the state of the stream (live, polling or lost), and `onEvent` with each event.
 */
export class Live {
  #api; #update; #onState; #onEvent;
  #stop = new AbortController();
  #lastId = '';
  #timer = 0;
  #due = Infinity;
  #last = 0;
  #updating = false;
  #again = false;
  #live = false;
  #interval = INTERVAL_MIN_MS;
  #kinds = new Set();
  /** Ends the stream while the page is hidden: the daemon permits 32. */
  #hidden = new AbortController();
  #wake = () => {};

  constructor(api, { update, onState, onEvent }) {
    this.#api = api;
    this.#update = update;
    this.#onState = onState;
    this.#onEvent = onEvent;
  }

  start() {
    this.#follow();
    document.addEventListener('visibilitychange', () => this.#turned(), { signal: this.#stop.signal });
    this.soon(0);
  }

  stop() {
    this.#stop.abort();
    clearTimeout(this.#timer);
    this.#wake();
  }

  #turned() {
    if (document.hidden) {
      this.#hidden.abort();
      return;
    }
    this.#hidden = new AbortController();
    this.#wake();
    this.soon();
  }

  /** Resolves after this time, or when the page is visible again. */
  async #pause(wait) {
    let timer = 0;
    await new Promise((resolve) => {
      this.#wake = resolve;
      if (wait !== Infinity) timer = setTimeout(resolve, wait);
    });
    clearTimeout(timer);
  }

  /** Schedules a load; if one is in progress, another follows it. */
  soon(wait = GATHER_MS) {
    if (this.#stop.signal.aborted || document.hidden) return;
    if (this.#updating) {
      this.#again = true;
      return;
    }
    const now = performance.now();
    const due = Math.max(now + wait, this.#last + this.#interval);
    // An earlier one stays scheduled: continuous events must not postpone the load.
    if (this.#due <= due) return;
    this.#due = due;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#run(), due - now);
  }

  async #run() {
    this.#updating = true;
    this.#again = false;
    this.#due = Infinity;
    this.#last = performance.now();
    const kinds = this.#kinds;
    this.#kinds = new Set();
    try {
      const cost = await this.#update(kinds);
      this.#interval = Math.min(Math.max(cost * WAIT_PER_COST, INTERVAL_MIN_MS), INTERVAL_MAX_MS);
    } finally {
      this.#updating = false;
      this.soon(this.#again ? GATHER_MS : this.#live ? SLOW_MS : POLL_MS);
    }
  }

  async #follow() {
    let wait = AGAIN_MS;
    while (!this.#stop.signal.aborted) {
      if (document.hidden) {
        await this.#pause(Infinity);
        continue;
      }
      const hidden = this.#hidden.signal;
      let over = false;
      try {
        const read = await this.#readStream();
        if (read === 'none') {
          this.#onState('polling');
          this.soon(POLL_MS);
          return;
        }
        // The daemon ends each stream after a while; only one that cannot be opened again is lost.
        over = read === 'ended';
        if (over) wait = AGAIN_MS;
      } catch {
        // An interrupted connection is reported below, and opened again.
      }
      if (this.#stop.signal.aborted) return;
      // Ended by this page: continues after the last id once the page is visible.
      if (hidden.aborted) continue;
      if (!over) this.#lost();
      // Randomized, so that many pages do not reconnect at once after a restart of the daemon.
      await this.#pause(wait * (0.75 + Math.random() / 2));
      wait = Math.min(wait * 2, AGAIN_MAX_MS);
    }
  }

  #lost() {
    this.#live = false;
    this.#onState('lost');
    this.soon(POLL_MS);
  }

  #take(data) {
    let event;
    try {
      event = JSON.parse(data);
    } catch {
      event = { kind: 'missed' };
    }
    // `here` begins each stream, which was a reason to load already.
    if (event.kind !== 'here') {
      this.#kinds.add(event.kind);
      this.#onEvent(event);
    }
    this.soon();
  }

  /** 'none': the daemon has no stream. 'refused': not at present. 'ended': it was open and ended. */
  async #readStream() {
    const silent = new AbortController();
    const signal = AbortSignal.any([this.#stop.signal, this.#hidden.signal, silent.signal]);
    let timer = setTimeout(() => silent.abort(), SILENT_MS);
    try {
      const response = await this.#api.stream(EVENTS, this.#lastId, signal);
      if (response.status === 404 || response.status === 405) return 'none';
      if (!response.ok || !response.body) return 'refused';
      this.#live = true;
      this.#onState('live');
      this.soon();
      const parser = new Parser((id) => { this.#lastId = id; }, (data) => this.#take(data));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return 'ended';
        clearTimeout(timer);
        timer = setTimeout(() => silent.abort(), SILENT_MS);
        parser.take(value);
      }
    } finally {
      clearTimeout(timer);
    }
  }
}

/** The lines of an event stream (HTML, 9.2.6), as far as this page needs them: ids and data. */
export class Parser {
  #rest = '';
  #id;
  #data = [];

  constructor(onId, onEvent) {
    this.onId = onId;
    this.onEvent = onEvent;
  }

  take(text) {
    // A lone CR at the end may be the first half of a CRLF: it waits for the next piece.
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) this.#line(line);
  }

  #line(line) {
    if (line === '') {
      if (this.#id !== undefined) this.onId(this.#id);
      if (this.#data.length) this.onEvent(this.#data.join('\n'));
      this.#id = undefined;
      this.#data = [];
      return;
    }
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line) ?? [];
    if (field === 'id' && !value.includes('\0')) this.#id = value;
    if (field === 'data') this.#data.push(value);
  }
}
