// The active stack, and activating a policy in it.

import { ask, field } from './dialog.js';
import { badge, byId, count, el, number, renew, shortDigest, table, timeOf } from './dom.js';

export function showStack(root, stack, act) {
  const focused = root.contains(document.activeElement) ? document.activeElement.dataset.place : undefined;
  // Calls are counted continuously: the table is rebuilt only if what it shows has changed.
  const renewed = renew(root, stack, () => {
    const by = stack.by ? ` by ${stack.by}` : '';
    const revision = el('p', { class: 'muted' }, `Revision ${stack.revision}, ${stack.source === 'api' ? `activated${by}` : 'from the configuration file'}`,
      stack.why ? `: ${stack.why}` : '', stack.since ? [' since ', timeOf(stack.since)] : []);
    const fileError = stack.fileStack.error
      && el('p', { class: 'note bad' }, `The configuration file’s stack cannot be used: ${stack.fileStack.error}`);
    const overridden = stack.fileStack.shadowed && stack.fileStack.entries.length > 0
      && el('p', { class: 'muted' }, `The configuration file’s stack is overridden: ${stack.fileStack.entries.map((e) => e.policy).join(', ')}`);
    if (stack.entries.length === 0) {
      return [revision, el('p', {}, 'No policy is active: the built-in baseline offers each GPU whole.'), fileError, overridden].filter(Boolean);
    }
    const rows = stack.entries.map((entry, place) => [
      String(place),
      [el('strong', {}, entry.policy), ` ${entry.version ?? ''} `, el('code', { title: entry.digest }, shortDigest(entry.digest))],
      el('code', { class: 'json' }, JSON.stringify(entry.parameters)),
      entry.onFault === 'deny' ? 'deny' : 'skip',
      calls(entry.record),
      policyState(entry, place, act),
    ]);
    return [revision, table('Policies, in the order of their calls', ['Place', 'Policy', 'Parameters', 'On fault', 'Calls', 'State'], rows, 'stacked'), fileError, overridden].filter(Boolean);
  });
  if (renewed && focused !== undefined) root.querySelector(`[data-place="${focused}"]`)?.focus();
}

function calls(record) {
  if (!record) return '–';
  const hooks = Object.entries(record.calls).map(([hook, n]) => `${hook} ${number(n)}`);
  return hooks.join(', ') || 'none yet';
}

function policyState(entry, place, act) {
  const { record } = entry;
  if (!record) return badge('not called yet', 'plain');
  const faults = Object.values(record.faults.byKind).reduce((sum, n) => sum + n, 0);
  const last = record.faults.last && el('p', { class: 'muted last' }, `last: ${record.faults.last}`);
  if (record.suspended) {
    return [badge(`suspended after ${count(faults, 'fault')}`, 'bad'), last, ' ',
      el('button', { type: 'button', 'data-place': place, onclick: () => act('unsuspend', entry, place) }, 'Resume…')].filter(Boolean);
  }
  if (faults > 0) return [badge(`${count(faults, 'fault')}${record.faults.inARow ? `, ${record.faults.inARow} in a row` : ''}`, 'warn'), last].filter(Boolean);
  return badge('working', 'good');
}

export function unsuspend(api, stack, entry, place) {
  return ask({
    title: `Resume ${entry.policy}?`,
    words: [`It is suspended and not called. Last fault: ${entry.record?.faults.last ?? 'not known'}.`],
    label: 'Resume',
    act: () => api.delete(`/stack/entries/${place}/suspension`, { 'If-Match': `"${stack.revision}"` }),
  });
}

/** Positions in the stack: of an existing entry, at an end, or alone. */
function places(stack) {
  const options = stack.entries.map((entry, i) => ({ value: `at-${i}`, text: `in place of ${entry.policy} (place ${i})`, policy: entry.policy }));
  if (stack.entries.length > 0) options.push({ value: 'first', text: 'before all others' }, { value: 'last', text: 'after all others' });
  options.push({ value: 'only', text: stack.entries.length > 0 ? 'alone: all others are removed from the stack' : 'alone' });
  return options;
}

