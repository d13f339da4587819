// One GPU: what it is and does, who holds it, its processes, its past, and its links.

import { problemNote } from './dialog.js';
import { ageOf, badge, button, count, el, gib, number, renew, setText, shortUuid, table, time, timeOf } from './dom.js';
import { progressOf } from './drain.js';
import { MemoryBar, showShares } from './gauges.js';
import { graph, rangeButtons } from './graph.js';
import { recordedSince, sinceText, startOf } from './record.js';
import { longLink } from './links.js';
import { DRIVER_MIB, devicesOf, holderName, podsOn } from './model.js';
import { podButton, stateOf, stateSign, usageOf } from './row.js';
import { opened, whyHere } from './why-here.js';
import { KINDS, markText, scheduling } from './words.js';

/** Events of this GPU that are shown. */
const EVENTS = 12;
const NO_HISTORY = 'No history: this daemon keeps none, or you may not read it.';

export const section = (title, ...content) => el('section', {}, el('h3', {}, title), ...content);

export class GpuDrawer {
  #context; #uuid;
  #title = el('h2', { id: 'drawer-title', tabindex: -1 });
  #state = el('div', { class: 'state' });
  #actions = el('div', { class: 'buttons' });
  #facts = el('div', {});
  #memory = new MemoryBar();
  #shares = el('div', { class: 'shares-box' });
  #graphs = el('div', {});
  #holders = el('div', {});
  #processes = el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'Processes' });
  #history = el('div', {});
  #devices = el('details', { ontoggle: () => this.#showDevices() });
  #links = el('div', {});
  #gpu;

