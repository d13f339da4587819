// The active stack, the history of stacks, and going back to an earlier one.

import { ask, field } from './dialog.js';
import { badge, button, count, el, number, renew, shortDigest, table, timeOf } from './dom.js';
import { sent, trialOf } from './trial.js';

export const entryText = (entry) => `${entry.policy} ${JSON.stringify(entry.parameters)}`;

/** `act(name, ...)` carries out `change`, `remove`, `unsuspend`, `reset`. */
export function showStack(root, stack, node, act) {
  // Calls are counted continuously: the table is rebuilt only if what it shows has changed.
  renew(root, [stack, node.startedAt, document.body.dataset.why], () => {
    const by = stack.by ? ` by ${stack.by}` : '';
    const source = { api: `activated${by}`, file: 'from the configuration file', fleet: `from the GPUNode (${stack.by})` }[stack.source] ?? stack.source;
    const revision = el('p', { class: 'muted' }, `Revision ${stack.revision}, ${source}`,
      stack.why ? `: ${stack.why}` : '', stack.since ? [' since ', timeOf(stack.since)] : []);
    const { fileStack } = stack;
    const file = [
      fileStack.error && el('p', { class: 'note bad' }, `The configuration file’s stack cannot be used: ${fileStack.error}`),
      fileStack.shadowed && el('p', { class: 'muted' }, `The configuration file’s stack is overridden: ${fileStack.entries.map((e) => e.policy).join(', ') || 'no policy'}. `,
        stack.source === 'api' && button('Use the file’s stack again…', () => act('reset'), { change: true, kind: 'small' })),
      ...(stack.warnings ?? []).map((text) => el('p', { class: 'note warn' }, text)),
    ];
    if (stack.entries.length === 0) return [revision, el('p', {}, 'No policy is active: the built-in baseline offers each GPU whole.'), ...file];
    const rows = stack.entries.map((entry, position) => [
      String(position),
      [el('strong', {}, entry.policy), ` ${entry.version ?? ''} `, el('code', { title: entry.digest }, shortDigest(entry.digest))],
      el('code', { class: 'json' }, JSON.stringify(entry.parameters)),
      entry.onFault === 'deny' ? 'deny' : 'skip',
      calls(entry.record),
      policyState(entry, position, act),
      [button('Change…', () => act('change', entry, position), { change: true, kind: 'small', name: `Change ${entry.policy}` }), ' ',
        button('Remove…', () => act('remove', entry, position), { change: true, kind: 'small', name: `Remove ${entry.policy}` })],
    ]);
    const since = [stack.since, node.startedAt].filter(Boolean).map(Date.parse);
    const counted = since.length > 0 && el('p', { class: 'muted' }, 'Calls and faults are counted since ', timeOf(new Date(Math.max(...since)).toISOString()),
      Math.max(...since) === Date.parse(node.startedAt) ? ', when the daemon started.' : ', when this stack was activated.');
    return [revision, table('Policies, in the order of their calls', ['Position', 'Policy', 'Parameters', 'On fault', 'Calls', 'State', ''], rows, 'stacked'), counted, ...file];
  });
}

function calls(record) {
  if (!record) return '–';
  const hooks = Object.entries(record.calls).map(([hook, n]) => `${hook} ${number(n)}`);
  return hooks.join(', ') || 'none yet';
}

function policyState(entry, position, act) {
  const { record } = entry;
  if (!record) return badge('not called yet', 'plain');
  const faults = Object.values(record.faults.byKind).reduce((sum, n) => sum + n, 0);
  const last = record.faults.last && el('p', { class: 'muted last' }, `last: ${record.faults.last}`);
  if (record.suspended) {
    return [badge(`suspended after ${count(faults, 'fault')}`, 'bad'), last, ' ',
      button('Resume…', () => act('unsuspend', entry, position), { change: true, kind: 'small' })];
  }
  if (faults > 0) return [badge(`${count(faults, 'fault')}${record.faults.inARow ? `, ${record.faults.inARow} in a row` : ''}`, 'warn'), last];
  return badge('working', 'good');
}

