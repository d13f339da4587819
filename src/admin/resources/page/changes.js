// Changes of a GPU: cordon, drain, uncordon. Each opens a dialog for confirmation.

import { Problem } from './api.js';
import { ask, field } from './dialog.js';
import { count, el } from './dom.js';
import { holderName } from './model.js';

/** Longest deadline that the API accepts, in minutes: a week. */
const DEADLINE_MIN_MAX = 7 * 24 * 60;
const path = (gpu, noun) => `/gpus/${encodeURIComponent(gpu.uuid)}/${noun}`;
const reasonInput = () => el('input', { id: 'reason', type: 'text', maxlength: 1000, autocomplete: 'off' });
const SHOWN_TO_ALL = 'Shown with this GPU.';

/**
 * The condition of a change: the ETag of the drain state that the operator sees, so that a change that is not
 * shown is not undone. It is requested while the dialog is open.
 */
function seen(api, gpu) {
  const request = api.getWithTag(path(gpu, 'drain'));
  // Reported when the condition is used, not if the dialog is cancelled.
  request.catch(() => {});
  return async () => {
    const { data, etag } = await request;
    const shown = ({ state, by, why, since, marks }) => JSON.stringify([state, by ?? '', why ?? '', since ?? '', marks]);
    if (shown(data) !== shown(gpu.drain)) {
      throw new Problem({
        title: 'Changed meanwhile',
        detail: `GPU ${gpu.index} is ${data.state}${data.by ? ` by ${data.by}` : ''}${data.why ? `: ${data.why}` : ''} now.`,
        hint: 'cancel, and check the present state of the GPU',
      });
    }
    return { 'If-Match': etag };
  };
}

function holders(gpu) {
  const names = [...new Set(gpu.allocations.map(holderName))];
  if (names.length === 0) return 'It has no allocations.';
  const shown = names.slice(0, 5).join(', ');
  const more = names.length > 5 ? ` and ${names.length - 5} more` : '';
  return `${count(gpu.allocations.length, 'allocation')} on it: ${shown}${more}.`;
}

export function cordon(api, gpu) {
  const reason = reasonInput();
  const condition = seen(api, gpu);
  return ask({
    title: `Cordon GPU ${gpu.index}?`,
    words: ['Its free devices are withdrawn at once and nothing new is granted on it. Its running pods stay.', holders(gpu)],
    fields: [field('Reason', reason, SHOWN_TO_ALL)],
    label: 'Cordon',
    act: async () => api.put(path(gpu, 'cordon'), { reason: reason.value.trim() }, await condition()),
  });
}

export function uncordon(api, gpu) {
  const { state, marks } = gpu.drain;
  const condition = seen(api, gpu);
  return ask({
    title: `Uncordon GPU ${gpu.index}?`,
    words: [
      `It is ${state}. This removes ${marks.length === 1 ? 'this mark' : 'these marks'}:`,
      ...marks.map(describe),
      state === 'cordoned' ? 'It may be granted again at once.' : 'The drain is cancelled, and the GPU may be granted again at once.',
    ],
    label: 'Uncordon',
    act: async () => api.delete(`${path(gpu, 'cordon')}?owner=all`, await condition()),
  });
}

/** One owner's cordon or drain. */
const describe = ({ owner, kind, why }) => `${kind} of ${owner}${why ? `: ${why}` : ''}`;

export function stopDrain(api, gpu) {
  const drains = gpu.drain.marks.filter(({ kind }) => kind === 'drain');
  const condition = seen(api, gpu);
  return ask({
    title: `Stop the drain of GPU ${gpu.index}?`,
    words: [...drains.map(describe), 'No further pod is evicted; terminating pods continue to terminate. The GPU stays cordoned.'],
    label: 'Stop drain',
    act: async () => api.delete(`${path(gpu, 'drain')}?owner=all`, await condition()),
  });
}

export function markHealthy(api, gpu) {
  const reason = reasonInput();
  return ask({
    title: `Mark GPU ${gpu.index} healthy?`,
    words: [`It is ${gpu.health.state}${gpu.health.reason ? `: ${gpu.health.reason}` : ''}. It will be healthy until the next bad reading.`],
    fields: [field('Reason', reason, 'What was repaired.')],
    label: 'Mark healthy',
    act: () => api.put(path(gpu, 'health'), { state: 'healthy', reason: reason.value.trim() }),
  });
}

export function drain(api, gpu) {
  const reason = reasonInput();
  const condition = seen(api, gpu);
  const evict = el('input', { id: 'evict', type: 'checkbox' });
  const deadline = el('input', { id: 'deadline', type: 'number', min: 1, max: DEADLINE_MIN_MAX, step: 1, inputmode: 'numeric' });
  const atDeadline = el('select', { id: 'at-deadline' },
    el('option', { value: 'wait' }, 'continue, and show the drain as late'),
    el('option', { value: 'giveUp' }, 'stop the drain'),
    el('option', { value: 'delete' }, 'delete the remaining pods'));
  return ask({
    title: `Drain GPU ${gpu.index}?`,
    words: ['Nothing new is granted on it. It is drained once it has no allocations and no processes.', holders(gpu)],
    fields: [
      field('Reason', reason, SHOWN_TO_ALL),
      el('div', { class: 'field check' }, evict, el('label', { for: 'evict' },
        'Evict the pods that hold it, through the API server')),
      field('Deadline in minutes', deadline, 'Empty: none.'),
      field('At the deadline', atDeadline, 'Deletion requires Evict and ignores disruption budgets.'),
    ],
    label: 'Drain',
    danger: true,
    act: async () => api.put(path(gpu, 'drain'), order(reason, evict, deadline, atDeadline), await condition()),
  });
}

function order(reason, evict, deadline, atDeadline) {
  const made = { reason: reason.value.trim(), evict: evict.checked };
  if (deadline.value !== '') made.deadlineSeconds = Math.round(Number(deadline.value) * 60);
  if (atDeadline.value !== 'wait') made.atDeadline = atDeadline.value;
  return made;
}
