// The page of the node: sign-in, loading and display.

import { Api } from './api.js';
import { showDecisions } from './decisions.js';
import { problemBox } from './dialog.js';
import { badge, byId, el, number, renew, setText, table } from './dom.js';
import { Gpus } from './gpus.js';
import { showLinks } from './links.js';
import { Live } from './live.js';
import { Model } from './model.js';
import { activate, showStack, unsuspend } from './stack.js';

/** Changes of GPUs that are announced one by one; further ones are counted. */
const ANNOUNCEMENT_MAX = 3;
/** How long an announcement is visible, milliseconds. */
const ANNOUNCEMENT_MS = 8000;

const api = new Api();
const gpus = new Gpus(api, { root: byId('tiles'), found: byId('found'), find: byId('find'), changed: look });
let model;
let live;
let shown;
let announcementTimer = 0;
let looks = 0;
let newest = 0;

byId('sign-in-form').addEventListener('submit', signIn);
byId('sign-out').addEventListener('click', () => signOut());
byId('activate').addEventListener('click', async (event) => {
  const opener = event.currentTarget;
  try {
    if (await activate(api)) await look();
  } catch (problem) {
    fail(problem);
  }
  opener.focus();
});
if (api.signedIn) begin();
else showSignIn();

async function signIn(event) {
  event.preventDefault();
  const error = byId('sign-in-error');
  error.replaceChildren();
  api.signIn(byId('token').value.trim());
  try {
    await api.get('/node');
  } catch (problem) {
    api.signOut();
    error.replaceChildren(problemBox(problem));
    byId('token').focus();
    return;
  }
  byId('token').value = '';
  begin();
  byId('main').focus();
}

function showSignIn() {
  for (const id of ['node', 'sign-out', 'pulse']) byId(id).hidden = true;
  byId('sign-in').hidden = false;
  setText(byId('liveness'), 'Not signed in.');
  byId('token').focus();
}

function signOut(problem) {
  live?.stop();
  live = undefined;
  model = undefined;
  shown = undefined;
  api.signOut();
  byId('dialog').close();
  clearTimeout(announcementTimer);
  setText(byId('announcement'), '');
  // The page keeps no data of the node.
  gpus.clear();
  for (const id of ['notices', 'facts', 'resources', 'stack', 'decisions', 'links']) {
    byId(id).replaceChildren();
    delete byId(id).berthSign;
  }
  setText(byId('where'), '');
  document.title = 'Berth';
  showSignIn();
  byId('sign-in-error').replaceChildren(...(problem ? [problemBox(problem)] : []));
}

function begin() {
  byId('sign-in').hidden = true;
  byId('sign-out').hidden = false;
  byId('pulse').hidden = false;
  model = new Model(api);
  live = new Live(api, look, sayLiveness);
  live.start();
}

async function look() {
  const requested = model;
  if (!requested) return;
  const order = (looks += 1);
  try {
    const state = await requested.load();
    // Of two concurrent loads the later one is shown.
    if (!api.signedIn || requested !== model || order < newest) return;
    newest = order;
    show(state);
    byId('notices').replaceChildren(...notices(state));
  } catch (problem) {
    // The user has signed out meanwhile.
    if (requested !== model) return;
    if (problem.status === 401) signOut(problem);
    else fail(problem);
  }
}

function fail(problem) {
  if (!problem.title) throw problem;
  byId('node').hidden = false;
  byId('notices').replaceChildren(el('div', { role: 'alert' }, problemBox(problem)));
}

function show(state) {
  const { node, stack } = state;
  announce(shown, state);
  shown = state;
  byId('node').hidden = false;
  document.title = `${node.name} – Berth`;
  setText(byId('where'), node.name);
  renew(byId('facts'), [node, state.allocationsTotal], () => facts(node));
  renew(byId('resources'), node.resources, () => resources(node));
  gpus.show(state.gpus);
  showStack(byId('stack'), stack, async (_, entry, place) => {
    if (await unsuspend(api, stack, entry, place)) await look();
  });
  showDecisions(byId('decisions'), state);
  showLinks(byId('links'), byId('links-section'), state.gpus);
}

