// The words and colours of states, the error of a GPU, and what a search finds.

import { count, gib } from './dom.js';

/** Kinds of badge by state. */
export const KINDS = {
  healthy: 'good', degraded: 'warn', unhealthy: 'bad', vanished: 'bad',
  open: 'plain', cordoned: 'warn', draining: 'busy', drained: 'plain', excluded: 'plain',
};
/** What the states of a filter mean, in the order of their chips. */
export const STATES = {
  attention: 'Need attention', vanished: 'Vanished', unhealthy: 'Unhealthy', degraded: 'Degraded', draining: 'Draining',
  cordoned: 'Cordoned', drained: 'Drained', over: 'Over its share', healthy: 'Healthy', open: 'Open', idle: 'Idle',
};
/** Reasons as the daemon and the driver write them, and as the status line words them. */
const REASONS = [
  [/f[ae]ll(en)? off the bus|XID 79\b/i, 'fell off the bus'],
  [/needs? a reset|recovery|XID (95|64)\b/i, 'needs a reset'],
  [/does not answer|no answer|hangs?\b|timed? ?out/i, 'does not answer'],
  [/released/i, 'is without its driver, which was released'],
];
const REASON_MAX = 48;

/** A sentence of GPUs and their error, as `errorOf` gives it: after a colon where it has no verb. */
export function describeError(indices, error) {
  const verb = REASONS.some(([, words]) => words === error) || /^(vanished|is|has|cannot)\b/.test(error);
  const gpus = `${indices.length === 1 ? 'GPU' : 'GPUs'} ${listed(indices)}`;
  if (!verb) return `${gpus}: ${error}`;
  return `${gpus} ${indices.length === 1 ? error : error.replace(/^needs/, 'need').replace(/^does/, 'do').replace(/^is /, 'are ').replace(/^has/, 'have').replace(/\bits\b/, 'their')}`;
}

/** Whether new pods may get it: the API's `active` is called open, since it is not about work. */
export const scheduling = (gpu) => (gpu.excluded ? 'excluded' : gpu.drain.state === 'active' ? 'open' : gpu.drain.state);

/** The API of the kubelet through which a GPU is granted, or its move to the other one; empty for a GPU of the device plugin. */
export const viaText = ({ via }) => ({ dra: 'DRA', toDra: 'moving to DRA', toDevicePlugin: 'moving to the device plugin' }[via?.state] ?? '');

/** Whether a GPU is to be granted through the other API. */
export const isMoving = ({ via }) => ['toDra', 'toDevicePlugin'].includes(via?.state);

/** The mark of a drain that was given up at its deadline, if there is one. */
export const givenUp = (drain) => drain.marks.find((mark) => mark.expired);

/** One owner's cordon or drain. */
export const markText = ({ kind, owner, object, why }) => `${kind} by ${object ?? owner}${why ? `: ${why}` : ''}`;

/** The reason of a bad state in a few words; empty for a GPU that works. */
export function errorOf(gpu) {
  const { state, reason = '' } = gpu.health;
  if (state === 'vanished') return 'vanished';
  if (state === 'unhealthy' || state === 'degraded') {
    const known = REASONS.find(([pattern]) => pattern.test(reason));
    if (known) return known[1];
    const text = reason || state;
    return text.length > REASON_MAX ? `${text.slice(0, REASON_MAX - 1)}…` : text;
  }
  if (givenUp(gpu.drain)) return 'has given up its drain';
  const progress = gpu.drain.progress;
  if (progress?.late) return 'is past its drain deadline';
  if (progress?.holders.some((holder) => holder.state === 'staticPod')) return 'cannot finish its drain: a static pod blocks it';
  return '';
}

/** The order of the table: those that need attention first. */
export function rank(gpu) {
  if (['vanished', 'unhealthy'].includes(gpu.health.state)) return 0;
  if (errorOf(gpu)) return 1;
  if (gpu.bypasses > 0 || overOn(gpu).length > 0) return 2;
  return { draining: 3, cordoned: 4, drained: 5 }[gpu.drain.state] ?? 6;
}

export const badFirst = (a, b) => rank(a) - rank(b) || a.index - b.index;

/** Whether new pods can get a GPU. */
const isOpen = (gpu) => scheduling(gpu) === 'open' && ['healthy', 'degraded'].includes(gpu.health.state);

/** All states of STATES that a GPU is in: idle only where a new pod can get it, since no other one lacks work. */
export function statesOf(gpu) {
  return [errorOf(gpu) && 'attention', gpu.health.state, scheduling(gpu) !== 'open' ? scheduling(gpu) : isOpen(gpu) && 'open',
    overOn(gpu).length > 0 && 'over', isOpen(gpu) && gpu.resources.every((use) => use.held === 0) && 'idle'].filter(Boolean);
}

