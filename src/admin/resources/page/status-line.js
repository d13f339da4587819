// What is wrong, in one line; notices about the daemon; and announcements of changes.

import { age, badge, button, count, el, renew, setText } from './dom.js';
import { holderName } from './model.js';
import { describeError, errorOf, listed, overOn, usageText } from './words.js';

/** Changes of GPUs that are announced one by one; further ones are counted. */
const ANNOUNCEMENT_MAX = 3;
/** Allocations over their shares that are named; further ones are counted. */
const OVER_MAX = 3;
/** How long an announcement is visible, milliseconds. */
const ANNOUNCEMENT_MS = 8000;
let announcementTimer = 0;
/** How long processes must be unseen before a notice says so, milliseconds: a node without any process may look so for a moment. */
const UNSEEN_MS = 30_000;
let unseenSince;

/** GPUs by what is wrong with them, the first GPU first. */
function gpusByError(gpus) {
  const groups = new Map();
  for (const gpu of gpus) {
    const why = errorOf(gpu);
    if (why) groups.set(why, [...(groups.get(why) ?? []), gpu.index]);
  }
  return [...groups];
}

/** `4 GPUs need attention: GPUs 3 and 12 fell off the bus, GPU 5 vanished`: each error is a filter. */
export function showStatusLine(root, { node, gpus }, route) {
  const groups = gpusByError(gpus);
  const failed = node.checks.filter((check) => !check.ok);
  const out = gpus.filter((gpu) => gpu.drain.state !== 'active').length;
  const bypasses = gpus.filter((gpu) => gpu.bypasses > 0).map((gpu) => gpu.index);
  const unidentified = node.counts.unidentifiedGpus ?? 0;
  const over = gpus.flatMap((gpu) => overOn(gpu).map((one) => `${holderName(one.allocation)} on ${gpu.name} (${usageText(one)} GiB)`));
  renew(root, [groups, failed, gpus.length, unidentified, out, bypasses, over], () => {
    const sum = groups.reduce((n, [, indices]) => n + indices.length, 0);
    const kind = sum > 0 || unidentified > 0 || !node.ready ? 'bad' : bypasses.length + over.length > 0 ? 'warn' : 'good';
    root.className = `status-line ${kind}`;
    const filter = (text, changes) => button(text, () => route.set({ view: 'gpus', q: '', ...changes }), { kind: 'link' });
    const parts = [];
    if (failed.length > 0) parts.push(el('span', {}, `Not ready: ${failed.map((check) => check.name).join(', ')}. `));
    if (gpus.length === 0) parts.push(el('span', {}, 'This node has no GPUs.'));
    else if (sum === 0) parts.push(el('span', {}, unidentified > 0 ? `${gpus.length} of ${node.counts.gpus} GPUs work. ` : gpus.length === 1 ? 'The GPU works.' : `All ${gpus.length} GPUs work.`));
    else {
      parts.push(filter(`${count(sum, 'GPU')} ${sum === 1 ? 'needs' : 'need'} attention`, { state: 'attention', why: '' }), ': ',
        groups.flatMap(([why, indices], i) => [i > 0 && ', ', filter(describeError(indices, why), { state: '', why })]));
    }
    if (bypasses.length > 0) parts.push(el('span', { class: 'aside' }, `Used without an allocation: GPU ${listed(bypasses)}. `));
    if (over.length > 0) {
      const more = over.length - OVER_MAX;
      parts.push(el('span', { class: 'aside' }, filter(`Over ${over.length === 1 ? 'its share' : 'their shares'} of memory`, { state: 'over', why: '' }),
        `: ${over.slice(0, OVER_MAX).join(', ')}${more > 0 ? ` and ${more} more` : ''}. `));
    }
    if (out > 0) parts.push(el('span', { class: 'aside' }, filter(`${count(out, 'GPU')} cordoned, draining or drained`, { state: 'cordoned,draining,drained', why: '' }), '.'));
    return el('p', {}, badge('', kind), ...parts.flat().filter(Boolean));
  });
}