function facts(node) {
  const { counts } = node;
  const of = (name, ...value) => el('div', {}, el('dt', {}, name), el('dd', {}, ...value));
  return [
    of('State', badge(node.ready ? 'ready' : 'not ready', node.ready ? 'good' : 'bad')),
    of('GPUs', `${counts.workingGpus} of ${counts.gpus} working`),
    of('Cordoned or drained', number(counts.cordonedGpus)),
    of('Allocations', number(counts.allocations)),
    of('GPU source', node.gpuSource),
    node.driverVersion && of('Driver', node.driverVersion, node.cudaVersion ? `, CUDA ${node.cudaVersion}` : ''),
    of('Berth', `${node.version}, generation ${node.generation}`),
  ].filter(Boolean);
}

function resources(node) {
  if (node.resources.length === 0) return [];
  return table('Resources', ['Resource', 'Devices', 'Held', 'Free', 'Kubelet'], node.resources.map((r) => [
    el('code', {}, r.resource), number(r.devices), number(r.held), number(r.free),
    r.breaker ?? (r.registration.done ? 'registered' : r.registration.waiting ?? 'not registered'),
  ]), 'stacked numbers');
}

/** Failed checks and warnings, above everything else. */
function notices({ node, allocations, allocationsTotal }) {
  const words = node.checks.filter((check) => !check.ok || check.detail)
    .map((check) => [`${check.name}: ${check.detail ?? 'failed'}`, check.ok ? '' : 'bad']);
  if (node.hold) words.push([`No allocation is ended at present: ${node.hold}`, 'warn']);
  if (node.processes.why) words.push([`${node.processes.why}${node.processes.fix ? `: ${node.processes.fix}` : ''}`, 'warn']);
  if (node.apiServer && !node.apiServer.done) words.push([`API server: ${node.apiServer.waiting}`, 'warn']);
  if (allocations.length < allocationsTotal) words.push([`Holders are shown for the newest ${allocations.length} of ${allocationsTotal} allocations.`, 'warn']);
  return words.map(([text, kind]) => el('p', { class: `notice ${kind}` }, text));
}

/** Announces changes, also to screen readers. */
function announce(before, now) {
  if (!before) return;
  const old = new Map(before.gpus.map((gpu) => [gpu.uuid, gpu]));
  const messages = [];
  for (const gpu of now.gpus) {
    const was = old.get(gpu.uuid);
    if (!was) messages.push(`GPU ${gpu.index} appeared`);
    else {
      if (was.drain.state !== gpu.drain.state) messages.push(`GPU ${gpu.index} is ${gpu.drain.state}${gpu.drain.why ? `: ${gpu.drain.why}` : ''}`);
      if (was.health.state !== gpu.health.state) messages.push(`GPU ${gpu.index} is ${gpu.health.state}${gpu.health.reason ? `: ${gpu.health.reason}` : ''}`);
    }
  }
  if (before.stack.revision !== now.stack.revision) messages.push(`The stack is at revision ${now.stack.revision}`);
  if (messages.length === 0) return;
  const more = messages.length - ANNOUNCEMENT_MAX;
  setText(byId('announcement'), messages.slice(0, ANNOUNCEMENT_MAX).join('. ') + (more > 0 ? `. And ${more} more` : ''));
  clearTimeout(announcementTimer);
  announcementTimer = setTimeout(() => setText(byId('announcement'), ''), ANNOUNCEMENT_MS);
}

function sayLiveness(state) {
  const [word, kind, text] = {
    live: ['live', 'good', 'Live: changes arrive as server-sent events; memory in use is read every 15 seconds.'],
    polling: ['every 3 s', 'plain', 'This daemon has no event stream (/api/v1/events): the page polls the daemon every 3 seconds.'],
    lost: ['not live', 'warn', 'The event stream was interrupted: until it is open again, the page polls every 3 seconds.'],
  }[state];
  byId('pulse').replaceChildren(badge(word, kind));
  setText(byId('liveness'), text);
}