/** The use of an allocation on a GPU and its MIG instances, MiB; a value is undefined where a part of it is not known. */
export function usageOn(allocation, gpu) {
  const parts = new Set(gpu.parts.map((part) => part.uuid));
  return summed(allocation.uses.filter((use) => parts.has(use.part)));
}

/** The sum of uses. */
export function summed(uses) {
  const sum = (key) => (uses.length > 0 && uses.every((use) => use[key] !== undefined) ? uses.reduce((total, use) => total + use[key], 0) : undefined);
  return { used: sum('memoryUsedMiB'), limit: sum('memoryLimitMiB'), over: uses.some((use) => use.overLimit) };
}

/** `12.7 / 8`: memory used and its limit, GiB. */
export const usageText = ({ used, limit }) => `${used === undefined ? '?' : gib(used)} / ${limit === undefined ? 'none' : gib(limit)}`;

/** The allocations that use more memory of a GPU than their share of it: `{allocation, used, limit}`. */
export const overOn = (gpu) => gpu.allocations.map((allocation) => ({ allocation, ...usageOn(allocation, gpu) })).filter(({ over }) => over);

/** What a drain still waits for. */
export function drainLeft({ allocations, processes }) {
  if (allocations.length > 0) return `${count(allocations.length, 'allocation')} left`;
  if (processes > 0) return `no pod left; waiting for ${count(processes, 'process', 'processes')} to exit`;
  return processes === undefined ? 'no pod left; waiting for a minute, since processes cannot be seen' : 'no pod left; waiting until no process was seen for 10 s';
}

/** The start of the state that the table shows. */
export const since = (gpu) => (gpu.health.state === 'healthy' && gpu.drain.state !== 'active' && gpu.drain.since) || gpu.health.since;

/** The text in which a search finds a GPU. */
export function searchTextOf(gpu) {
  const states = statesOf(gpu);
  if (states.includes('vanished') || errorOf(gpu) === 'fell off the bus') states.push('lost');
  if (gpu.resources.some((use) => use.free > 0)) states.push('free');
  if (states.includes('over')) states.push('its share');
  return [`gpu${gpu.index}`, gpu.model, gpu.uuid, ...states, gpu.health.reason, errorOf(gpu), gpu.drain.why, gpu.drain.by, viaText(gpu),
    ...gpu.resources.map((use) => use.resource), ...gpu.allocations.map((a) => `${a.holder?.namespace}/${a.holder?.pod} ${a.claim?.name ?? ''}`)].join(' ').toLowerCase();
}

/**
 * A test of texts for what is searched: each word must begin a word of the text, so that `healthy` does not find
 * `unhealthy`. `gpu 3`, and a number alone, mean the index.
 */
export function search(query) {
  const tests = testsOf(query);
  return (text) => tests.every((test) => test.test(text));
}

/** A test of whether any word of what is searched is in a text. */
export function searchAny(query) {
  const tests = testsOf(query);
  return (text) => tests.some((test) => test.test(text));
}

function testsOf(query) {
  const words = query.toLowerCase().replace(/\bgpu\s+(?=\d)/g, 'gpu').split(/\s+/).filter(Boolean);
  return words.map((word) => (/^(gpu)?\d{1,2}$/.test(word) ? new RegExp(`\\bgpu ?${word.replace('gpu', '')}\\b`)
    : new RegExp(`(^|[^a-z0-9])${word.replace(/[^a-z0-9]/g, '\\$&')}`)));
}

/** `3, 5 and 12`. */
export const listed = (items) => (items.length < 2 ? items.join('') : `${items.slice(0, -1).join(', ')} and ${items.at(-1)}`);

/** Colours of namespaces in page.css. */
const COLOURS = 16;

/** The class of a namespace's colour: the same in each view, tab and browser. */
export const colourOf = (namespace) => (namespace ? `ns-${placeOf(namespace, COLOURS)}` : 'ns-none');

/** A number from 0 to below `places`, which follows from the name alone. */
export function placeOf(name, places) {
  // FNV-1a, and a step that mixes its bits: names often differ in their last letter only.
  let hash = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(name)) hash = Math.imul(hash ^ byte, 0x01000193);
  hash = Math.imul(hash ^ (hash >>> 16), 0x45d9f3b);
  return ((hash ^ (hash >>> 16)) >>> 0) % places;
}

/** What holds a container to its limits. */
export const enforcerOf = ({ enforcedBy }) => (enforcedBy === 'none' ? 'nothing' : enforcedBy);

/** Whether a container can remove the memory limits that it is held to. */
export const canRemove = ({ enforcedBy, privileged }) => !!privileged && enforcedBy === 'memoryLimits';