/** What `berth node check` says to do on a node without GPUs. */
function withoutGpus({ checks, gpuSource }) {
  const withDetail = checks.filter((check) => check.detail);
  return el('div', { class: 'card empty' }, el('h2', {}, 'No GPU was found'),
    el('p', {}, `Source of GPUs: ${gpuSource}.`),
    withDetail.length > 0 && el('dl', { class: 'facts' }, withDetail.map((check) => el('div', {}, el('dt', {}, check.name), el('dd', {}, check.detail)))),
    el('p', {}, 'On the node, this checks driver, NVML, kubelet folders, CDI and runtime, one line each, with what to do:'),
    el('pre', { tabindex: 0, 'aria-label': 'Command that checks the node' }, el('code', {}, 'sudo berth node check')));
}

/** The start of a text as `stuck` writes it: `since 2026-02-03T04:05:06.000Z: …`. */
const SINCE = /^since (\S+Z): (.*)$/s;

/** Failed checks and warnings, above everything else; evidence that is stuck with its age. */
export function notices({ node, allocations, allocationsTotal, gpus }, access, events) {
  const words = node.checks.filter((check) => check.name !== 'evidence' && (!check.ok || check.detail))
    .map((check) => [`${check.name}: ${check.detail ?? 'failed'}`, check.ok ? '' : 'bad']);
  const [, since, stuck] = SINCE.exec(node.checks.find((check) => check.name === 'evidence')?.detail ?? '') ?? [];
  const held = since ?? events?.find((event) => event.kind === 'hold')?.at;
  if (stuck || node.hold) words.push([`No allocation can end${held ? ` (for ${age(held)})` : ''}: ${stuck ?? node.hold}`, 'warn']);
  unseenSince = node.processes.why ? unseenSince ?? performance.now() : undefined;
  if (performance.now() - unseenSince >= UNSEEN_MS) {
    const { why, fix } = node.processes;
    words.push([`Processes cannot be seen: memory by pod is not known, and drains wait for allocations only. ${why}${fix ? `: ${fix}` : ''}`, 'warn']);
  }
  if (node.apiServer && !node.apiServer.done) words.push([`API server: ${node.apiServer.waiting}`, 'warn']);
  if (node.driverRelease) words.push([`The driver is released by ${node.driverRelease.by} until ${node.driverRelease.until}: nothing is granted.`, 'warn']);
  words.push(...(node.warnings ?? []).map((warning) => [warning, 'warn']));
  if (access?.right === 'read') words.push(['This token can read everything and change nothing: it has the right “read”. To make changes, sign in with a token that has “change”.', 'quiet']);
  if (allocations.length < allocationsTotal) words.push([`Holders are shown for the newest ${allocations.length} of ${allocationsTotal} allocations.`, 'warn']);
  return [...words.map(([text, kind]) => el('p', { class: `notice ${kind}` }, text)), gpus.length === 0 && withoutGpus(node)].filter(Boolean);
}

/**
 * Shows a text for eight seconds, and announces it to screen readers. An open dialog covers the page and hides it from them:
 * it has an announcement of its own.
 */
export function announceText(text) {
  const show = (shown) => document.querySelectorAll('.announcement').forEach((one) => setText(one, shown));
  show(text);
  clearTimeout(announcementTimer);
  if (text) announcementTimer = setTimeout(() => show(''), ANNOUNCEMENT_MS);
}

/** Announces what changed between two states. */
export function announce(before, now) {
  if (!before) return;
  const messages = [];
  for (const gpu of now.gpus) {
    const was = before.gpu.get(gpu.uuid);
    const drain = gpu.drain.state === 'active' ? 'uncordoned' : gpu.drain.state;
    if (!was) messages.push(`${gpu.name} appeared`);
    else {
      if (was.drain.state !== gpu.drain.state) messages.push(`${gpu.name} is ${drain}${gpu.drain.why ? `: ${gpu.drain.why}` : ''}`);
      if (was.health.state !== gpu.health.state) messages.push(`${gpu.name} is ${gpu.health.state}${gpu.health.reason ? `: ${gpu.health.reason}` : ''}`);
    }
  }
  if (before.node.stackRevision !== now.node.stackRevision) messages.push(`The stack is at revision ${now.node.stackRevision}`);
  if (messages.length === 0) return;
  const more = messages.length - ANNOUNCEMENT_MAX;
  announceText(messages.slice(0, ANNOUNCEMENT_MAX).join('. ') + (more > 0 ? `. And ${more} more` : ''));
}
