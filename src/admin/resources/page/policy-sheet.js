// The policy sheet: choose a policy and its parameters, try them on the node as it is, see the difference, activate.

import { byNumber, named } from './changes.js';
import { attempt, closeSheet, confirmByButton, field, problemBox, sheet } from './dialog.js';
import { button, byId, count, el, setText, shortDigest, table } from './dom.js';
import { SchemaForm } from './schema-form.js';
import { difference } from './stack.js';
import { listed } from './words.js';

/** Positions in the stack: of an existing entry, at an end, or alone. */
function positions(stack) {
  const options = stack.entries.map((entry, i) => ({ value: `at-${i}`, text: `in place of ${entry.policy} (position ${i})` }));
  if (stack.entries.length > 0) options.push({ value: 'first', text: 'before all others' }, { value: 'last', text: 'after all others' });
  options.push({ value: 'only', text: stack.entries.length > 0 ? 'alone: all others are removed from the stack' : 'alone' });
  return options;
}

/** The fields of an unchanged entry that are sent to the daemon. */
const kept = ({ policy, digest, parameters, permissions, onFault }) => ({ policy, digest, parameters, permissions, onFault });

/** The permissions of the entry that is replaced: one of the same policy keeps them. */
function keptPermissions({ entries }, policy, position) {
  if (position === 'only') return entries.find((entry) => entry.policy === policy)?.permissions;
  const replaced = position.startsWith('at-') ? entries[Number(position.slice(3))] : undefined;
  return replaced?.policy === policy ? replaced.permissions : undefined;
}

