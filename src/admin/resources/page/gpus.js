// One tile for each GPU. A tile is created once and updated in place, so that focus, open details and selections
// stay as they are.

import * as changes from './changes.js';
import { badge, count, duration, el, gib, renew, setText, shortUuid, table, timeOf } from './dom.js';
import { grantedMiB, holderName } from './model.js';

/** Most holders that a tile names; the table has all. */
const HOLDERS_SHOWN = 4;
const HEALTH = { healthy: 'good', degraded: 'warn', unhealthy: 'bad', vanished: 'bad' };
const DRAIN = { cordoned: 'warn', draining: 'busy', drained: 'plain' };
/** Texts of the API's holder states. */
const LEAVING = {
  notKnown: 'pod not known yet',
  notShown: 'the API server does not list its pod',
  notAsked: 'not evicted',
  staticPod: 'blocker: a static pod cannot be evicted; take its file out of the kubelet’s manifests',
  asked: 'eviction requested',
  disruptionBudget: 'waits for its disruption budget',
  failed: 'eviction failed',
  terminating: 'terminating',
  over: 'its pod has ended',
};

export class Gpus {
  #api; #root; #found; #find; #changed;
  #tiles = new Map();

  constructor(api, { root, found, find, changed }) {
    this.#api = api;
    this.#root = root;
    this.#found = found;
    this.#find = find;
    this.#changed = changed;
    find.addEventListener('input', () => this.#filter());
  }

  show(gpus) {
    for (const [uuid, tile] of this.#tiles) {
      if (gpus.some((gpu) => gpu.uuid === uuid)) continue;
      tile.item.remove();
      this.#tiles.delete(uuid);
    }
    gpus.forEach((gpu, place) => {
      let tile = this.#tiles.get(gpu.uuid);
      if (!tile) {
        tile = new Tile(gpu, (change, opener) => this.#change(change, tile, opener));
        this.#tiles.set(gpu.uuid, tile);
      }
      tile.show(gpu);
      if (this.#root.children[place] !== tile.item) this.#root.insertBefore(tile.item, this.#root.children[place] ?? null);
    });
    this.#filter();
  }

  clear() {
    this.#tiles.clear();
    this.#root.replaceChildren();
    this.#find.value = '';
    setText(this.#found, '');
  }

  async #change(change, tile, opener) {
    const done = await changes[change](this.#api, tile.gpu);
    if (done) await this.#changed();
    // If the button is hidden in the new state, another one takes the focus.
    if (opener.hidden) tile.firstButton()?.focus();
  }

  #filter() {
    const words = this.#find.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const tile of this.#tiles.values()) {
      const fits = words.every((word) => tile.text.includes(word));
      tile.item.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    setText(this.#found, words.length ? `${shown} of ${count(this.#tiles.size, 'GPU')} match` : '');
  }
}

class Tile {
  constructor(gpu, change) {
    const id = `gpu-${gpu.uuid}`;
    this.badges = el('span', { class: 'badges' });
    this.title = el('h3', { id });
    this.model = el('p', { class: 'model' });
    this.notes = el('div', { class: 'notes' });
    this.used = el('span', { class: 'used' });
    this.granted = el('span', { class: 'granted' });
    this.memory = el('p', { class: 'memory' });
    this.uses = el('ul', { class: 'uses', 'aria-label': 'Resources' });
    this.holders = el('ul', { class: 'holders', 'aria-label': 'Holders' });
    this.summary = el('summary');
    this.devices = el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': `Devices of GPU ${gpu.index}` });
    this.details = el('details', { ontoggle: () => this.#showDevices() }, this.summary, this.devices);
    this.buttons = {};
    for (const [name, label] of [['cordon', 'Cordon…'], ['drain', 'Drain…'], ['uncordon', 'Uncordon…'],
      ['stopDrain', 'Stop drain…'], ['markHealthy', 'Mark healthy…']]) {
      this.buttons[name] = el('button', { type: 'button', 'aria-describedby': id, onclick: (e) => change(name, e.currentTarget) }, label);
    }
    this.item = el('li', { class: 'tile' }, el('article', { 'aria-labelledby': id },
      el('div', { class: 'tile-head' }, this.title, this.badges),
      this.model, this.notes,
      el('div', { class: 'bar', 'aria-hidden': 'true' }, this.granted, this.used),
      this.memory, this.uses, this.holders, this.details,
      el('div', { class: 'buttons' }, Object.values(this.buttons))));
  }

  firstButton() { return Object.values(this.buttons).find((button) => !button.hidden); }

  show(gpu) {
    this.gpu = gpu;
    const { health, drain } = gpu;
    const active = drain.state === 'active';
    setText(this.title, `GPU ${gpu.index}`);
    this.item.dataset.health = health.state;
    this.item.dataset.drain = drain.state;
    renew(this.badges, [health.state, drain.state], () => [
      badge(health.state, HEALTH[health.state] ?? 'plain'),
      !active && badge(drain.state, DRAIN[drain.state] ?? 'plain'),
    ].filter(Boolean));
    renew(this.model, [gpu.model, gpu.uuid, gpu.numaNode], () => [
      gpu.model, ' ', el('code', { title: gpu.uuid }, shortUuid(gpu.uuid)),
      ...(gpu.numaNode === undefined || gpu.numaNode === null ? [] : [el('span', { class: 'muted' }, ` NUMA ${gpu.numaNode}`)]),
    ]);
    renew(this.notes, [health.state, health.reason, drain, gpu.bypasses], () => notes(gpu));
    this.#showMemory(gpu);
    renew(this.uses, gpu.resources, () => gpu.resources.map((use) => el('li', {}, el('code', {}, use.resource), ' ',
      el('span', { class: 'whole' }, `${use.held} of ${use.devices} held, ${use.free} free`))));
    this.#showHolders(gpu);
    const devices = gpu.parts.reduce((sum, part) => sum + part.devices.length, 0);
    setText(this.summary, `Devices of GPU ${gpu.index} (${devices})`);
    this.#showDevices();
    const { cordon, drain: start, uncordon, stopDrain, markHealthy } = this.buttons;
    cordon.hidden = !active;
    start.hidden = !(active || drain.state === 'cordoned');
    uncordon.hidden = active;
    stopDrain.hidden = drain.state !== 'draining';
    markHealthy.hidden = !['unhealthy', 'degraded'].includes(health.state);
    this.text = [`gpu ${gpu.index}`, gpu.model, gpu.uuid, health.state, drain.state, drain.why,
      ...gpu.resources.map((r) => r.resource), ...gpu.allocations.map(holderName)].join(' ').toLowerCase();
  }

  #showMemory(gpu) {
    const granted = grantedMiB(gpu);
    const used = gpu.memoryUsedMiB ?? 0;
    const percent = (mib) => `${gpu.memoryMiB ? Math.min(100, (mib / gpu.memoryMiB) * 100) : 0}%`;
    this.used.style.width = percent(used);
    this.granted.style.width = percent(granted);
    const usage = gpu.memoryUsedMiB === undefined || gpu.memoryUsedMiB === null ? 'use not known' : `${gib(used)} GiB in use`;
    const total = gpu.memoryMiB ? `of ${gib(gpu.memoryMiB)} GiB` : 'of an unknown size';
    setText(this.memory, `${usage}, ${gib(granted)} granted, ${total}`);
    this.memory.title = `${used} MiB in use, ${granted} MiB granted, ${gpu.memoryMiB ?? 'unknown'} MiB in all`;
  }

  #showHolders(gpu) {
    const held = new Map();
    for (const allocation of gpu.allocations) {
      const key = `${holderName(allocation)}\n${allocation.resource}`;
      const here = allocation.devices.filter((id) => deviceIsOf(gpu, allocation.resource, id)).length;
      held.set(key, (held.get(key) ?? 0) + here);
    }
    const all = [...held];
    renew(this.holders, all, () => {
      const shown = all.slice(0, HOLDERS_SHOWN).map(([key, n]) => {
        const [name, resource] = key.split('\n');
        return el('li', {}, el('span', { class: 'who' }, name), el('span', { class: 'muted' }, ` ${n} × ${resource}`));
      });
      if (all.length > HOLDERS_SHOWN) shown.push(el('li', { class: 'muted' }, `and ${all.length - HOLDERS_SHOWN} more, in the table below`));
      if (all.length === 0) shown.push(el('li', { class: 'muted' }, 'no allocations'));
      return shown;
    });
  }

  /** Built only while it is open: a node may have a thousand devices. */
  #showDevices() {
    if (!this.details.open || !this.gpu) return;
    const { gpu } = this;
    const byId = new Map(gpu.allocations.map((a) => [a.id, a]));
    const rows = gpu.parts.flatMap((part) => part.devices.map((device) => ({
      device, part: part.mig?.profile ?? '', who: device.allocations.map((id) => (byId.has(id) ? holderName(byId.get(id)) : `allocation ${id}`)).join(', '),
    })));
    const order = { held: 0, leaving: 1, free: 2, withdrawn: 3 };
    rows.sort((a, b) => (order[a.device.state] ?? 9) - (order[b.device.state] ?? 9));
    renew(this.devices, rows, () => [
      el('p', { class: 'muted uuid' }, gpu.uuid),
      table(`Devices of GPU ${gpu.index}`, ['Device', 'State and holder'],
        rows.map(({ device, part, who }) => [
          [el('code', {}, device.resource), el('br'),
            el('span', { class: 'muted', title: device.id }, deviceName(device.id), part ? ` (${part})` : '')],
          [badge(device.state, { held: 'busy', free: 'good', withdrawn: 'plain', leaving: 'warn' }[device.state] ?? 'plain'),
            who && el('div', {}, who)].filter(Boolean),
        ]), 'stacked'),
    ]);
  }
}

/** Shares are named by their number, `::3`: the UUID stands above the table. */
function deviceName(id) {
  const share = id.indexOf('::');
  return share < 0 ? shortUuid(id) : `share ${id.slice(share + 2)}`;
}

function deviceIsOf(gpu, resource, id) {
  return gpu.parts.some((part) => part.devices.some((d) => d.id === id && d.resource === resource));
}

function notes(gpu) {
  const { health, drain } = gpu;
  const lines = [];
  if (health.state !== 'healthy') {
    lines.push(el('p', { class: 'note bad' }, health.reason || `it is ${health.state}`, ' ', el('span', { class: 'muted' }, 'since ', timeOf(health.since))));
  }
  if (gpu.bypasses > 0) {
    lines.push(el('p', { class: 'note warn' }, `${count(gpu.bypasses, 'process uses', 'processes use')} it without an allocation`));
  }
  if (drain.state !== 'active') {
    lines.push(el('p', { class: 'note' }, `${drain.state} by ${drain.by ?? 'an unknown caller'}`, drain.why ? `: ${drain.why}` : '', ' ',
      drain.since && el('span', { class: 'muted' }, 'since ', timeOf(drain.since))));
  }
  if (drain.progress && drain.state === 'draining') lines.push(...progress(drain.progress));
  return lines;
}

function progress(of) {
  const words = [`${count(of.allocations.length, 'allocation')} left`];
  if (of.processes !== undefined && of.processes !== null) words.push(count(of.processes, 'process', 'processes'));
  if (of.late) words.push('late');
  else if (of.secondsLeft !== undefined && of.secondsLeft !== null) words.push(`${duration(of.secondsLeft)} until its deadline`);
  words.push(of.evict ? 'its pods are evicted' : 'no pod is evicted');
  const lines = [el('p', { class: 'note busy' }, words.join(', '))];
  if (of.warning) lines.push(el('p', { class: 'note warn' }, of.warning));
  if (of.holders.length > 0) {
    lines.push(el('ul', { class: 'leaving', 'aria-label': 'Remaining holders' }, of.holders.slice(0, HOLDERS_SHOWN).map((holder) => el('li', {},
      el('span', { class: 'who' }, holder.pod ? `${holder.namespace}/${holder.pod}` : 'pod not known yet'),
      `: ${LEAVING[holder.state] ?? holder.state}${holder.message ? `: ${holder.message}` : ''}${holder.comesBack ? ' (its DaemonSet creates it again)' : ''}`)),
    of.holders.length > HOLDERS_SHOWN && el('li', { class: 'muted' }, `and ${of.holders.length - HOLDERS_SHOWN} more`)));
  }
  return lines;
}
