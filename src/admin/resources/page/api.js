// The REST API of the daemon that served this page. The token is in this tab's session storage and in
// the Authorization header, never in a URL.

import { setClock } from './clock.js';

const KEY = 'berth-token';
/** Longest wait for a response, milliseconds. */
const WAIT_MS = 30_000;
/** The same for changes of the stack and for trials: a policy may have to be compiled, for up to 300 seconds. */
const STACK_WAIT_MS = 370_000;
/** Responses in the cache: of 64 GPUs, and some lists. */
const KNOWN_MAX = 128;
/** Most concurrent requests: a browser opens six connections to a host, and the event stream has one. */
const AT_ONCE = 4;

/** A failed request: problem+json (RFC 9457), or an error of the connection in the same form. */
export class Problem extends Error {
  constructor({ type = '', title, detail, hint, status = 0 }) {
    super(detail || title);
    Object.assign(this, { type, title, detail, hint, status });
  }
}

export class Api {
  #token = sessionStorage.getItem(KEY) ?? '';
  #known = new Map();
  #free = AT_ONCE;
  #waiting = [];

  get signedIn() { return this.#token !== ''; }

  signIn(token) {
    this.#token = token;
    this.#known.clear();
    sessionStorage.setItem(KEY, token);
  }

  signOut() {
    this.#token = '';
    this.#known.clear();
    sessionStorage.removeItem(KEY);
  }

  /** The response to a GET. With `conditional`, an unchanged one comes from the cache (304). */
  async get(path, { conditional = true } = {}) {
    const known = conditional ? this.#known.get(path) : undefined;
    const token = this.#token;
    const response = await this.#ask('GET', path, { headers: known ? { 'If-None-Match': known.etag } : {} });
    if (response.status === 304 && known) return known.data;
    const data = await this.#read(response);
    const etag = response.headers.get('ETag');
    // An answer that arrives after the sign-out is not kept.
    if (etag && conditional && token === this.#token) this.#keep(path, { etag, data });
    return data;
  }

  #keep(path, answer) {
    this.#known.delete(path);
    if (this.#known.size >= KNOWN_MAX) this.#known.delete(this.#known.keys().next().value);
    this.#known.set(path, answer);
  }

  /** A GET whose ETag the caller needs, for If-Match. */
  async getWithTag(path) {
    const response = await this.#ask('GET', path, {});
    return { data: await this.#read(response), etag: response.headers.get('ETag') };
  }

  async put(path, body, headers = {}) {
    const sent = { headers: { 'Content-Type': 'application/json', ...headers }, body: JSON.stringify(body) };
    return this.#read(await this.#ask('PUT', path, sent));
  }

  async post(path, body, headers = {}) {
    const sent = { headers: { 'Content-Type': 'application/json', ...headers }, body: JSON.stringify(body) };
    return this.#read(await this.#ask('POST', path, sent));
  }

  async delete(path, headers = {}) {
    return this.#read(await this.#ask('DELETE', path, { headers }));
  }

  /** The event stream's response, whatever its status; it stays open, so no time limit is set. */
  stream(path, lastId, signal) {
    const headers = { ...this.#authorization(), Accept: 'text/event-stream' };
    if (lastId) headers['Last-Event-ID'] = lastId;
    return fetch(`/api/v1${path}`, { headers, signal, cache: 'no-store', credentials: 'omit', redirect: 'error' });
  }

  #authorization() { return { Authorization: `Bearer ${this.#token}` }; }

  async #ask(method, path, { headers = {}, body }) {
    const wait = method !== 'GET' && /^\/(stack|trials)/.test(path) ? STACK_WAIT_MS : WAIT_MS;
    if (this.#free > 0) this.#free -= 1;
    else await new Promise((resolve) => this.#waiting.push(resolve));
    try {
      const response = await fetch(`/api/v1${path}`, {
        method,
        body,
        headers: { ...this.#authorization(), Accept: 'application/json, application/problem+json', ...headers },
        cache: 'no-store',
        credentials: 'omit',
        redirect: 'error',
        signal: AbortSignal.timeout(wait),
      });
      setClock(response);
      return response;
    } catch (error) {
      throw new Problem({
        title: 'No answer from the daemon',
        detail: error.name === 'TimeoutError' ? `no response within ${wait / 1000} seconds` : 'the connection failed',
        hint: 'is the daemon running, and is the port still forwarded?',
      });
    } finally {
      // The next waiting request takes this slot; without one it is free.
      const next = this.#waiting.shift();
      if (next) next();
      else this.#free += 1;
    }
  }

  async #read(response) {
    if (response.status === 204) return null;
    let data;
    try {
      data = await response.json();
    } catch {
      data = null;
    }
    if (response.ok && data !== null) return data;
    // The API's text on If-Match would not help in a dialog.
    if (response.status === 412) {
      data = {
        title: 'Changed meanwhile',
        detail: 'It was changed after this dialog was opened, so nothing was done.',
        hint: 'cancel, and check its present state',
      };
    }
    throw new Problem({
      type: data?.type,
      title: data?.title ?? `The daemon answered ${response.status}`,
      detail: data?.detail ?? '',
      hint: data?.hint ?? '',
      status: response.status,
    });
  }
}
