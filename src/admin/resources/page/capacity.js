// The devices of each resource: held, free, and why the others are not, adding up.

import { count, el, number, renew, svg, table } from './dom.js';
import { gpuButton } from './row.js';

/** GPUs that are named one by one. */
const BUTTONS_MAX = 4;
const STATES = ['held', 'free', 'withdrawn', 'cordoned', 'unhealthy'];

export function showCapacity(root, { node, gpu }, route) {
  renew(root, [node.resources, node.resources.flatMap((r) => (r.notFree ?? []).map((one) => gpu.get(one.gpu)?.index))], () => {
    if (node.resources.length === 0) return [];
    // An older daemon does not say why devices are not free.
    const detailed = node.resources.every((r) => r.unhealthy !== undefined);
    const states = detailed ? STATES : STATES.slice(0, 2);
    const rows = node.resources.map((r) => [el('code', {}, r.resource), bar(r, states), number(r.devices), ...states.map((state) => (r[state] || ['held', 'free'].includes(state) ? [el('i', { class: `dot ${state}` }), number(r[state])] : '–')),
      r.breaker ?? (r.registration.done ? 'registered' : r.registration.waiting ?? 'not registered')]);
    const reasons = grouped(node.resources.flatMap((r) => (r.notFree ?? []).map((one) => ({ resource: r.resource, ...one }))), gpu);
    const of = reasons.reduce((sum, one) => sum + one.devices, 0);
    return [table('Resources', ['Resource', 'Use', 'Devices', ...states.map((state) => state[0].toUpperCase() + state.slice(1)), 'Kubelet'], rows, 'stacked numbers capacity'),
      reasons.length > 0 && el('details', { class: 'reasons' }, el('summary', {}, `Why ${count(of, 'device')} ${of === 1 ? 'is' : 'are'} neither held nor free`),
        el('ul', { class: 'events' }, reasons.map((one) => el('li', {}, el('i', { class: `dot ${one.state}` }), `${one.devices} × ${one.resource} ${one.state}`, onGpus(one.gpus, route), `: ${one.reason}`))))];
  });
}

/** The reasons, each once with all GPUs that have it. */
function grouped(reasons, gpu) {
  const groups = new Map();
  for (const one of reasons) {
    // The GPU is named beside it.
    const reason = gpu.has(one.gpu) ? one.reason.replace(/^GPU \d+: /, '') : one.reason;
    const key = [one.resource, one.state, reason].join('\n');
    const group = groups.get(key) ?? { ...one, reason, devices: 0, gpus: [] };
    group.devices += one.devices;
    if (gpu.has(one.gpu) && !group.gpus.includes(gpu.get(one.gpu))) group.gpus.push(gpu.get(one.gpu));
    groups.set(key, group);
  }
  return [...groups.values()];
}

/** ` on GPU 3`, with a button for each of a few GPUs; of many ` on GPUs 0-7`. */
function onGpus(gpus, route) {
  if (gpus.length === 0) return '';
  if (gpus.length > BUTTONS_MAX) return ` on GPUs ${runs(gpus.map((one) => one.index))}`;
  return [' on ', ...gpus.flatMap((one, i) => [i > 0 && ', ', gpuButton(one, route)])];
}

/** `0-3, 7`. */
export function runs(indices) {
  const all = [];
  for (const index of indices.toSorted((a, b) => a - b)) {
    const last = all.at(-1);
    if (last && last[1] === index - 1) last[1] = index;
    else all.push([index, index]);
  }
  return all.map(([from, to]) => (from === to ? from : `${from}-${to}`)).join(', ');
}

/** The states of a resource's devices as one bar. */
function bar(resource, states) {
  let at = 0;
  const text = states.map((state) => `${resource[state]} ${state}`).join(', ');
  const drawn = svg('svg', { class: 'stackbar', viewBox: `0 0 ${resource.devices || 1} 10`, preserveAspectRatio: 'none', role: 'img', 'aria-label': `${resource.devices} devices: ${text}` }, svg('title', {}, text));
  for (const state of states) {
    drawn.append(svg('rect', { class: state, x: at, y: 0, width: resource[state], height: 10 }));
    at += resource[state];
  }
  return drawn;
}
