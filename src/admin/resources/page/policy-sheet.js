// The policy sheet: choose a policy, its parameters and its position, try the stack that results on the node as it is, see
// the difference, activate it.

import { attempt, closeSheet, confirmButton, confirmByButton, field, isComplete, sheet } from './dialog.js';
import { button, byId, el, setText, shortDigest } from './dom.js';
import { SchemaForm } from './schema-form.js';
import { difference } from './stack.js';
import { sent, trialReport, tryStack } from './trial.js';

/**
 * The positions that an entry can have: among the others, in place of one of them if it is new, or alone. `from` is its
 * present one, or -1 for a new entry.
 */
function positions({ entries }, from) {
  const others = entries.filter((_, at) => at !== from);
  if (others.length === 0) return [{ value: 'only', text: 'alone' }];
  const place = (at) => (at === 0 ? `first, before ${others[0].policy}` : `after ${others[at - 1].policy}${at === others.length ? ', last' : ''}`);
  const options = [...others, null].map((_, at) => ({ value: `at-${at}`, text: place(at) + (at === from ? ' (as it is)' : '') }));
  if (from < 0) options.push(...entries.map((entry, at) => ({ value: `instead-${at}`, text: `in place of ${entry.policy}` })));
  return [...options, { value: 'only', text: 'alone: all others are removed from the stack' }];
}

