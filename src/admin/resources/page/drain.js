// The drain sheet: the pods and what happens to each, which choices are not available and why; then the progress, with a
// button that stops the drain.

import { runs } from './capacity.js';
import { byNumber, each, named, path, reasonInput, seen, stopDrain } from './changes.js';
import { attempt, closeSheet, confirmByButton, field, isComplete, sheet } from './dialog.js';
import { badge, button, count, countdown, el, renew, setText } from './dom.js';
import { podsOn } from './model.js';
import { KINDS, drainLeft, scheduling } from './words.js';

/** Longest deadline that the API accepts, in minutes: a week. */
const DEADLINE_MIN_MAX = 7 * 24 * 60;
/** Interval at which the sheet reads the page's state, milliseconds: short, so that the sheet and the row show the same. */
const POLL_MS = 200;
/** Pods that a list shows. */
const PODS_MAX = 60;
/** Texts of the API's holder states, and the badge of each: blockers first. */
const LEAVING = {
  staticPod: ['bad', 'blocks', 'a static pod cannot be evicted: take its file out of the kubelet’s manifests'],
  failed: ['bad', 'blocks', 'its eviction failed'],
  disruptionBudget: ['warn', 'waits', 'its disruption budget allows no eviction at present'],
  notShown: ['warn', 'waits', 'the API server does not list it'],
  notKnown: ['warn', 'waits', 'pod not known yet'],
  notAsked: ['plain', 'not evicted', 'it must end by itself'],
  asked: ['busy', 'eviction requested', 'it has not begun to terminate'],
  terminating: ['busy', 'terminating', 'its containers are being stopped'],
  over: ['good', 'over', 'it has ended; the kubelet has not released its devices yet'],
};

/**
 * Opens the sheet for GPUs: the order, or the progress if all of them drain. `state` gives the newest state of the page.
 * Resolves to whether a drain was ordered.
 */
export async function drainSheet(api, gpus, state, changed) {
  let ordered = false;
  const isOut = (gpu) => ['draining', 'drained'].includes(gpu.drain.state);
  const root = el('div', {});
  const stop = new AbortController();
  const show = (content) => root.replaceChildren(content);
  const progress = () => show(progressView(api, gpus, state, changed, stop.signal));
  if (gpus.every(isOut)) progress();
  else {
    show(orderView(api, gpus.filter((gpu) => !isOut(gpu)), state(), async () => {
      ordered = true;
      await changed();
      progress();
      root.querySelector('.close')?.focus();
    }));
  }
  await sheet(root, { wide: true });
  stop.abort();
  return ordered;
}

/** Why pods cannot be evicted, if they cannot. */
export function whyNoEviction(node) {
  if (!node.apiServer) return 'No API server is configured: start the daemon with --kubeconfig FILE, or in a pod with a service account. Pods can be deleted by hand: once the drain has started, this dialog shows the command.';
  return undefined;
}

