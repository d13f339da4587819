// Since when the daemon records events and readings: it keeps them in memory, so that its start begins them.

import { now } from './clock.js';
import { el, time, timeOf } from './dom.js';
import { RANGES_MS } from './route.js';

/** When the daemon started, milliseconds; undefined for an older daemon, which does not say it. */
export const startOf = (node) => (node.startedAt ? Date.parse(node.startedAt) : undefined);

/** Whether the daemon started within a time range, so that its record does not cover the whole range. */
const isShort = (node, last) => startOf(node) > now() - RANGES_MS[last];

/** ` (recorded since 14:02:11)` where the record does not cover the time range. */
export const sinceText = (node, last) => (isShort(node, last) ? ` (recorded since ${time(node.startedAt)})` : '');

/** A note where the record does not cover the time range. */
export const recordedSince = (node, last) => isShort(node, last) && el('p', { class: 'muted' }, 'Recorded since the daemon started at ', timeOf(node.startedAt), '; what was before is not kept.');