  constructor(context, uuid) {
    this.#context = context;
    this.#uuid = uuid;
    this.head = el('div', {}, this.#title, this.#state);
    this.body = el('div', { class: 'drawer-body' }, this.#actions,
      section('Overview', this.#memory.root, this.#shares, this.#facts), section('Holders', this.#holders),
      section('Load', this.#graphs), section('Processes', this.#processes),
      section('History', this.#history), section('Devices', this.#devices), section('Links to other GPUs', this.#links));
  }

  async show(state) {
    const gpu = state.gpu.get(this.#uuid);
    this.#gpu = gpu;
    this.body.hidden = !gpu;
    if (!gpu) {
      setText(this.#title, 'GPU not found');
      renew(this.#state, this.#uuid, () => el('p', {}, `This node has no GPU ${this.#uuid}. It may have been forgotten, or it is of another node.`));
      return;
    }
    setText(this.#title, gpu.name);
    renew(this.#state, stateSign(gpu), () => stateOf(gpu));
    const actions = this.#context.actions(gpu).slice(1);
    renew(this.#actions, actions, () => [...actions.map(([label, act, why]) => button(label, act, { change: !label.startsWith('Progress'), why })),
      button('Copy link', () => navigator.clipboard?.writeText(location.href))]);
    this.#memory.show(gpu);
    showShares(this.#shares, gpu);
    const { memoryUsedMiB, processes, bypasses, resources, ...steady } = gpu;
    renew(this.#facts, [steady.health, steady.drain, steady.via, gpu.utilizationPercent, gpu.temperatureCelsius, gpu.powerWatts, gpu.allocations.length], () => facts(gpu));
    const pods = podsOn(gpu);
    renew(this.#holders, pods.map((pod) => [pod.key, pod.devices, [...pod.allocations].map((a) => [a.id, usageOf(a, [gpu]).text])]).concat(gib(unexplained(gpu, pods))), () => this.#showHolders(pods));
    this.#showDevices();
    renew(this.#links, (gpu.links ?? []).map((link) => [link, state.gpu.get(link.gpu)?.index]), () => links(gpu, state, this.#context.route));
    await Promise.all([this.#showProcesses(), this.#showPast(state)]);
  }

  #showHolders(pods) {
    const left = unexplained(this.#gpu, pods);
    const others = left > 0 && el('p', { class: 'note warn' }, `${gib(left)} GiB belong to no known pod`);
    if (pods.length === 0) return [el('p', { class: 'muted' }, 'No pod holds a device of it.'), others];
    const { api, route } = this.#context;
    return [el('ul', { class: 'holders', 'aria-label': 'Pods with devices of this GPU' }, pods.map((pod) => {
      const [first] = pod.allocations;
      const box = el('div', { class: 'wide' }, first && opened(first.id));
      return el('li', {}, podButton(pod, (key) => route.set({ pod: key, gpu: '' })), first && whyHere(api, first.id, box, pod.key),
        el('p', { class: 'wide muted' }, `${pod.devices} × ${pod.resource}`, [...pod.allocations].flatMap((a) => {
          const usage = usageOf(a, [this.#gpu]);
          const container = pod.allocations.size > 1 ? `${a.holder?.container ?? a.id}: ` : '';
          return [`, ${container}memory used / limit ${usage.numbers} GiB`, ...usage.badges];
        }), first && ', for ', first && ageOf(first.grantedAt)), box);
    })), others];
  }

  async #showProcesses() {
    const list = await this.#context.api.get(`/gpus/${encodeURIComponent(this.#uuid)}/processes`, { conditional: false }).catch((problem) => ({ problem }));
    renew(this.#processes, list.problem?.detail ?? list, () => {
      if (list.problem) return problemNote(list.problem);
      if (list.items.length === 0) return el('p', { class: 'muted' }, list.sight.why ?? 'No process is on it.');
      return table('Processes on this GPU', ['Process', 'Pod', 'Memory, GiB', 'Allowed by'], list.items.map((p) => [
        `${p.name ?? ''} ${p.pid}`, p.pod ? [p.pod.namespace, p.pod.name ?? p.pod.uid].filter(Boolean).join('/') : '–',
        p.memoryMiB === undefined ? '–' : gib(p.memoryMiB), [badge(p.right, p.right === 'bypass' ? 'bad' : 'plain'), p.reason && el('span', { class: 'muted' }, ` ${p.reason}`)]]), 'stacked');
    });
  }

  async #showPast(state) {
    const { past, route } = this.#context;
    const last = route.get('last');
    const failed = (problem) => ({ problem });
    const [data, events] = await Promise.all([past.graph(this.#uuid, last).catch(failed), past.events().catch(failed)]);
    const gpu = state.gpu.get(this.#uuid);
    renew(this.#graphs, [last, data?.problem?.detail, data?.items?.length, data?.items?.at(-1)?.at, sinceText(state.node, last)], () => {
      if (data?.problem) return [rangeButtons(route), problemNote(data.problem)];
      return data ? [rangeButtons(route), recordedSince(state.node, last), ...graphs(data, gpu, { last, start: startOf(state.node) })] : el('p', { class: 'muted' }, NO_HISTORY);
    });
    const all = (events?.problem ? [] : events ?? []).filter((event) => event.gpu === this.#uuid);
    const mine = all.slice(0, EVENTS);
    renew(this.#history, [gpu.health, all.length, mine.map((event) => event.at), events?.problem?.detail, sinceText(state.node, '24h')], () => [
      events?.problem && problemNote(events.problem),
      table('Health, newest first', ['Since', 'State', 'Reason'], [gpu.health, ...gpu.health.history.toReversed()].map((turn) =>
        [timeOf(turn.since), badge(turn.state, KINDS[turn.state] ?? 'plain'), turn.reason ?? '–']), 'stacked'),
      events && !events.problem && el('p', { class: 'muted' }, `${count(all.length, 'event')} of it in the last 24 hours${all.length > EVENTS ? `, the newest ${EVENTS}` : ''}${sinceText(state.node, '24h')}`),
      mine.length > 0 && el('ul', { class: 'events' }, mine.map((event) => el('li', {}, timeOf(event.at), ' ', event.words)))]);
  }

  /** Built only while it is open: a node may have a thousand devices. */
  #showDevices() {
    const devices = devicesOf(this.#gpu);
    if (!this.#devices.firstChild) this.#devices.append(el('summary'), el('div', {}));
    const [summary, box] = this.#devices.children;
    setText(summary, `${count(devices.length, 'device')}`);
    if (!this.#devices.open) return;
    const order = { held: 0, leaving: 1, free: 2, withdrawn: 3 };
    devices.sort((a, b) => (order[a.state] ?? 9) - (order[b.state] ?? 9));
    renew(box, [this.#gpu.index, devices.map((d) => [d.id, d.state, d.allocation && holderName(d.allocation)])], () => table(`Devices of GPU ${this.#gpu.index}`, ['Device', 'State', 'Holder'], devices.map((d) => [
      [el('code', {}, d.resource), ' ', el('span', { class: 'muted', title: d.id }, d.id.includes('::') ? `share ${d.id.split('::')[1]}` : shortUuid(d.id), d.part.mig ? ` (${d.part.mig.profile})` : '')],
      badge(d.state, { held: 'busy', free: 'good', leaving: 'warn' }[d.state] ?? 'plain'), d.allocation ? holderName(d.allocation) : '–']), 'stacked'));
  }
}

/** When and how a GPU becomes healthy again, as `berth gpu show` says it. */
function heals({ heals: healsByItself, healsAt }) {
  if (!healsByItself) return ['only by an operator, after the repair (Mark healthy)'];
  if (healsAt) return ['at ', timeOf(healsAt), ', if no error comes until then'];
  return ['once a scan finds it working, or some minutes later'];
}

/** Memory in use that belongs to no known pod, MiB; 0 if the memory of the pods is not known. */
function unexplained(gpu, pods) {
  const parts = new Set(gpu.parts.map((part) => part.uuid));
  const known = pods.flatMap((pod) => [...pod.allocations]).flatMap((a) => a.uses).filter((use) => parts.has(use.part) && use.memoryUsedMiB !== undefined);
  if (known.length === 0 && pods.length > 0) return 0;
  const left = (gpu.memoryUsedMiB ?? 0) - known.reduce((sum, use) => sum + use.memoryUsedMiB, 0);
  return left > DRIVER_MIB ? left : 0;
}

function facts(gpu) {
  const { health, drain } = gpu;
  const of = (name, ...value) => value[0] !== undefined && value[0] !== false && el('div', {}, el('dt', {}, name), el('dd', {}, ...value));
  const now = [[gpu.utilizationPercent, '% busy'], [gpu.temperatureCelsius, '°C'], [gpu.powerWatts, 'W']].filter(([value]) => value !== undefined);
  return [el('dl', { class: 'facts' },
    of('Health', `${health.state}${health.reason ? `: ${health.reason}` : ''}, since `, timeOf(health.since)),
    health.state !== 'healthy' && of('Becomes healthy', ...heals(health)),
    of('Scheduling', scheduling(gpu) === 'open' ? (['unhealthy', 'vanished'].includes(health.state) ? 'open, but no new pod gets it before it is healthy' : 'open: new pods may get it') : `${scheduling(gpu)}: no new pod gets it`),
    gpu.via && of('Granted through', ...grantedThrough(gpu)),
    now.length > 0 && of('Now', now.map(([value, unit]) => `${number(value)} ${unit}`).join(', ')),
    of('Model', gpu.model), of('UUID', el('code', {}, gpu.uuid)), of('PCI, NUMA', `${gpu.pciBus}, ${gpu.numaNode ?? 'not known'}`), gpu.migEnabled && of('MIG', 'on')),
  drain.state === 'draining' && progressOf(gpu, false),
  drain.state !== 'draining' && drain.marks.length > 0 && el('ul', { class: 'events' }, drain.marks.map((mark) => el('li', {}, `${markText(mark)}, ${time(mark.since)}`)))];
}

/** The API of the kubelet through which a GPU is granted, who gave the last order, and what a move to the other API waits for. */
function grantedThrough({ via }) {
  const who = via.by && `, by ${via.by}${via.why ? `: ${via.why}` : ''}`;
  return [via.api === 'dra' ? 'DRA' : 'the device plugin', who, via.waitsFor && ` (${via.waitsFor})`].filter(Boolean);
}

function graphs(data, gpu, range) {
  const points = (items, key, scale = 1) => items.filter((item) => item[key] !== undefined).map((item) => [Date.parse(item.at), item[key] / scale]);
  const line = (name, key, scale, kind) => ({ name, kind, points: points(data.items, key, scale) });
  const all = { ...range, step: data.stepSeconds * 1000 };
  return [
    graph({ ...all, title: 'Memory', unit: 'GiB', most: gpu.memoryMiB ? gpu.memoryMiB / 1024 : undefined, lines: [line('in use', 'memoryUsedMiB', 1024, 'used-line'), line('granted', 'memoryGrantedMiB', 1024, 'granted-line')] }),
    graph({ ...all, title: 'Utilisation', unit: '%', most: 100, lines: [line('GPU', 'utilizationPercent')] }),
    graph({ ...all, title: 'Temperature', unit: '°C', lines: [line('GPU', 'temperatureCelsius')] }),
    graph({ ...all, title: 'Power', unit: 'W', lines: [line('GPU', 'powerWatts')] }),
    data.pods.length > 0 && graph({ ...all, title: 'Memory by pod', unit: 'GiB', lines: byPod(data, points), sorted: 'those with the most memory' }),
  ].filter(Boolean);
}

/** A line for each pod, those with the most memory first. */
function byPod(data, points) {
  const lines = data.pods.map(({ namespace, pod, items }) => ({ name: `${namespace}/${pod}`, points: points(items, 'memoryUsedMiB', 1024) }));
  const most = (line) => Math.max(0, ...line.points.map(([, value]) => value));
  return lines.sort((a, b) => most(b) - most(a));
}

/** The other GPUs by how near they are. */
function links(gpu, state, route) {
  const kinds = new Map();
  for (const link of gpu.links ?? []) {
    const other = state.gpu.get(link.gpu);
    if (other) kinds.set(longLink(link), [...(kinds.get(longLink(link)) ?? []), other]);
  }
  if (kinds.size === 0) return el('p', { class: 'muted' }, 'No other GPU, or the links are not known.');
  return el('ul', { class: 'events' }, [...kinds].map(([text, others]) => el('li', {}, `${text}: `,
    others.toSorted((a, b) => a.index - b.index).map((other) => button(`GPU ${other.index}`, () => route.set({ gpu: other.uuid }), { kind: 'link' })))));
}
