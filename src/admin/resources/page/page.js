// The page of the node: sign-in, loading and display.

import { Api } from './api.js';
import { showCapacity } from './capacity.js';
import { now } from './clock.js';
import { problemBox } from './dialog.js';
import { badge, byId, duration, el, renew, setText, tick, visible, zone } from './dom.js';
import { Gpus } from './gpus.js';
import { Past } from './history.js';
import { listen } from './keys.js';
import { Live } from './live.js';
import { closeMenu } from './menu.js';
import { Model } from './model.js';
import { Route } from './route.js';
import { announce, announceText, notices, showStatusLine } from './status-line.js';

const VIEWS = { gpus: 'GPUs', pods: 'Pods', timeline: 'Timeline', policies: 'Policies', decisions: 'Decisions', links: 'Links' };
/** How often it is asked who the caller is: its right may change. Milliseconds. */
const ACCESS_MS = 60_000;
/** Between two texts of the ages and countdowns that are shown, milliseconds. */
const TICK_MS = 1000;
const NO_ANSWER = 'the daemon does not answer';
const READ_ONLY = 'this token may only read';

const api = new Api();
const route = new Route(routeChanged);
const gpus = new Gpus(api, route, { tools: byId('tools'), root: byId('gpus'), found: byId('found') }, () => shown, update);
let model;
let past;
let live;
let shown;
let drawer;
let updates = 0;
let newest = 0;
let accessAt = -Infinity;
/** When the shown state was loaded, and why no newer one could be. */
let shownAt = 0;
let failure;
/** The state of the event stream. */
let stream = '';
let ticking = 0;

byId('sign-in-form').addEventListener('submit', signIn);
byId('sign-out').addEventListener('click', () => signOut());
byId('help').addEventListener('click', () => act(async () => (await import('./help.js')).help(route)));
byId('activate').addEventListener('click', () => policies('change'));
byId('find').addEventListener('input', (event) => route.set({ q: event.target.value }, { replace: true }));
byId('skip').addEventListener('click', (event) => {
  // The fragment of the address is the state of the page.
  event.preventDefault();
  byId('main').focus();
});
// What cannot be used says why, instead of doing nothing.
document.addEventListener('click', (event) => {
  const control = event.target.closest?.('[aria-disabled=true]');
  if (!control) return;
  event.preventDefault();
  event.stopPropagation();
  announceText(`Not possible: ${control.title}`);
}, true);
listen(route, {
  '/': () => byId('find').focus(),
  j: () => step(1),
  k: () => step(-1),
  first: () => step(-Infinity),
  x: () => gpus.toggle(route.get('gpu') || gpus.focused()?.uuid),
  c: () => change('cordon', (gpu) => gpu.drain.state === 'active'),
  d: () => change('drain', () => true),
  '?': () => byId('help').click(),
  Escape: () => {
    if (drawer?.isOpen) drawer.close();
    else route.set({ q: '' });
  },
  view: (place) => Object.keys(VIEWS)[place] && route.set({ view: Object.keys(VIEWS)[place] }),
});
setText(byId('zone'), `Times are local (${zone()}).`);
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
    error.replaceChildren(problemBox(problem.status === 401 ? { title: 'The daemon does not accept this token', detail: 'It is not one of its tokens, or it was replaced.',
      hint: 'copy the whole line of the token file again; after “berth token rotate” the earlier token is not valid any more' } : problem));
    byId('token').focus();
    return;
  }
  byId('token').value = '';
  begin();
  byId('main').focus();
}

function showSignIn() {
  for (const id of ['node', 'sign-out', 'pulse', 'find-box', 'help']) byId(id).hidden = true;
  byId('sign-in').hidden = false;
  setText(byId('liveness'), 'Not signed in.');
  byId('token').focus();
}