/** Earlier stacks, newest first, each with the way back to it. */
export function showHistory(root, activations, act) {
  renew(root, [activations, document.body.dataset.why], () => table('Active and earlier stacks, newest first', ['Revision', 'Since', 'By', 'Reason', 'Policies', ''], activations.map((one) => [
    [`${one.revision} `, one.active && badge('active', 'good')], one.since ? timeOf(one.since) : '–', one.by ?? '–', one.why ?? (one.source === 'file' ? 'the configuration file' : '–'),
    el('code', { class: 'json' }, one.entries.map(entryText).join('\n') || 'none: each GPU whole'),
    one.active ? '–' : button('Roll back…', () => act('rollBack', one), { change: true, kind: 'small', name: `Roll back to revision ${one.revision}`,
      why: one.gone?.length ? `versions were deleted: ${one.gone.join(', ')}` : undefined }),
  ]), 'stacked'));
}

const ifMatch = (stack) => ({ 'If-Match': `"${stack.revision}"` });

export function unsuspend(api, { stack }, entry, position) {
  return ask({
    title: `Resume ${entry.policy}?`,
    words: [`It is suspended and not called. Last fault: ${entry.record?.faults.last ?? 'not known'}.`],
    label: 'Resume',
    act: () => api.delete(`/stack/entries/${position}/suspension`, ifMatch(stack)),
  });
}

const reasonInput = (required = false) => el('input', { id: 'reason', type: 'text', maxlength: 1000, autocomplete: 'off', required });
const KEPT = 'Kept in the history of stacks.';

/** Asks for a change to another stack: what differs, what it does on this node, and the reason. */
function askForStack(api, state, { entries, reason, ...rest }) {
  const trial = trialOf(api, entries, state);
  return ask({ ...rest, danger: true, wide: true, guard: trial.guard, fields: [difference(state.stack.entries, entries), trial.box, field('Reason', reason, KEPT)] });
}

export function remove(api, state, entry, position) {
  const { stack } = state;
  const reason = reasonInput(true);
  const entries = stack.entries.filter((_, at) => at !== position);
  return askForStack(api, state, {
    title: `Remove ${entry.policy} from the stack?`,
    words: [`The other policies stay as they are${entries.length === 0 ? '; there is none, so that each GPU is offered whole' : ''}. Existing allocations stay.`],
    entries, reason,
    label: 'Remove',
    act: () => api.put('/stack', { entries: entries.map(sent), reason: reason.value.trim() }, ifMatch(stack)),
  });
}

export function rollBack(api, state, to) {
  const reason = reasonInput();
  return askForStack(api, state, {
    title: `Roll back to revision ${to.revision}?`,
    words: ['Every policy is called on this node first; nothing changes if one fails. Existing allocations stay.'],
    entries: to.entries, reason,
    label: 'Roll back',
    act: () => api.post('/stack/rollback', { revision: to.revision, reason: reason.value.trim() }, ifMatch(state.stack)),
  });
}

export function reset(api, state) {
  const reason = reasonInput();
  return askForStack(api, state, {
    title: 'Use the configuration file’s stack?',
    words: ['The stack that was activated here is no longer active; it stays in the history.'],
    entries: state.stack.fileStack.entries, reason,
    label: 'Use the file’s stack',
    act: () => api.delete(`/stack/override?reason=${encodeURIComponent(reason.value.trim())}`, ifMatch(state.stack)),
  });
}

/** The entries that are removed, added, moved and unchanged. */
export function difference(before, after) {
  const [old, made] = [before.map(entryText), after.map(entryText)];
  const kept = made.filter((text) => old.includes(text));
  const moved = kept.filter((text, at) => old.filter((other) => made.includes(other))[at] !== text);
  const lines = [...old.filter((text) => !made.includes(text)).map((text) => ['del', '− ', text]),
    ...made.map((text) => (!old.includes(text) ? ['ins', '+ ', text] : moved.includes(text) ? ['ins', '↕ ', text] : ['span', '  ', text]))];
  return el('div', { class: 'difference' }, el('p', { class: 'muted' }, 'What changes:'), el('ul', {}, lines.map(([tag, sign, text]) => el('li', {}, el(tag, {}, sign, text)))),
    lines.length === 0 && el('p', {}, 'No policy: each GPU is offered whole.'), old.join() === made.join() && old.length > 0 && el('p', {}, 'Policies and parameters stay as they are.'));
}
