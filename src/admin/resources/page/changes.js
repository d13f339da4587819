// Changes of GPUs: cordon, uncordon, stop a drain, mark healthy, forget. Each opens a dialog for confirmation.

import { Problem } from './api.js';
import { ask, field } from './dialog.js';
import { count, el } from './dom.js';
import { holderName } from './model.js';
import { isMoving, listed, markText } from './words.js';

export const path = (gpu, noun = '') => `/gpus/${encodeURIComponent(gpu.uuid)}${noun && `/${noun}`}`;
export const reasonInput = () => el('input', { id: 'reason', type: 'text', maxlength: 1000, autocomplete: 'off' });
const SHOWN_TO_ALL = 'Shown with this GPU. Ctrl+Enter confirms.';
/** One word for one GPU, another for several. */
export const byNumber = (gpus, one, several) => (gpus.length === 1 ? one : several);

/** `GPU 3`, `GPUs 3, 5 and 7`. */
export const named = (gpus) => (gpus.length === 1 ? `GPU ${gpus[0].index}` : `GPUs ${listed(gpus.map((gpu) => gpu.index))}`);

/**
 * The condition of a change: the ETag of the drain state that the operator sees, so that a change that is not
 * shown is not undone. It is requested while the dialog is open.
 */
export function seen(api, gpu) {
  const request = api.getWithTag(path(gpu, 'drain'));
  // Reported when the condition is used, not if the dialog is cancelled.
  request.catch(() => {});
  return async () => {
    const { data, etag } = await request;
    const shown = ({ state, by, why, since, marks }) => JSON.stringify([state, by ?? '', why ?? '', since ?? '', marks]);
    if (shown(data) !== shown(gpu.drain)) {
      throw new Problem({
        title: 'Changed meanwhile',
        detail: `GPU ${gpu.index} is now ${data.state === 'active' ? 'open' : data.state}${data.by ? ` by ${data.by}` : ''}${data.why ? `: ${data.why}` : ''}.`,
        hint: 'cancel, and check the present state of the GPU',
      });
    }
    return { 'If-Match': etag };
  };
}

/** Changes one GPU after the other. A failure ends it, and says what was done until then. */
export async function each(gpus, change) {
  const done = [];
  for (const gpu of gpus) {
    try {
      await change(gpu);
    } catch (problem) {
      if (done.length > 0) problem.detail = `${named(done)}: done. GPU ${gpu.index}: ${problem.detail}`;
      throw problem;
    }
    done.push(gpu);
  }
}

export function holders(gpus) {
  const all = gpus.flatMap((gpu) => gpu.allocations);
  const names = [...new Set(all.map(holderName))];
  if (names.length === 0) return 'No allocations.';
  const more = names.length > 5 ? ` and ${names.length - 5} more` : '';
  return `${count(new Set(all.map((a) => a.id)).size, 'allocation')}: ${names.slice(0, 5).join(', ')}${more}.`;
}

export function cordon(api, gpus) {
  const reason = reasonInput();
  const conditions = new Map(gpus.map((gpu) => [gpu, seen(api, gpu)]));
  return ask({
    title: `Cordon ${named(gpus)}?`,
    words: ['Free devices are withdrawn at once and nothing new is granted. Running pods stay.', holders(gpus)],
    fields: [field('Reason', reason, SHOWN_TO_ALL)],
    label: 'Cordon',
    act: () => each(gpus, async (gpu) => api.put(path(gpu, 'cordon'), { reason: reason.value.trim() }, await conditions.get(gpu)())),
  });
}

/** Removes marks: `kind` is the route, `words` what happens. */
function unmark(api, gpus, { title, label, kind, marks, words }) {
  const conditions = new Map(gpus.map((gpu) => [gpu, seen(api, gpu)]));
  return ask({
    title, label,
    words: [...gpus.flatMap((gpu) => marks(gpu).map((mark) => `GPU ${gpu.index}: ${markText(mark)}${mark.object ? ' (stays until that object is deleted with kubectl)' : ''}`)), words],
    act: () => each(gpus, async (gpu) => api.delete(`${path(gpu, kind)}?owner=all`, await conditions.get(gpu)())),
  });
}