/** The fields of an unchanged entry that are sent to the daemon. */
const kept = ({ policy, digest, parameters, permissions, onFault }) => ({ policy, digest, parameters, permissions, onFault });

function assembled(stack, entry, place) {
  const entries = stack.entries.map(kept);
  if (place === 'only') return [entry];
  if (place === 'first') return [entry, ...entries];
  if (place === 'last') return [...entries, entry];
  const at = Number(place.slice(3));
  // An entry that replaces one of the same policy keeps its permissions.
  const { permissions } = entries[at];
  entries[at] = entries[at].policy === entry.policy ? { ...entry, permissions } : entry;
  return entries;
}

/** All versions, page by page. */
async function versions(api) {
  const items = [];
  let path = '/policies';
  while (path) {
    const answer = await api.get(path);
    items.push(...answer.items);
    path = answer.next ? `/policies?cursor=${encodeURIComponent(answer.next)}` : '';
  }
  return items;
}

export async function activate(api) {
  const [{ data: stack, etag }, items] = await Promise.all([api.getWithTag('/stack'), versions(api)]);
  const policies = items.toSorted((a, b) => Number(b.active) - Number(a.active) || a.name.localeCompare(b.name) || b.since.localeCompare(a.since));
  const choice = el('select', { id: 'policy', required: true }, policies.map((p) => el('option', { value: p.digest },
    `${p.name} ${p.version} · ${shortDigest(p.digest)}${p.active ? ' (active)' : p.shipped ? '' : ' (uploaded)'}`)));
  const place = el('select', { id: 'place' }, places(stack).map(({ value, text }) => el('option', { value }, text)));
  const parameters = el('textarea', { id: 'parameters', rows: 4, spellcheck: 'false', autocapitalize: 'off' });
  const onFault = el('select', { id: 'on-fault' }, el('option', { value: 'skip' }, 'skip: the next policy is called'), el('option', { value: 'deny' }, 'deny: nothing is granted'));
  const reason = el('input', { id: 'reason', type: 'text', required: true, maxlength: 1000, autocomplete: 'off' });
  const preview = el('p', { class: 'preview', role: 'status' });
  const chosen = () => policies.find((p) => p.digest === choice.value);
  const entry = () => ({ policy: chosen().name, digest: chosen().digest, parameters: parsed(parameters.value), onFault: onFault.value });
  const see = () => {
    const made = assembled(stack, { policy: chosen().name }, place.value);
    preview.textContent = `The stack will be: ${made.map((e) => e.policy).join(', ')}`;
  };
  const choose = () => {
    const policy = chosen();
    const at = stack.entries.findIndex((e) => e.policy === policy.name);
    byId('policy-help').textContent = policy.summary;
    place.value = at >= 0 ? `at-${at}` : stack.entries.length > 0 ? 'last' : 'only';
    parameters.value = JSON.stringify(at >= 0 ? stack.entries[at].parameters : {}, null, 2);
    onFault.value = at >= 0 ? stack.entries[at].onFault : 'skip';
    see();
  };
  choice.addEventListener('change', choose);
  place.addEventListener('change', see);
  const asked = ask({
    title: 'Activate a policy',
    words: ['The new stack is evaluated on this node and becomes active only if every policy gives a valid answer. Existing allocations stay.'],
    fields: [
      field('Policy and version', choice, ' '),
      field('Where', place),
      field('Parameters (JSON)', parameters, 'The policy’s documentation and schema list them.'),
      field('On fault', onFault),
      field('Reason', reason, 'Kept in the history of stacks.'),
      preview,
    ],
    label: 'Activate',
    danger: true,
    act: () => api.put('/stack', { entries: assembled(stack, entry(), place.value), reason: reason.value.trim() },
      { 'If-Match': etag ?? `"${stack.revision}"` }),
  });
  choose();
  return asked;
}

function parsed(text) {
  try {
    const value = JSON.parse(text.trim() || '{}');
    if (value === null || typeof value !== 'object' || Array.isArray(value)) throw new Error('an object such as {"replicas": 4} is needed');
    return value;
  } catch (error) {
    throw Object.assign(new Error(error.message), { title: 'The parameters are not a JSON object', detail: error.message });
  }
}