function signOut(problem) {
  live?.stop();
  clearInterval(ticking);
  live = model = past = shown = failure = undefined;
  accessAt = -Infinity;
  shownAt = 0;
  stream = '';
  api.signOut();
  byId('dialog').close();
  closeMenu();
  drawer?.clear();
  announceText('');
  // The page keeps no data of the node.
  gpus.clear();
  for (const id of ['notices', 'status-line', 'views', 'capacity', 'pods', 'timeline', 'timeline-tools', 'stack', 'activations', 'decisions', 'links', 'who', 'where', 'pulse']) {
    byId(id).replaceChildren();
    delete byId(id).berthSign;
  }
  byId('find').value = '';
  route.set({ q: '', state: '', why: '', gpu: '', pod: '' }, { replace: true });
  delete document.body.dataset.why;
  document.body.classList.remove('stale');
  document.title = 'Berth';
  showSignIn();
  byId('sign-in-error').replaceChildren(...(problem ? [problemBox(problem)] : []));
}

function begin() {
  byId('find').value = route.get('q');
  byId('sign-in').hidden = true;
  for (const id of ['sign-out', 'pulse', 'find-box', 'help']) byId(id).hidden = false;
  model = new Model(api);
  past = new Past(model);
  live = new Live(api, { update, onState: showLiveness, onEvent: (event) => (event.kind === 'missed' ? past?.forgetEvents() : past?.add(event)) });
  live.start();
  clearInterval(ticking);
  ticking = setInterval(() => {
    tick();
    showAge();
  }, TICK_MS);
}

/** Loads and shows the state; `kinds` are those of the events since the last load. Returns the time of the work, ms. */
async function update(kinds = new Set()) {
  const requested = model;
  if (!requested) return 0;
  const order = (updates += 1);
  const view = route.get('view');
  const all = kinds.size === 0 || !shown;
  const access = all && performance.now() - accessAt > ACCESS_MS;
  try {
    const state = await requested.load({ allocations: all || [...kinds].some((kind) => /^(allocation|missed)/.test(kind)), stack: view === 'policies', decisions: view === 'decisions', access });
    // Of two concurrent loads the later one is shown.
    if (!api.signedIn || requested !== model || order < newest) return 0;
    newest = order;
    if (access) accessAt = performance.now();
    for (const part of ['stack', 'history', 'decisions', 'access']) state[part] ??= shown?.[part];
    failure = undefined;
    shownAt = now();
    const start = performance.now();
    announce(shown, state);
    shown = state;
    show();
    return performance.now() - start;
  } catch (problem) {
    // The user has signed out meanwhile.
    if (requested !== model) return 0;
    if (!problem.title) throw problem;
    if (problem.status === 401) {
      signOut({ title: 'Your token is no longer accepted', detail: 'It was valid when you signed in: since then it was replaced or removed.',
        hint: 'sign in with the present token; after “berth token rotate” it is in the daemon’s token file' });
    } else fail(problem);
    return 0;
  }
}

/**
 * The state that is shown is not the present one: it is dimmed, its age is shown, and nothing can be changed. The views are
 * not shown again, since they request data, which would fail in turn.
 */
function fail(problem) {
  failure = problem;
  byId('node').hidden = false;
  showFreshness();
  guardChanges();
}

/** The address has changed. */
function routeChanged() {
  closeMenu();
  if (!model) return;
  if (document.activeElement !== byId('find')) byId('find').value = route.get('q');
  if (shown) show();
  live.soon(0);
}

function show() {
  showFreshness();
  if (shown) {
    const { node } = shown;
    byId('node').hidden = false;
    document.title = `${node.name} – Berth`;
    renew(byId('where'), [node.name, node.version], () => [el('strong', {}, node.name), el('span', {}, ` Berth ${node.version}`)]);
    renew(byId('who'), shown.access, () => (shown.access ? `${shown.access.caller}: ${{ read: 'read only', change: 'full control', reviewed: 'each request is checked by the API server' }[shown.access.right] ?? shown.access.right}` : []));
    showStatusLine(byId('status-line'), shown, route);
    showViews();
    act(showView);
    act(showDrawer);
  }
  guardChanges();
}