function orderView(api, gpus, state, started) {
  const { node } = state;
  const conditions = new Map(gpus.map((gpu) => [gpu, seen(api, gpu)]));
  const noEviction = whyNoEviction(node);
  const reason = reasonInput();
  const evict = el('input', { id: 'evict', type: 'checkbox', disabled: !!noEviction, 'aria-describedby': 'evict-help' });
  const deadline = el('input', { id: 'deadline', type: 'number', min: 1, max: DEADLINE_MIN_MAX, step: 1, inputmode: 'numeric' });
  const options = { wait: 'continue, and show the drain as late', giveUp: 'stop the drain; the GPU stays cordoned', delete: 'delete the remaining pods, whatever their disruption budgets say' };
  const atDeadline = el('select', { id: 'at-deadline' }, Object.entries(options).map(([value, text]) => el('option', { value }, text)));
  const why = el('p', { class: 'muted', id: 'at-deadline-help' });
  const leaving = el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': byNumber(gpus, 'Pods on it', 'Pods on them') });
  const failed = el('div', { role: 'alert' });
  const yes = el('button', { type: 'submit', class: 'danger' }, 'Drain');
  /** The previews, without and with evictions: each is requested once. */
  const previews = {};
  const preview = (evicts) => {
    previews[evicts] ??= { answer: undefined };
    const known = previews[evicts];
    known.request ??= previewOf(api, gpus, evicts).then((answer) => {
      known.answer = answer;
      if (form.isConnected) refresh();
    });
    return known.answer;
  };
  const refresh = () => {
    const not = { giveUp: deadline.value === '' && 'there is no deadline', delete: (!evict.checked && 'pods are not evicted') || (deadline.value === '' && 'there is no deadline') };
    for (const option of atDeadline.options) {
      option.disabled = !!not[option.value];
      setText(option, options[option.value] + (not[option.value] ? ` (not possible: ${not[option.value]})` : ''));
    }
    if (atDeadline.selectedOptions[0]?.disabled) atDeadline.value = 'wait';
    setText(why, deadline.value === '' ? 'Without a deadline the drain waits as long as it takes.' : '');
    const found = preview(evict.checked);
    renew(leaving, [evict.checked, found], () => podList(gpus, state, evict.checked, found));
  };
  const form = el('form', { oninput: refresh },
    el('h2', { id: 'dialog-title' }, `Drain ${named(gpus)}?`),
    el('p', {}, 'Nothing new is granted. A GPU is drained once it has no allocations and no processes.'),
    leaving,
    field('Reason', reason, 'Shown with this GPU. Ctrl+Enter confirms.'),
    el('div', { class: 'field check' }, evict, el('label', { for: 'evict' }, 'Evict the pods that hold it, through the API server')),
    el('p', { class: noEviction ? 'note warn' : 'muted', id: 'evict-help' }, noEviction ? `Not possible: ${noEviction}` : 'Disruption budgets are respected. Static pods cannot be evicted.'),
    el('div', { class: 'pair' }, field('Deadline in minutes', deadline, 'Empty: none.'),
      el('div', { class: 'field' }, el('label', { for: 'at-deadline' }, 'At the deadline'), atDeadline, why)),
    failed,
    el('div', { class: 'buttons' }, button('Cancel', closeSheet), yes));
  atDeadline.setAttribute('aria-describedby', why.id);
  confirmByButton(form);
  refresh();
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    if (!isComplete(form)) return;
    const order = { reason: reason.value.trim(), evict: evict.checked };
    if (deadline.value !== '') order.deadlineSeconds = Math.round(Number(deadline.value) * 60);
    if (atDeadline.value !== 'wait') order.atDeadline = atDeadline.value;
    const act = () => each(gpus, async (gpu) => api.put(path(gpu, 'drain'), order, await conditions.get(gpu)()));
    if (await attempt(yes, failed, act)) await started();
  });
  return form;
}

/**
 * The pods on GPUs as the daemon knows them before the drain, by UID or name, and why they could not be read. With `evicts` the
 * API server was asked about each.
 */
async function previewOf(api, gpus, evicts) {
  try {
    const answers = await Promise.all(gpus.map((gpu) => api.get(path(gpu, `drain/preview?evict=${evicts}`), { conditional: false })));
    return { holders: answers.flatMap(({ holders }) => holders) };
  } catch (problem) {
    return { holders: [], problem: problem.detail || problem.title };
  }
}

/** What creates another pod in place of this one. */
function ownerText({ shown, owner, state }) {
  if (state === 'staticPod') return 'of a file on this node';
  if (owner) return `of ${owner.kind} ${owner.name}${owner.kind === 'DaemonSet' ? ', which creates it again on this node' : ''}`;
  return shown ? 'without a controller: it is not created again' : 'owner not known';
}

