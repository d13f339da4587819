// The active stack, the history of stacks, and going back to an earlier one.

import { ask, field } from './dialog.js';
import { badge, button, count, el, number, renew, shortDigest, table, timeOf } from './dom.js';

export const entryText = (entry) => `${entry.policy} ${JSON.stringify(entry.parameters)}`;

/** `act(name, ...)` carries out `change`, `unsuspend`, `reset`. */
export function showStack(root, stack, act) {
  // Calls are counted continuously: the table is rebuilt only if what it shows has changed.
  renew(root, [stack, document.body.dataset.why], () => {
    const by = stack.by ? ` by ${stack.by}` : '';
    const revision = el('p', { class: 'muted' }, `Revision ${stack.revision}, ${stack.source === 'api' ? `activated${by}` : 'from the configuration file'}`,
      stack.why ? `: ${stack.why}` : '', stack.since ? [' since ', timeOf(stack.since)] : []);
    const { fileStack } = stack;
    const file = [
      fileStack.error && el('p', { class: 'note bad' }, `The configuration file’s stack cannot be used: ${fileStack.error}`),
      fileStack.shadowed && el('p', { class: 'muted' }, `The configuration file’s stack is overridden: ${fileStack.entries.map((e) => e.policy).join(', ') || 'no policy'}. `,
        button('Use the file’s stack again…', () => act('reset'), { change: true, kind: 'small' })),
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
      button('Change…', () => act('change', entry), { change: true, kind: 'small', name: `Change ${entry.policy}` }),
    ]);
    return [revision, table('Policies, in the order of their calls', ['Position', 'Policy', 'Parameters', 'On fault', 'Calls', 'State', ''], rows, 'stacked'), ...file];
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

export function unsuspend(api, stack, entry, position) {
  return ask({
    title: `Resume ${entry.policy}?`,
    words: [`It is suspended and not called. Last fault: ${entry.record?.faults.last ?? 'not known'}.`],
    label: 'Resume',
    act: () => api.delete(`/stack/entries/${position}/suspension`, ifMatch(stack)),
  });
}

const reasonInput = () => el('input', { id: 'reason', type: 'text', maxlength: 1000, autocomplete: 'off' });

export function rollBack(api, stack, to) {
  const reason = reasonInput();
  return ask({
    title: `Roll back to revision ${to.revision}?`,
    words: ['Every policy is called on this node first; nothing changes if one fails. Existing allocations stay.'],
    fields: [difference(stack.entries, to.entries), field('Reason', reason, 'Kept in the history of stacks.')],
    label: 'Roll back',
    danger: true,
    act: () => api.post('/stack/rollback', { revision: to.revision, reason: reason.value.trim() }, ifMatch(stack)),
  });
}

export function reset(api, stack) {
  const reason = reasonInput();
  return ask({
    title: 'Use the configuration file’s stack?',
    words: ['The stack that was activated here is no longer active; it stays in the history.'],
    fields: [difference(stack.entries, stack.fileStack.entries), field('Reason', reason, 'Kept in the history of stacks.')],
    label: 'Use the file’s stack',
    danger: true,
    act: () => api.delete(`/stack/override?reason=${encodeURIComponent(reason.value.trim())}`, ifMatch(stack)),
  });
}

/** The entries that are removed, added and unchanged. */
export function difference(before, after) {
  const [old, made] = [before.map(entryText), after.map(entryText)];
  const lines = [...old.filter((text) => !made.includes(text)).map((text) => ['del', '− ', text]), ...made.map((text) => (old.includes(text) ? ['span', '  ', text] : ['ins', '+ ', text]))];
  return el('div', { class: 'difference' }, el('p', { class: 'muted' }, 'What changes:'), el('ul', {}, lines.map(([tag, sign, text]) => el('li', {}, el(tag, {}, sign, text)))),
    lines.length === 0 && el('p', {}, 'No policy: each GPU is offered whole.'), old.join() === made.join() && old.length > 0 && el('p', {}, 'Policies and parameters stay as they are.'));
}
