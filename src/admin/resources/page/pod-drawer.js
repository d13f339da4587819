// One pod: what it holds where, what it uses, and why it is there.

import { problemNote } from './dialog.js';
import { badge, button, count, el, renew, setText, timeOf } from './dom.js';
import { section } from './gpu-drawer.js';
import { graph, rangeButtons } from './graph.js';
import { recordedSince, sinceText, startOf } from './record.js';
import { gpuButton, usageOf } from './row.js';
import { explanation } from './why-here.js';
import { canRemove, colourOf, enforcerOf, listed } from './words.js';

/** Allocations and GPUs of a pod that are explained and drawn. */
const SHOWN_MAX = 8;

const fact = (name, ...value) => el('div', {}, el('dt', {}, name), el('dd', {}, ...value.flat()));

// What holds a container to its limits.
const enforcer = (limits) => `${enforcerOf(limits)}${canRemove(limits) ? '; the container is privileged and can remove the limit' : ''}`;

// A memory limit on one GPU, as it was last read back.
const gpuLimit = ({ grantedMiB, state, limitMiB, usedMiB, readAt, timesChanged, why }) => [
  `${grantedMiB} MiB: ${state}`,
  ...(readAt ? [', read back ', timeOf(readAt), ` as ${limitMiB} MiB with ${usedMiB} MiB used`] : []),
  timesChanged > 0 && `, changed ${count(timesChanged, 'time')} by something other than the guard`,
  why && ` (${why})`,
].filter(Boolean);

export class PodDrawer {
  #context; #key;
  #title = el('h2', { id: 'drawer-title', tabindex: -1 });
  #where = el('p', { class: 'muted' });
  #holds = el('div', {});
  #why = el('div', {});
  #graphs = el('div', {});

  constructor(context, key) {
    this.#context = context;
    this.#key = key;
    this.head = el('div', {}, this.#title, this.#where);
    this.body = el('div', { class: 'drawer-body' }, section('Holds', this.#holds), section('Why this GPU', this.#why), section('Memory', this.#graphs));
  }

  async show(state) {
    const pod = state.pods.get(this.#key);
    this.body.hidden = !pod;
    setText(this.#title, pod ? `Pod ${pod.pod ?? 'not known yet'}` : 'Pod not found');
    renew(this.#where, [this.#key, !!pod], () => (pod ? [el('i', { class: `dot ${colourOf(pod.namespace)}` }), pod.namespace ? `namespace ${pod.namespace}` : this.#key]
      : `${this.#key} holds no GPU of this node any more.`));
    if (!pod) return;
    const { route } = this.#context;
    const { gpus } = pod;
    const usage = (a) => usageOf(a, gpus.filter(({ uuid }) => a.gpus.includes(uuid)));
    renew(this.#holds, [pod.allocations, gpus.map((gpu) => [gpu.uuid, gpu.index, gpu.health.state])], () => [...pod.allocations.map((a) => el('dl', { class: 'facts holding' },
      fact('Devices', `${a.devices.length} × ${a.resource}`), fact('On', a.gpus.map((uuid) => [gpuButton(state.gpu.get(uuid), route), ' ']).flat()),
      fact('Memory used / limit', usage(a).numbers, ' GiB', usage(a).badges), a.limits && fact('Limit enforced by', enforcer(a.limits)),
      ...(a.limits?.perGpu ?? []).map((limit) => fact(`Memory limit on GPU ${state.gpu.get(limit.gpu)?.index ?? limit.gpu}`, gpuLimit(limit))),
      a.claim && fact('Claim', `${a.claim.namespace}/${a.claim.name}, request ${a.claim.request}`, a.claim.pods.length > 1 && `, for the pods ${listed(a.claim.pods)}`),
      fact('Container', a.holder?.container ?? 'not known yet'), fact('Since', timeOf(a.grantedAt)), fact('Allocation', el('code', {}, a.id), a.overlapped && badge('overlapped', 'warn')))),
    button('Copy link', () => navigator.clipboard?.writeText(location.href))]);
    const ids = pod.allocations.slice(0, SHOWN_MAX).map((a) => a.id);
    const more = pod.allocations.length - ids.length;
    if (this.#why.dataset.ids !== [...ids, more].join()) {
      this.#why.dataset.ids = [...ids, more].join();
      const shown = await Promise.all(ids.map((id) => explanation(this.#context.api, id)));
      this.#why.replaceChildren(...shown, ...more > 0 ? [el('p', { class: 'muted' }, `and ${count(more, 'more allocation')}`)] : []);
    }
    await this.#showGraphs(gpus, pod, state.node);
  }

  async #showGraphs(all, { namespace, pod }, node) {
    const { past, route } = this.#context;
    const last = route.get('last');
    const gpus = all.slice(0, SHOWN_MAX);
    const more = all.length - gpus.length;
    const read = await Promise.all(gpus.map((gpu) => past.graph(gpu.uuid, last).catch((problem) => ({ problem }))));
    const problem = read.find((one) => one?.problem)?.problem;
    const lines = gpus.map((gpu, i) => ({ name: `on GPU ${gpu.index}`, points: (read[i]?.pods?.find((one) => one.namespace === namespace && one.pod === pod)?.items ?? [])
      .filter((item) => item.memoryUsedMiB !== undefined).map((item) => [Date.parse(item.at), item.memoryUsedMiB / 1024]) }));
    renew(this.#graphs, [last, problem?.detail, more, lines.map((line) => [line.points.length, line.points.at(-1)]), sinceText(node, last)], () => {
      if (problem) return [rangeButtons(route), problemNote(problem)];
      if (!lines.some((line) => line.points.length > 0)) return [rangeButtons(route), recordedSince(node, last), el('p', { class: 'muted' }, 'No memory of its processes was seen in this time.')];
      return [rangeButtons(route), recordedSince(node, last), graph({ title: 'Memory', unit: 'GiB', last, start: startOf(node), step: (read[0]?.stepSeconds ?? 15) * 1000, lines, sorted: 'the first GPUs' }),
        more > 0 && el('p', { class: 'muted' }, `Its memory on ${count(more, 'more GPU')} is not drawn: their drawers show it.`)];
    });
  }
}