function showViews() {
  const view = route.get('view');
  const names = Object.keys(VIEWS).filter((name) => name !== 'links' || shown.gpus.length > 1);
  const sums = { gpus: shown.gpus.length, pods: shown.pods.size };
  renew(byId('views'), [view, names, sums, location.hash], () => names.map((name) => el('a', { href: route.link({ view: name }), 'aria-current': name === view ? 'page' : undefined, onclick: (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    route.set({ view: name });
  } }, VIEWS[name], sums[name] !== undefined && el('span', { class: 'n' }, ` ${sums[name]}`))));
  for (const name of Object.keys(VIEWS)) byId(`view-${name}`).hidden = name !== view;
  if (!VIEWS[view]) route.set({ view: 'gpus' }, { replace: true });
}

/** Only the view that is open is kept up to date. */
async function showView() {
  const state = shown;
  const view = route.get('view');
  const context = { api, route };
  // Whatever arrives after a sign-out is not shown.
  if (view === 'gpus') {
    showCapacity(byId('capacity'), state, route);
    gpus.show(state);
    const hours = await past.hours(state.gpus);
    if (shown) gpus.showHours(hours, state.node);
  } else if (view === 'pods') {
    const { showPods } = await import('./pods.js');
    if (shown) showPods(byId('pods'), state, context);
  } else if (view === 'links') {
    const { showLinks } = await import('./links.js');
    if (shown) showLinks(byId('links'), state.gpus);
  } else if (view === 'decisions' && state.decisions) {
    const { showDecisions } = await import('./decisions.js');
    if (shown) showDecisions(byId('decisions'), state, route);
  } else if (view === 'timeline') {
    const read = past.events().then((events) => ({ events }), (problem) => ({ problem }));
    const [{ showTimeline }, events] = await Promise.all([import('./timeline.js'), read]);
    if (shown) showTimeline(byId('timeline'), byId('timeline-tools'), events, state, context);
  } else if (view === 'policies' && !state.stack) {
    for (const id of ['stack', 'activations']) renew(byId(id), 'loading', () => el('p', { class: 'muted' }, 'Loading…'));
  } else if (view === 'policies') {
    const stack = await import('./stack.js');
    if (!shown) return;
    stack.showStack(byId('stack'), state.stack, state.node, policies);
    stack.showHistory(byId('activations'), state.history, policies);
  }
  guardChanges();
}

async function showDrawer() {
  if (!drawer) {
    if (!route.get('gpu') && !route.get('pod')) return;
    const { Drawer } = await import('./drawer.js');
    drawer ??= new Drawer({ api, route, actions: (gpu) => gpus.actions(gpu), get past() { return past; } }, leaveDrawer);
  }
  if (shown) await drawer.show(shown);
  guardChanges();
}

/** The buttons that open the pods of the list, in its order. */
const podButtons = () => [...byId('pods').querySelectorAll('tbody tr')].map((row) => row.querySelector('button'));

/** Moves by so many rows of the list that is open: the drawer if there is one, else the focus. */
function step(by) {
  if (route.get('gpu') || route.get('view') === 'gpus') {
    gpus.move(by);
    return;
  }
  if (route.get('view') !== 'pods') return;
  const buttons = podButtons();
  const pod = route.get('pod');
  const at = buttons.findIndex((one) => (pod ? one.getAttribute('aria-label') === visible(`Pod ${pod}`) : one.closest('tr').contains(document.activeElement)));
  const next = buttons[at < 0 ? 0 : Math.max(0, Math.min(buttons.length - 1, at + by))];
  if (pod) next?.click();
  else next?.focus();
}

/** Moves the focus to what opened a drawer that is closed. */
function leaveDrawer(gpu, pod) {
  if (gpu) gpus.focusOn(gpu);
  else [...byId('main').querySelectorAll('button.link')].find((one) => one.checkVisibility() && one.getAttribute('aria-label') === visible(`Pod ${pod}`))?.focus();
}

