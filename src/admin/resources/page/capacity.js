// The devices of each resource: held, free, and why the others are not, adding up.

import { button, count, el, number, renew, svg, table } from './dom.js';

const STATES = ['held', 'free', 'withdrawn', 'cordoned', 'unhealthy'];

export function showCapacity(root, { node, gpu }, route) {
  renew(root, [node.resources, node.resources.flatMap((r) => (r.notFree ?? []).map((one) => gpu.get(one.gpu)?.index))], () => {
    if (node.resources.length === 0) return [];
    // An older daemon does not say why devices are not free.
    const detailed = node.resources.every((r) => r.unhealthy !== undefined);
    const states = detailed ? STATES : STATES.slice(0, 2);
    const rows = node.resources.map((r) => [el('code', {}, r.resource), bar(r, states), number(r.devices), ...states.map((state) => (r[state] || ['held', 'free'].includes(state) ? number(r[state]) : '–')),
      r.breaker ?? (r.registration.done ? 'registered' : r.registration.waiting ?? 'not registered')]);
    const reasons = node.resources.flatMap((r) => (r.notFree ?? []).map((one) => ({ resource: r.resource, ...one })));
    const of = reasons.reduce((sum, one) => sum + one.devices, 0);
    return [table('Resources', ['Resource', 'Use', 'Devices', ...states.map((state) => state[0].toUpperCase() + state.slice(1)), 'Kubelet'], rows, 'stacked numbers capacity'),
      reasons.length > 0 && el('details', { class: 'reasons' }, el('summary', {}, `Why ${count(of, 'device')} ${of === 1 ? 'is' : 'are'} neither held nor free`),
        el('ul', { class: 'events' }, reasons.map((one) => el('li', {}, el('i', { class: `dot ${one.state}` }), `${one.devices} × ${one.resource} ${one.state}: `,
          one.gpu && gpu.has(one.gpu) ? button(one.reason, () => route.set({ gpu: one.gpu, pod: '' }), { kind: 'link' }) : one.reason))))];
  });
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