/** The stack with an entry at a position. The entry that is there already moves, and keeps its permissions. */
function assembled({ entries }, from, made, position) {
  const entry = { ...made, permissions: entries[from]?.permissions };
  if (position === 'only') return [entry];
  const [kind, place] = position.split('-');
  if (kind === 'instead') return entries.with(Number(place), entry);
  return entries.filter((_, at) => at !== from).toSpliced(Number(place), 0, entry);
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

/**
 * Opens the sheet for an entry of the stack and its position, or for a new entry. `state` is what the page shows. Resolves to
 * whether a stack was activated.
 */
export async function policySheet(api, [changed, changedAt] = [], state) {
  const [{ data: stack, etag }, items] = await Promise.all([api.getWithTag('/stack'), versions(api)]);
  // The user has signed out meanwhile.
  if (!api.signedIn) return false;
  // The stack may have changed since the page showed it.
  const isChanged = (entry) => entry?.policy === changed?.policy && entry?.digest === changed?.digest;
  const opened = !changed ? -1 : isChanged(stack.entries[changedAt]) ? changedAt : stack.entries.findIndex(isChanged);
  const policies = items.toSorted((a, b) => Number(b.active) - Number(a.active) || a.name.localeCompare(b.name) || b.since.localeCompare(a.since));
  const choice = el('select', { id: 'policy' }, policies.map((p) => el('option', { value: p.digest },
    `${p.name} ${p.version} · ${shortDigest(p.digest)}${p.active ? ' (active)' : p.shipped ? '' : ' (uploaded)'}`)));
  const position = el('select', { id: 'position' });
  const onFault = el('select', { id: 'on-fault' }, el('option', { value: 'skip' }, 'skip: the next policy is called'), el('option', { value: 'deny' }, 'deny: nothing is granted'));
  const amount = el('input', { id: 'try-count', type: 'number', min: 1, max: 2048, placeholder: 'none' });
  const resource = el('input', { id: 'try-resource', type: 'text', value: 'nvidia.com/gpu.shared', spellcheck: 'false', autocomplete: 'off' });
  const reason = el('input', { id: 'reason', type: 'text', required: true, maxlength: 1000, autocomplete: 'off' });
  const box = el('div', {});
  const preview = el('div', { class: 'preview', role: 'status' });
  const result = el('div', { class: 'trial', role: 'status' });
  const failed = el('div', { role: 'alert' });
  const yes = confirmButton('Activate', true);
  const trial = button('Try', () => attempt(trial, failed, tryIt), { kind: 'main' });
  const title = el('h2', { id: 'dialog-title' });
  let form;
  /** The position of the entry that is changed; -1 for a new one. */
  let from = -1;
  const buttons = el('div', { class: 'buttons' }, yes.why, trial, button('Cancel', closeSheet), yes.button);
  let tried = '';
  let done = false;
  const chosen = () => policies.find((p) => p.digest === choice.value);
  const wanted = () => assembled(stack, from, { policy: chosen().name, digest: chosen().digest, parameters: form.value(), onFault: onFault.value }, position.value).map(sent);
  const refresh = () => {
    let made;
    try {
      made = wanted();
      yes.guard(tried === '' ? 'try it first, which changes nothing' : tried === JSON.stringify(made) ? '' : 'it was changed since it was tried: try it again');
    } catch (problem) {
      yes.guard(problem.title);
      // The preview and the result are removed, since they are not of the values that the fields have now.
      preview.replaceChildren();
      result.replaceChildren();
      return;
    }
    failed.replaceChildren();
    preview.replaceChildren(el('p', {}, `The stack will be: ${made.map((e) => e.policy).join(', ')}`), difference(stack.entries, made));
  };
  const choose = async () => {
    const policy = chosen();
    from = stack.entries[opened]?.policy === policy.name ? opened : stack.entries.findIndex((e) => e.policy === policy.name);
    setText(title, opened >= 0 && from === opened ? `Change ${policy.name}` : 'Activate a policy');
    setText(byId('policy-help'), policy.summary);
    position.replaceChildren(...positions(stack, from).map(({ value, text }) => el('option', { value }, text)));
    position.value = from >= 0 ? `at-${from}` : opened >= 0 ? `instead-${opened}` : 'at-0';
    if (position.selectedIndex < 0) position.value = 'only';
    onFault.value = stack.entries[from]?.onFault ?? 'skip';
    const { parametersSchema } = await api.get(`/policies/${policy.digest}`).catch(() => ({}));
    if (chosen() !== policy) return;
    form = new SchemaForm(parametersSchema, stack.entries[from]?.parameters ?? {});
    box.replaceChildren(form.root);
    result.replaceChildren();
    refresh();
  };
  /** Its failure is shown under the field that it is about, else above the buttons. */
  const tryIt = async () => {
    buttons.before(failed);
    try {
      await runTrial();
    } catch (problem) {
      form.fieldOf(problem)?.append(failed);
      throw problem;
    }
  };
  const runTrial = async () => {
    result.replaceChildren();
    const entries = wanted();
    const report = await tryStack(api, entries, amount.value === '' ? undefined : { resource: resource.value.trim(), count: Number(amount.value) });
    result.replaceChildren(...trialReport(report, state));
    result.scrollIntoView({ block: 'nearest' });
    tried = report.refused ? '' : JSON.stringify(entries);
    refresh();
    if (report.refused) yes.guard('this stack would be refused');
  };
  const sheetForm = el('form', { oninput: () => form && refresh() },
    title,
    el('p', {}, 'Try it: the policies of the stack that results are called on a copy of this node’s state. Nothing changes. Then activate exactly that stack. Existing allocations stay.'),
    field('Policy and version', choice, ' '),
    box,
    el('div', { class: 'pair' }, field('Position in the stack', position), field('On fault', onFault)),
    el('fieldset', {}, el('legend', {}, 'Try it'), el('div', { class: 'pair' }, field('Devices to request', amount, 'Optional. Shows where they would be placed.'), field('Resource', resource)),
      result), preview,
    field('Reason', reason, 'Kept in the history of stacks.'),
    failed, buttons);
  confirmByButton(sheetForm);
  sheetForm.addEventListener('submit', async (event) => {
    event.preventDefault();
    buttons.before(failed);
    if (!yes.isFree(failed) || !isComplete(sheetForm)) return;
    done = await attempt(yes.button, failed, () => api.put('/stack', { entries: wanted(), reason: reason.value.trim() }, { 'If-Match': etag ?? `"${stack.revision}"` }));
    if (done) closeSheet();
  });
  choice.addEventListener('change', choose);
  choice.value = (policies.find((p) => p.digest === stack.entries[opened]?.digest) ?? policies[0]).digest;
  yes.guard('try it first, which changes nothing');
  const closed = sheet(sheetForm, { wide: true });
  await choose();
  await closed;
  return done;
}