export function uncordon(api, gpus) {
  const drains = gpus.some((gpu) => gpu.drain.state !== 'cordoned');
  const stays = gpus.some((gpu) => gpu.drain.marks.some(({ object }) => object));
  return unmark(api, gpus, {
    title: `Uncordon ${named(gpus)}?`, label: 'Uncordon', kind: 'cordon', marks: (gpu) => gpu.drain.marks,
    words: stays
      ? `This removes all marks but those of GPUMaintenances and DeviceTaintRules.${drains ? ' Their drains are stopped.' : ''} Nothing is granted on a GPU that keeps a mark.`
      : `This removes all of these marks.${drains ? ' A drain is stopped.' : ''} ${byNumber(gpus, 'The GPU', 'The GPUs')} may be granted again at once.`,
  });
}

export function stopDrain(api, gpus) {
  const stays = gpus.some((gpu) => gpu.drain.marks.some(({ kind, object }) => kind === 'drain' && object));
  return unmark(api, gpus, {
    title: `Stop the drain of ${named(gpus)}?`, label: 'Stop drain', kind: 'drain',
    marks: (gpu) => gpu.drain.marks.filter(({ kind }) => kind === 'drain'),
    words: stays
      ? 'This stops all drains but those of GPUMaintenances.'
      : 'No further pod is evicted; terminating pods continue to terminate. ' + byNumber(gpus, 'The GPU stays cordoned.', 'The GPUs stay cordoned.'),
  });
}

export function markHealthy(api, gpus) {
  const reason = reasonInput();
  return ask({
    title: `Mark ${named(gpus)} healthy?`,
    words: gpus.map(({ index, health }) => `GPU ${index} is ${health.state}${health.reason ? `: ${health.reason}` : ''}. It will be healthy until its next error.`),
    fields: [field('Reason', reason, 'What was repaired.')],
    label: 'Mark healthy',
    act: () => each(gpus, (gpu) => api.put(path(gpu, 'health'), { state: 'healthy', reason: reason.value.trim() })),
  });
}

/** Moves a GPU to the kubelet's other API, or cancels such a move. */
export function move(api, [gpu]) {
  const reason = reasonInput();
  const request = api.getWithTag(path(gpu, 'via'));
  request.catch(() => {});
  const name = `GPU ${gpu.index}`;
  const cancels = isMoving(gpu);
  const [now, other] = gpu.via?.api === 'dra' ? ['dra', 'devicePlugin'] : ['devicePlugin', 'dra'];
  const words = { dra: 'DRA', devicePlugin: 'the device plugin' };
  return ask({
    title: cancels ? `Cancel the move of ${name}?` : `Move ${name} to ${words[other]}?`,
    words: [cancels ? `It is granted through ${words[now]} again at once.`
      : other === 'dra' ? 'Pods get it by ResourceClaims then. Nothing new is granted on it by the device plugin; it is moved when the pods that hold it have ended, at the earliest after 30 s.'
        : 'Pods get it by a resource request then. It is allocated to no further claim; it is moved when its claims are released, at the earliest after 30 s.', holders([gpu])],
    fields: cancels ? [] : [field('Reason', reason, SHOWN_TO_ALL)],
    label: cancels ? 'Cancel the move' : 'Move',
    act: async () => {
      const { etag } = await request;
      const order = { api: cancels ? now : other, reason: reason.value.trim() };
      return api.put(path(gpu, 'via'), order, { 'If-Match': etag });
    },
  });
}

export function forget(api, gpus) {
  return ask({
    title: `Forget ${named(gpus)}?`,
    words: [byNumber(gpus, 'It vanished. Its devices are removed from the kubelet’s list; if it comes back, it is a new GPU of this node.',
      'They vanished. Their devices are removed from the kubelet’s list; if they come back, they are new GPUs of this node.')],
    label: 'Forget',
    danger: true,
    act: () => each(gpus, (gpu) => api.delete(path(gpu))),
  });
}
