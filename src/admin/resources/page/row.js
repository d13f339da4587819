// One GPU as a row of the table or as a tile. It is created once and updated in place, so that focus and selections stay
// as they are.

import { age, badge, button, count, countdown, el, renew, setText } from './dom.js';
import { MemoryBar, showShares, sparkline } from './gauges.js';
import { openMenu } from './menu.js';
import { podsOn } from './model.js';
import { sinceText, startOf } from './record.js';
import { KINDS, colourOf, drainLeft, errorOf, givenUp, isMoving, overOn, scheduling, searchTextOf, since, summed, usageOn, usageText, viaText } from './words.js';

/** Pods that a tile names; the drawer has all. */
const TILE_PODS = 4;

/** The columns of the table; a tile has the same parts. */
export const COLUMNS = ['Select', 'GPU', 'State', 'Memory used / granted / total, GiB', 'Shares', 'Top pod', 'Utilisation, 1 h', 'Since', 'Actions'];

export class Row {
  /** `on` has the callbacks `open(gpu)`, `pod(key)`, `select()` and `actions(gpu)`, which gives the items of the menu. */
  constructor(gpu, tiles, on) {
    this.tiles = tiles;
    this.on = on;
    this.check = el('input', { type: 'checkbox', onchange: () => on.select() });
    this.open = button('', () => on.open(this.gpu), { kind: 'open' });
    this.state = el('div', { class: 'state' });
    this.memory = new MemoryBar(!tiles);
    this.shares = el('div', { class: 'shares-box' });
    this.pods = el('div', { class: 'top-pods' });
    this.hour = el('div', { class: 'hour' });
    this.since = el('time', { class: 'since age' });
    this.menu = button('⋯', () => openMenu(this.menu, this.menu.getAttribute('aria-label'), on.actions(this.gpu)), { kind: 'more' });
    this.menu.setAttribute('aria-haspopup', 'menu');
    this.menu.setAttribute('aria-expanded', 'false');
    const parts = [this.check, this.open, this.state, this.memory.root, this.shares, this.pods, this.hour, this.since, this.menu];
    this.root = tiles
      ? el('li', { class: 'tile' }, el('article', {}, el('div', { class: 'tile-head' }, this.check, this.open, this.since, this.menu),
        this.state, this.memory.root, this.shares, this.pods, this.hour))
      : el('tr', { role: 'row' }, parts.map((part, i) => el('td', { role: 'cell', class: `c${i}` }, part)));
    this.root.dataset.gpu = gpu.uuid;
  }

  /** `finds` is the test for what is searched: pods that it finds are named first. */
  show(gpu, selected, finds) {
    this.gpu = gpu;
    this.#name(gpu.name);
    this.text = searchTextOf(gpu);
    this.root.dataset.health = gpu.health.state;
    this.root.dataset.drain = scheduling(gpu);
    this.root.classList.toggle('current', selected);
    renew(this.state, stateSign(gpu), () => stateOf(gpu));
    this.memory.show(gpu);
    showShares(this.shares, gpu);
    const all = podsOn(gpu);
    const found = all.filter((pod) => finds(pod.key.toLowerCase()));
    const pods = [...found, ...all.filter((pod) => !found.includes(pod))];
    renew(this.pods, pods.map((pod) => [pod.key, pod.devices]), () => this.#pods(pods));
    this.since.dateTime = since(gpu);
    this.since.title = `since ${since(gpu)}`;
    setText(this.since, age(since(gpu)));
    this.#showNow();
  }

  /** Sets the names after the index, which the driver may change. */
  #name(name) {
    setText(this.open, name);
    (this.tiles ? this.root.firstElementChild : this.root).setAttribute('aria-label', name);
    this.check.setAttribute('aria-label', `Select ${name}`);
    this.menu.setAttribute('aria-label', `Actions for ${name}`);
  }

  /** The line of the last hour, and the present value beside it. `node` says since when there are readings. */
  showHour(items, node) {
    this.hourKey = items && items.some((item) => item.utilizationPercent !== undefined) ? 'utilizationPercent' : 'memoryUsedMiB';
    const busy = this.hourKey === 'utilizationPercent';
    const since = sinceText(node, '1h');
    renew(this.hour, [items?.at(-1)?.at, items?.length, busy, since], () => {
      if (!items?.length) return [];
      const points = items.filter((item) => item[this.hourKey] !== undefined).map((item) => [Date.parse(item.at), item[this.hourKey]]);
      const known = points.map(([, value]) => value);
      if (known.length === 0) return [];
      const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
      const text = busy ? `utilisation in the last hour: ${Math.round(mean)} % on average, at most ${Math.max(...known)} %`
        : `memory in use in the last hour: ${Math.round(mean / 1024)} GiB on average`;
      this.now = el('span', { class: 'now' });
      return [sparkline(points, busy ? 100 : this.gpu.memoryMiB, text + since, startOf(node)), this.now];
    });
    this.#showNow();
  }