/** What becomes of a pod: the badge, and a text. `holder` is of the preview. */
function fate(pod, holder, evicts, isAsked) {
  if (['staticPod', 'terminating', 'over'].includes(holder?.state)) {
    const [kind, word, text] = LEAVING[holder.state];
    return [badge(holder.state === 'staticPod' && !evicts ? 'stays' : word, kind), ` ${text}`];
  }
  if (!evicts) return [badge('not evicted', 'plain'), ' the drain waits until it ends'];
  if (!pod.pod) return [badge('waits', 'warn'), ' its pod is not known yet'];
  if (!isAsked) return [badge('evicted', 'busy'), ' when the drain starts; the API server is being asked'];
  if (!holder || holder.state === 'notAsked') return [badge('evicted', 'busy'), ' when the drain starts'];
  const [kind, word, text] = LEAVING[holder.state] ?? ['plain', holder.state, ''];
  return [badge(word, kind), ` ${text}${holder.message ? `: ${holder.message}` : ''}`];
}

/** The pods on the GPUs, with all that each holds on this node: a pod that is evicted loses its other GPUs, too. */
function podList(gpus, state, evicts, preview) {
  const pods = new Map(gpus.flatMap((gpu) => podsOn(gpu)).map((pod) => [pod.key, state.pods.get(pod.key) ?? { ...pod, allocations: [...pod.allocations], gpus: [] }]));
  if (pods.size === 0) return el('p', {}, byNumber(gpus, 'No pod is on it: it is drained as soon as no process is left.', 'No pod is on them: each is drained as soon as no process is left.'));
  const holderOf = (pod) => preview?.holders.find((holder) => pod.allocations.some((a) => (a.holder?.podUid ? a.holder.podUid === holder.podUid : holder.allocations.includes(a.id))));
  const all = [...pods.values()].map((pod) => ({ pod, holder: holderOf(pod) }));
  const devices = all.reduce((sum, { pod }) => sum + pod.allocations.reduce((n, a) => n + a.devices.length, 0), 0);
  const onGpus = new Set(all.flatMap(({ pod }) => pod.gpus.map((gpu) => gpu.uuid)));
  const beyond = [...onGpus].filter((uuid) => !gpus.some((gpu) => gpu.uuid === uuid)).length;
  const [hold, lose] = all.length === 1 ? ['It holds', 'loses'] : ['They hold', 'lose'];
  const cost = beyond > 0 ? `. ${hold} ${count(devices, 'device')} on ${count(onGpus.size, 'GPU')} in all${evicts ? `, and ${lose} them` : ''}` : '';
  return [el('p', {}, `${count(all.length, 'pod')} on ${byNumber(gpus, 'it', 'them')}${cost}:`), el('ul', { class: 'leaving' }, all.slice(0, PODS_MAX).map(({ pod, holder }) => el('li', {},
    el('span', { class: 'who' }, pod.pod ? pod.key : 'pod not known yet'), ` ${held(pod)} `, ...fate(pod, holder, evicts, !!preview),
    holder && el('p', { class: holder.shown && !holder.owner && holder.state !== 'staticPod' ? 'note warn' : 'muted' }, `${ownerText(holder)}`)))),
  all.length > PODS_MAX && el('p', { class: 'muted' }, `and ${all.length - PODS_MAX} more`),
  preview?.problem && el('p', { class: 'note warn' }, `Owners and disruption budgets are not known: ${preview.problem}`)];
}

/** `10 × nvidia.com/gpu on GPUs 0-7, 9, 12`. */
function held(pod) {
  const sums = new Map();
  for (const a of pod.allocations) sums.set(a.resource, (sums.get(a.resource) ?? 0) + a.devices.length);
  const on = pod.gpus.length === 0 ? '' : ` on ${pod.gpus.length === 1 ? 'GPU' : 'GPUs'} ${runs(pod.gpus.map((gpu) => gpu.index))}`;
  return [...sums].map(([resource, n]) => `${n} × ${resource}`).join(', ') + on;
}

