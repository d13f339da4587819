// The pods with devices of this node: one row each.

import { ageOf, badge, button, count, el, renew, table } from './dom.js';
import { gpuButton, podButton, usageOf } from './row.js';
import { canRemove, enforcerOf, search } from './words.js';

/** Rows of the table: further pods are found by searching. */
const ROWS = 250;

/** What holds a pod's containers to their limits, each once; empty if they have none. */
function enforcers({ allocations }) {
  const limits = allocations.flatMap((a) => a.limits ?? []);
  const names = [...new Set(limits.map(enforcerOf))].join(', ');
  return limits.some(canRemove) ? [`${names} `, badge('privileged', 'warn')] : names;
}

export function showPods(root, state, { route }) {
  const finds = search(route.get('q'));
  const all = [...state.pods.values()].map((pod) => {
    const uses = pod.allocations.map((a) => usageOf(a, pod.gpus.filter(({ uuid }) => a.gpus.includes(uuid))));
    return { ...pod, uses, text: [pod.key, ...pod.gpus.map((gpu) => `gpu${gpu.index} ${gpu.health.state} ${gpu.health.reason ?? ''}`), ...pod.allocations.map((a) => `${a.resource} ${a.id} ${a.holder?.container ?? ''}`), ...uses.map(({ text }) => text)].join(' ').toLowerCase() };
  });
  const pods = all.filter((pod) => finds(pod.text)).sort((a, b) => a.key.localeCompare(b.key));
  const shown = pods.slice(0, ROWS);
  renew(root, [all.length, pods.length, shown.map((pod) => [pod.key, pod.uses.map(({ text }) => text), pod.allocations.map((a) => [a.id, a.devices.length, a.limits?.enforcedBy, a.limits?.privileged]), pod.gpus.map((gpu) => [gpu.index, gpu.health.state])])], () => {
    if (pods.length === 0) return el('p', { class: 'muted' }, all.length === 0 ? 'No pod has a device.' : 'No pod matches.');
    return [el('p', { class: 'muted', role: 'status' }, pods.length < all.length ? `${pods.length} of ${count(all.length, 'pod')} match` : count(all.length, 'pod'), pods.length > ROWS && `; the first ${ROWS} are shown`),
      table('Pods by namespace', ['Pod', 'GPU', 'Devices', 'Memory used / limit, GiB', 'Limit enforced by', 'Age', ''], shown.map((pod) => {
        const open = (key) => route.set({ pod: key, gpu: '' });
        return [podButton(pod, open),
          pod.gpus.map((gpu) => el('span', { class: ['unhealthy', 'vanished'].includes(gpu.health.state) ? 'on-bad' : undefined }, gpuButton(gpu, route))),
          pod.allocations.map((a) => el('div', {}, `${a.devices.length} × ${a.resource}`)), pod.uses.map(({ numbers, badges }) => el('div', {}, numbers, badges)),
          enforcers(pod),
          ageOf(pod.allocations[0].grantedAt),
          button('Explain', () => open(pod.key), { kind: 'small', name: `Explain: ${pod.key}` })];
      }), 'stacked pods')];
  });
}