  #showNow() {
    if (!this.now?.isConnected) return;
    const { utilizationPercent: busy } = this.gpu;
    setText(this.now, this.hourKey === 'utilizationPercent' && busy !== undefined ? `${busy} %` : this.hourKey === 'memoryUsedMiB' ? 'memory' : '');
  }

  #pods(pods) {
    if (pods.length === 0) return el('span', { class: 'muted' }, 'none');
    const shown = pods.slice(0, this.tiles ? TILE_PODS : 1).map((pod) => podButton(pod, this.on.pod));
    const more = pods.length - shown.length;
    return [...shown, more > 0 && el('span', { class: 'muted more-pods', title: `${count(more, 'other pod')}` }, `+${more}`)].filter(Boolean);
  }
}

/** A pod with the colour of its namespace; opens its drawer. */
export function podButton({ key, namespace, pod }, open) {
  return button(el('span', { class: 'cut' }, el('i', { class: `dot ${colourOf(namespace)}` }), pod ? key : 'pod not known yet'), () => open(key), { kind: 'link', name: pod ? `Pod ${key}` : 'Pod not known yet' });
}

/** What `stateOf` shows. */
export const stateSign = (gpu) => [gpu.health.state, gpu.health.reason, gpu.drain, gpu.via, gpu.bypasses, overOn(gpu).length];

/** Badges for what is not as usual, and why. */
export function stateOf(gpu) {
  const { health, drain } = gpu;
  const state = scheduling(gpu);
  const gaveUp = givenUp(drain);
  const shown = [];
  if (health.state !== 'healthy' || state === 'open') shown.push(badge(health.state, KINDS[health.state] ?? 'plain'));
  if (state !== 'open') shown.push(badge(state, KINDS[state] ?? 'plain'));
  const error = health.state !== 'healthy' && errorOf(gpu) !== health.state && errorOf(gpu);
  const order = progressText(drain) || (state !== 'open' && (gaveUp ? ['drain given up', gaveUp.why].filter(Boolean).join('; ') : drain.why));
  const via = viaText(gpu);
  if (via) shown.push(badge(via, isMoving(gpu) ? 'busy' : 'plain'));
  const wait = gpu.via?.waitsFor;
  const why = [error, error && order && '; ', order, (error || order) && wait && '; ', wait].flat().filter(Boolean);
  if (gpu.bypasses > 0) shown.push(badge(count(gpu.bypasses, 'bypass', 'bypasses'), 'warn'));
  const over = overOn(gpu).length;
  if (over > 0) shown.push(badge(over === 1 ? 'over its share' : `${over} over their shares`, 'warn'));
  return [...shown, why.length > 0 && el('span', { class: 'reason', title: [health.reason, drain.why].filter(Boolean).join('; ') }, why)].filter(Boolean);
}

function progressText({ state, progress }) {
  if (state !== 'draining' || !progress) return '';
  const left = drainLeft(progress);
  if (progress.late) return `late: ${left}`;
  return progress.until === undefined ? left : [`${left}, `, countdown(progress.until), ' to the deadline'];
}

/** A button that opens the GPU's drawer. */
export function gpuButton(gpu, route) {
  return gpu ? button(gpu.name, () => route.set({ gpu: gpu.uuid, pod: '' }), { kind: 'link' }) : '?';
}

/**
 * Memory used and the limit of an allocation on these GPUs, GiB, as text and for display. An allocation of several GPUs has
 * a limit on each: those on which it uses more are named.
 */
export function usageOf(allocation, gpus) {
  const on = gpus.map((gpu) => ({ gpu, ...usageOn(allocation, gpu) }));
  const parts = new Set(gpus.flatMap((gpu) => gpu.parts.map((part) => part.uuid)));
  const text = usageText(summed(allocation.uses.filter((use) => parts.has(use.part))));
  const over = on.filter((one) => one.over).map((one) => (gpus.length === 1 ? 'over its share' : `over its share of GPU ${one.gpu.index}: ${usageText(one)}`));
  return { text: [text, ...over].join(', '), numbers: text, badges: over.map((one) => [' ', badge(one, 'warn')]).flat() };
}