/** Changes the GPU in the drawer, else the selected ones, else the one with the focus. */
function change(name, fits) {
  if (document.body.dataset.why) {
    announceText(`Not possible: ${document.body.dataset.why}`);
    return;
  }
  // What is changed is what the user looks at, not a row behind the drawer.
  const inDrawer = shown?.gpu.get(route.get('gpu'));
  const selected = inDrawer ? [inDrawer] : gpus.selected();
  const chosen = gpus.newest(selected.length > 0 ? selected : [gpus.focused()].filter(Boolean)).filter(fits);
  if (chosen.length > 0) act(() => gpus.change(name, chosen));
  else if (selected.length === 0 && !gpus.focused()) announceText('No GPU is chosen: choose one with j and k');
  else announceText(`Not possible: ${name} does not apply to ${selected.length > 1 ? 'these GPUs in their' : 'this GPU in its'} present state`);
}

async function policies(name, ...rest) {
  await act(async () => {
    const changed = name === 'change' ? await (await import('./policy-sheet.js')).policySheet(api, rest, shown)
      : await (await import('./stack.js'))[name](api, shown, ...rest);
    if (changed) await update();
  });
}

/** Runs what may fail; its failure is shown above everything else. */
async function act(does) {
  try {
    await does();
  } catch (problem) {
    if (!model) return;
    // A part of the page is loaded when it is first needed.
    if (problem instanceof TypeError && /module/i.test(problem.message)) fail({ title: 'No answer from the daemon', detail: 'a part of this page could not be loaded', hint: 'is the daemon running?' });
    else if (problem.title) fail(problem);
    else throw problem;
  }
}

function showFreshness() {
  document.body.classList.toggle('stale', !!failure);
  const why = failure ? NO_ANSWER : shown?.access?.right === 'read' ? READ_ONLY : '';
  if (why) document.body.dataset.why = why;
  else delete document.body.dataset.why;
  const content = failure ? [el('div', { role: 'alert', class: 'away' }, problemBox(failure), el('p', { id: 'age' }))]
    : shown ? notices(shown, shown.access, past?.lastEvents) : [];
  renew(byId('notices'), [failure?.title, failure?.detail, failure ? 0 : content.map((part) => part.textContent)], () => content);
  showLiveness();
}

function showAge() {
  const old = byId('age');
  if (old && shownAt) setText(old, `The state shown was loaded ${duration((now() - shownAt) / 1000)} ago, at ${new Date(shownAt).toLocaleTimeString('en-GB')}. Changes are not possible. The page tries again every 3 seconds.`);
  const clock = byId('clock');
  if (clock && shownAt) setText(clock, new Date(shownAt).toLocaleTimeString('en-GB'));
}

function guardChanges() {
  const all = document.body.dataset.why;
  for (const control of document.querySelectorAll('[data-change]')) {
    const why = all || control.dataset.why;
    control.setAttribute('aria-disabled', String(!!why));
    if (why) control.title = why;
    else control.removeAttribute('title');
  }
}

function showLiveness(state = stream) {
  stream = state;
  if (!stream && !failure) return;
  const [word, kind, text] = failure ? ['no answer', 'bad', 'The daemon does not answer: the page tries again every 3 seconds.'] : {
    live: ['live', 'good', 'Live: changes arrive as server-sent events; memory in use is read every 15 seconds.'],
    polling: ['every 3 s', 'plain', 'This daemon has no event stream (/api/v1/events): the page polls the daemon every 3 seconds.'],
    lost: ['not live', 'warn', 'The event stream was interrupted: until it is open again, the page polls every 3 seconds.'],
  }[state];
  renew(byId('pulse'), word, () => [badge(word, kind), ' ', el('time', { id: 'clock', title: 'time of the shown state' })]);
  setText(byId('liveness'), text);
  showAge();
}