function progressView(api, gpus, state, changed, signal) {
  const body = el('div', { 'aria-live': 'polite' });
  const title = el('h2', { id: 'dialog-title' }, `Drain of ${named(gpus)}`);
  const buttons = el('div', { class: 'buttons' });
  const newest = () => gpus.map((gpu) => state()?.gpu.get(gpu.uuid)).filter(Boolean);
  const draining = () => newest().filter((gpu) => gpu.drain.state === 'draining');
  const poll = () => {
    if (signal.aborted) return;
    const now = newest();
    renew(body, now.map(({ drain }) => drain), () => now.map((gpu) => progressOf(gpu, now.length > 1)));
    const running = draining();
    renew(buttons, [running.map((gpu) => gpu.uuid), document.body.dataset.why], () => [
      running.length > 0 && button('Stop drain…', async () => {
        // Looked up at the click: a drain may have got other marks, or have ended, since the button was made.
        if (draining().length > 0 && await stopDrain(api, draining())) await changed();
      }, { change: true }),
      button(running.length > 0 ? 'Close (the drain goes on)' : 'Close', closeSheet, { kind: 'close main' }),
    ]);
    setTimeout(poll, POLL_MS);
  };
  poll();
  return el('div', {}, title, body, buttons);
}

/** A name as Kubernetes allows it: no other one is put into a command. */
const NAME = /^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$/;

/** The commands that delete the pods that must end by themselves, one for each namespace, to be copied. */
function deleteCommands(holders) {
  const spaces = new Map();
  for (const { state, namespace, pod } of holders) {
    if (state === 'notAsked' && NAME.test(namespace ?? '') && NAME.test(pod ?? '')) spaces.set(namespace, [...spaces.get(namespace) ?? [], pod]);
  }
  if (spaces.size === 0) return null;
  const commands = [...spaces].map(([namespace, pods]) => `kubectl delete pod -n ${namespace} ${pods.join(' ')}`).join('\n');
  return el('div', {}, el('p', { class: 'muted' }, 'To end them now, where you have kubectl:'),
    el('pre', { tabindex: 0, 'aria-label': 'Commands that delete these pods' }, el('code', {}, commands)),
    button('Copy', () => navigator.clipboard?.writeText(commands), { kind: 'small', name: 'Copy the commands' }));
}

/** The progress of one GPU: what is left, what blocks it, and until when. */
export function progressOf(gpu, named = true) {
  const { drain } = gpu;
  const { progress: of } = drain;
  const state = scheduling(gpu);
  const head = el('p', {}, named && el('strong', {}, `GPU ${gpu.index} `), badge(state, KINDS[state]), drain.by && ` by ${drain.by}${drain.why ? `: ${drain.why}` : ''}`);
  if (!of || state !== 'draining') return el('div', { class: 'progress' }, head, state === 'drained' && el('p', {}, 'It has no allocation and no process left.'));
  const words = [drainLeft(of)];
  if (of.processes !== undefined && of.allocations.length > 0) words.push(count(of.processes, 'process', 'processes'));
  if (of.late) words.push('late');
  const left = !of.late && of.until !== undefined && [countdown(of.until), ' until its deadline, '];
  const evicts = of.evict ? 'its pods are evicted' : 'no pod is evicted';
  const order = Object.keys(LEAVING);
  const holders = of.holders.toSorted((a, b) => order.indexOf(a.state) - order.indexOf(b.state));
  return el('div', { class: 'progress' }, head, el('p', { class: `note ${of.late ? 'bad' : 'busy'}` }, `${words.join(', ')}, `, left, evicts),
    of.warning && el('p', { class: 'note warn' }, of.warning),
    holders.length > 0 && el('ul', { class: 'leaving', 'aria-label': 'Remaining holders' }, holders.slice(0, PODS_MAX).map((holder) => {
      const [kind, word, text] = LEAVING[holder.state] ?? ['plain', holder.state, ''];
      return el('li', {}, badge(word, kind), ' ', el('span', { class: 'who' }, holder.pod ? `${holder.namespace}/${holder.pod}` : 'pod not known yet'),
        `: ${text}${holder.message ? `: ${holder.message}` : ''}${holder.owner ? ` (${ownerText(holder)})` : holder.comesBack ? ' (its DaemonSet creates it again)' : ''}`);
    })),
    deleteCommands(of.evict ? [] : holders));
}
