// Elements and texts. Data of policies and pods is only ever set as text.

import { now } from './clock.js';

/** Characters that change the order of a text or begin a line: a name or a reason with one could be shown as another text. */
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** A text with these characters as escapes: `\u{202e}`. */
export const visible = (text) => String(text).replace(INVISIBLE, (found) => `\\u{${found.codePointAt(0).toString(16)}}`);

const shown = (child) => (typeof child === 'string' ? visible(child) : child);
/** A field has its value as it is, since that is what is sent. */
const attribute = (name, value) => (name === 'value' ? String(value) : visible(value));

/** An element; `props` are attributes, `on…` listeners, and `class`. Strings become text nodes. */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? '' : attribute(name, value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false).map(shown));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** An element of SVG; `props` are its attributes. */
export function svg(tag, props = {}, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, attribute(name, value));
  made.append(...children.flat().map(shown));
  return made;
}

/**
 * A button. `why` is the reason why it cannot be used, if there is one: it stays focusable, so that the reason can be
 * read, and does nothing. `data-change` marks those that change something, for `guardChanges`.
 */
export function button(label, onclick, { change = false, why, kind, name, pressed } = {}) {
  const not = why || (change && document.body.dataset.why);
  return el('button', { type: 'button', class: kind, onclick, 'data-change': change, 'data-why': why, 'aria-label': name, 'aria-pressed': pressed,
    'aria-disabled': not ? 'true' : undefined, title: not }, label);
}

/** Sets a text only if it changed, so that selections and screen readers are not disturbed. */
export function setText(node, text) {
  const safe = visible(text);
  if (node.textContent !== safe) node.textContent = safe;
}

const FOCUSABLE = 'a[href], button, input, select, textarea, summary, [tabindex]';

/**
 * Replaces the children if `sign` differs from that of the last call. The focus stays on the control with the same label, or
 * else on the one at the same index. Returns whether they were replaced.
 */
export function renew(node, sign, make) {
  const text = JSON.stringify(sign);
  if (node.berthSign === text) return false;
  node.berthSign = text;
  const focused = node.contains(document.activeElement) ? document.activeElement : undefined;
  const index = focused && [...node.querySelectorAll(FOCUSABLE)].indexOf(focused);
  node.replaceChildren(...[make()].flat().filter(Boolean).map(shown));
  if (focused) {
    const controls = [...node.querySelectorAll(FOCUSABLE)];
    const label = (control) => control.getAttribute('aria-label') ?? control.firstChild?.textContent;
    (controls.find((control) => label(control) === label(focused)) ?? controls[Math.min(index, controls.length - 1)])?.focus({ preventScroll: true });
  }
  return true;
}

/**
 * A table with a caption. Its roles are written out, because on a phone its rows are shown as blocks,
 * after which screen readers would no longer recognize a table.
 */
export function table(caption, heads, rows, kind = '') {
  const head = el('tr', { role: 'row' }, heads.map((h) => el('th', { role: 'columnheader', scope: 'col' }, h || el('span', { class: 'unseen' }, 'Actions'))));
  const body = rows.map((cells) => el('tr', { role: 'row' }, cells.map((cell, column) =>
    el('td', { role: 'cell', 'data-label': heads[column], 'data-empty': cell === '–' || cell === '' }, el('div', {}, ...[cell].flat())))));
  return el('table', { role: 'table', class: kind },
    el('caption', {}, caption),
    el('thead', { role: 'rowgroup' }, head),
    el('tbody', { role: 'rowgroup' }, body));
}

/** A state as a keyword with a shape of its own: colour is never the only sign. */
export function badge(text, kind) {
  const shapes = { good: '●', warn: '▲', bad: '■', busy: '◆', plain: '○' };
  return el('span', { class: `badge ${kind}` }, el('span', { 'aria-hidden': 'true' }, `${shapes[kind] ?? '○'} `), el('span', { class: 'state-word' }, text));
}

export const number = (n) => n.toLocaleString('en');
export const gib = (mib) => (mib / 1024).toLocaleString('en', { maximumFractionDigits: 1 });
export const count = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;

/** `2026-02-03`, in the same time zone as the time beside it. */
const day = (at) => [at.getFullYear(), at.getMonth() + 1, at.getDate()].map((part) => String(part).padStart(2, '0')).join('-');

/** `14:02:11`, with the day where it is another one. */
export function time(text) {
  const at = new Date(text);
  if (Number.isNaN(at.getTime())) return text;
  const clock = at.toLocaleTimeString('en-GB');
  return at.toDateString() === new Date(now()).toDateString() ? clock : `${day(at)} ${clock}`;
}

/** The time zone of the times that are shown: `UTC+5:30`. */
export function zone() {
  const minutes = -new Date().getTimezoneOffset();
  const of = Math.abs(minutes);
  if (of === 0) return 'UTC';
  return `UTC${minutes < 0 ? '−' : '+'}${Math.floor(of / 60)}${of % 60 ? `:${String(of % 60).padStart(2, '0')}` : ''}`;
}

export const timeOf = (text) => el('time', { datetime: text, title: text }, time(text));

/** `1d 2h`, `9m 58s`: two units at most. */
export function duration(seconds) {
  const units = [['d', 86400], ['h', 3600], ['m', 60], ['s', 1]];
  const parts = [];
  let left = Math.max(0, Math.floor(seconds));
  for (const [unit, size] of units) {
    const n = Math.floor(left / size);
    if (n > 0) parts.push(`${n}${unit}`);
    left -= n * size;
  }
  return parts.slice(0, 2).join(' ') || '0s';
}

/** The time since then in one unit: `40s`, `3m`, `2h`, `5d`. */
export function age(text) {
  const seconds = Math.max(0, (now() - Date.parse(text)) / 1000);
  if (!(seconds >= 0)) return '';
  return seconds < 60 ? `${Math.floor(seconds)}s` : duration(seconds).split(' ')[0];
}
export const ageOf = (text) => el('time', { class: 'age', datetime: text, title: text }, age(text));

/** The time until a deadline: `9m 58s`. `until` is in milliseconds, on the daemon's clock. */
export const countdown = (until) => el('span', { class: 'countdown', 'aria-live': 'off', 'data-until': until }, duration((until - now()) / 1000));

/** Moves the ages and countdowns that are shown; called each second. */
export function tick() {
  for (const one of document.querySelectorAll('time.age')) setText(one, age(one.dateTime));
  for (const one of document.querySelectorAll('.countdown')) setText(one, duration((Number(one.dataset.until) - now()) / 1000));
}

export const shortUuid = (uuid) => (uuid.length > 13 ? `${uuid.slice(0, 12)}…` : uuid);
export const shortDigest = (digest) => digest.slice(0, 12);