function assembled(stack, made, position) {
  const entry = { ...made, permissions: keptPermissions(stack, made.policy, position) };
  const entries = stack.entries.map(kept);
  if (position === 'only') return [entry];
  if (position === 'first') return [entry, ...entries];
  if (position === 'last') return [...entries, entry];
  entries[Number(position.slice(3))] = entry;
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

/**
 * Opens the sheet; `first` is the name of the policy that is changed, if one is, and `state` what the page shows. Resolves to
 * whether a stack was activated.
 */
export async function policySheet(api, first, state) {
  const [{ data: stack, etag }, items] = await Promise.all([api.getWithTag('/stack'), versions(api)]);
  // The user has signed out meanwhile.
  if (!api.signedIn) return false;
  const policies = items.toSorted((a, b) => Number(b.active) - Number(a.active) || a.name.localeCompare(b.name) || b.since.localeCompare(a.since));
  const choice = el('select', { id: 'policy', required: true }, policies.map((p) => el('option', { value: p.digest },
    `${p.name} ${p.version} · ${shortDigest(p.digest)}${p.active ? ' (active)' : p.shipped ? '' : ' (uploaded)'}`)));
  const position = el('select', { id: 'position' }, positions(stack).map(({ value, text }) => el('option', { value }, text)));
  const onFault = el('select', { id: 'on-fault' }, el('option', { value: 'skip' }, 'skip: the next policy is called'), el('option', { value: 'deny' }, 'deny: nothing is granted'));
  const amount = el('input', { id: 'try-count', type: 'number', min: 1, max: 2048, placeholder: 'none' });
  const resource = el('input', { id: 'try-resource', type: 'text', value: 'nvidia.com/gpu.shared', spellcheck: 'false', autocomplete: 'off' });
  const reason = el('input', { id: 'reason', type: 'text', required: true, maxlength: 1000, autocomplete: 'off' });
  const box = el('div', {});
  const preview = el('div', { class: 'preview', role: 'status' });
  const result = el('div', { class: 'trial', role: 'status' });
  const failed = el('div', { role: 'alert' });
  const yes = el('button', { type: 'submit', class: 'danger' }, 'Activate');
  const trial = button('Try', () => attempt(trial, failed, tryIt), { kind: 'main' });
  const title = el('h2', { id: 'dialog-title' });
  let form;
  const buttons = el('div', { class: 'buttons' }, trial, button('Cancel', closeSheet), yes);
  let triedStack = '';
  let done = false;
  const chosen = () => policies.find((p) => p.digest === choice.value);
  const entry = () => ({ policy: chosen().name, digest: chosen().digest, parameters: form.value(), onFault: onFault.value });
  const requestedStack = () => JSON.stringify([entry(), position.value]);
  const guard = (why) => {
    yes.setAttribute('aria-disabled', String(!!why));
    yes.title = why;
    yes.dataset.why = why;
  };
  const refresh = () => {
    let made;
    try {
      made = assembled(stack, entry(), position.value);
      guard(triedStack === '' ? 'try it first: that changes nothing' : triedStack === requestedStack() ? '' : 'it was changed since it was tried: try it again');
    } catch (problem) {
      guard(problem.title);
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
    const at = stack.entries.findIndex((e) => e.policy === policy.name);
    setText(title, policy.name === first ? `Change ${first}` : 'Activate a policy');
    byId('policy-help').textContent = policy.summary;
    position.value = at >= 0 ? `at-${at}` : stack.entries.length > 0 ? 'first' : 'only';
    onFault.value = at >= 0 ? stack.entries[at].onFault : 'skip';
    const { parametersSchema } = await api.get(`/policies/${policy.digest}`).catch(() => ({}));
    if (chosen() !== policy) return;
    form = new SchemaForm(parametersSchema, at >= 0 ? stack.entries[at].parameters : {});
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
    const wanted = requestedStack();
    const made = entry();
    const body = { ...made, alone: position.value === 'only', permissions: keptPermissions(stack, made.policy, position.value) };
    if (amount.value !== '') body.request = { resource: resource.value.trim(), count: Number(amount.value) };
    const report = await api.post('/trials', body);
    result.replaceChildren(...trialReport(report, state));
    result.scrollIntoView({ block: 'nearest' });
    triedStack = report.refused ? '' : wanted;
    refresh();
    if (report.refused) guard('this stack would be refused');
  };
  const sheetForm = el('form', { oninput: () => form && refresh() },
    title,
    el('p', {}, 'Try it: the policy is called on a copy of this node’s state, in place of the entry of the same name or before all others. Nothing changes. Then activate it. Existing allocations stay.'),
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
    if (yes.dataset.why) {
      failed.replaceChildren(problemBox({ title: 'Not activated', detail: yes.dataset.why }));
      return;
    }
    done = await attempt(yes, failed, () => api.put('/stack', { entries: assembled(stack, entry(), position.value), reason: reason.value.trim() }, { 'If-Match': etag ?? `"${stack.revision}"` }));
    if (done) closeSheet();
  });
  choice.addEventListener('change', choose);
  choice.value = (policies.find((p) => p.name === first && p.active) ?? policies.find((p) => p.name === first) ?? policies[0]).digest;
  guard('try it first: that changes nothing');
  const closed = sheet(sheetForm, { wide: true });
  await choose();
  await closed;
  return done;
}

/** What a trial found: devices before and after, GPUs that change, and where a request would be. */
function trialReport(report, { node, gpus }) {
  const differs = report.offers.filter((offer) => offer.differs);
  const change = (now, then) => (now === then ? String(now) : [el('del', {}, String(now)), ' ', el('ins', {}, String(then))]);
  const faults = report.calls.filter((call) => call.fault);
  const { request } = report;
  const taken = report.resources.filter((r) => r.freeNow > 0 && r.free === 0).map((r) => r.resource);
  // A trial does not see GPUs that vanished; the page counts their devices.
  const away = gpus.filter((gpu) => gpu.health.state === 'vanished');
  const without = report.resources.some((r) => node.resources.some((shown) => shown.resource === r.resource && shown.devices !== r.devicesNow)) && away.length > 0;
  return [
    report.refused ? el('p', { class: 'notice bad' }, `It would be refused: ${report.refused}`)
      : el('p', { class: `notice ${taken.length > 0 ? 'warn' : 'good'}` }, `${taken.length > 0 ? `It works, but no device of ${listed(taken)} would be free.` : 'It works on this node.'} ${differs.length === 0 ? 'No GPU is offered differently.' : `${count(differs.length, 'GPU')} would be offered differently: ${listed(differs.slice(0, 20).map((offer) => offer.name.replace('GPU ', '')))}.`}`),
    !report.refused && table('Devices now and after activation', ['Resource', 'Devices', 'Free'], report.resources.map((r) => [el('code', {}, r.resource), change(r.devicesNow, r.devices), change(r.freeNow, r.free)])),
    without && el('p', { class: 'muted' }, `Devices of ${named(away)} are not counted, since ${byNumber(away, 'it is', 'they are')} not found.`),
    request && el('p', {}, `A request for ${request.count} × ${request.resource} would be ${request.outcome}${request.names.length > 0 ? ` on ${listed(request.names)}` : ''}${request.reason || request.placedBecause ? `: ${request.reason || request.placedBecause}` : ''}.`),
    faults.length > 0 && el('ul', { class: 'events' }, faults.map((call) => el('li', {}, `${call.policy}, ${call.hook}: ${call.fault}`))),
    el('p', { class: 'muted' }, `Called in this order: ${report.stack.join(', ')}`),
  ].filter(Boolean);
}
