// The dialog that confirms a change and shows why the daemon refused it.

import { button, byId, el, setText } from './dom.js';

/** A problem with its title, detail and hint. */
export function problemBox(problem) {
  return el('div', { class: 'problem' },
    el('p', { class: 'problem-title' }, problem.title ?? 'The request failed'),
    problem.detail && el('p', {}, problem.detail),
    problem.hint && el('p', { class: 'hint' }, el('strong', {}, 'What to do: '), problem.hint));
}

/** A problem of one part of the page, in that part. */
export const problemNote = (problem) => el('p', { class: 'note warn' }, problem.detail || problem.title);

/** A labelled field; `help` is its description for screen readers. A text that is required is marked as such. */
export function field(label, control, help) {
  const { id } = control;
  if (help) control.setAttribute('aria-describedby', `${id}-help`);
  return el('div', { class: 'field' },
    el('label', { for: id }, label, control.required && el('span', { class: 'needed' }, ' (required)')),
    control,
    help && el('p', { class: 'muted', id: `${id}-help` }, help));
}

/** Runs `act`, shows its failure in `failed`, and keeps `control` from being used twice meanwhile. */
export async function attempt(control, failed, act) {
  control.disabled = true;
  control.form?.setAttribute('aria-busy', 'true');
  failed.replaceChildren();
  try {
    await act();
    return true;
  } catch (problem) {
    failed.replaceChildren(problemBox(problem.title ? problem : { title: 'The request failed', detail: problem.message }));
    failed.scrollIntoView({ block: 'nearest' });
    return false;
  } finally {
    control.disabled = false;
    control.form?.removeAttribute('aria-busy');
    if (byId('dialog').open) control.focus();
  }
}

/**
 * Whether the fields can be sent. Each that cannot says why under itself, and the first has the focus: the browser's own
 * bubble lies behind the buttons of a long sheet, or has no field in view to point to.
 */
export function isComplete(form) {
  form.querySelectorAll('.wrong').forEach((old) => old.remove());
  const wrong = [...form.elements].filter((control) => {
    const bad = control.willValidate && !control.checkValidity();
    if (bad) control.setAttribute('aria-invalid', 'true');
    else control.removeAttribute('aria-invalid');
    return bad;
  });
  for (const control of wrong) {
    const text = control.validity.valueMissing ? 'Needed: it is empty.' : control.validationMessage;
    control.closest('.field').append(el('p', { class: 'wrong note bad', role: 'alert' }, text));
    control.closest('details')?.setAttribute('open', '');
  }
  wrong[0]?.focus();
  wrong[0]?.closest('.field').scrollIntoView({ block: 'center' });
  return wrong.length === 0;
}

/** Keeps Enter in a field from confirming, since a change follows; Ctrl+Enter confirms. */
export function confirmByButton(form) {
  form.noValidate = true;
  form.addEventListener('keydown', (event) => {
    const orders = event.ctrlKey || event.metaKey;
    if (event.key !== 'Enter' || !event.target.matches(orders ? 'input, select, textarea' : 'input, select')) return;
    event.preventDefault();
    // While the change is made its button is disabled.
    if (orders && !event.repeat && !form.querySelector('button[type=submit]')?.disabled) form.requestSubmit();
  });
}

/** Ends the sheet that is open. */
let finish;

/** Opens the dialog with this content, and resolves when it is closed. The focus returns to where it was. */
export function sheet(content, { wide = false, focus } = {}) {
  const dialog = byId('dialog');
  const opener = finish?.(false) ?? document.activeElement;
  byId('sheet').replaceChildren(content);
  dialog.classList.toggle('wide', wide);
  if (!dialog.open) dialog.showModal();
  (focus ?? content.querySelector('input, select, textarea') ?? content.querySelector('button'))?.focus();
  return new Promise((resolve) => {
    const over = new AbortController();
    // Another sheet may take its place: that one inherits where the focus returns to.
    finish = (closed) => {
      over.abort();
      finish = undefined;
      byId('sheet').replaceChildren();
      if (closed && document.activeElement === document.body && opener.isConnected) opener.focus();
      resolve();
      return opener;
    };
    // The event of an earlier sheet may arrive when this one is open.
    dialog.addEventListener('close', () => dialog.open || finish(true), { signal: over.signal });
  });
}

export const closeSheet = () => byId('dialog').close();

/**
 * Opens the dialog. `act` carries the change out: the dialog shows its failure, and closes on success. `guard` calls its
 * argument with why the change is not possible at present, or an empty text. Resolves to whether it succeeded.
 */
export async function ask({ title, words = [], fields = [], label, danger = false, wide = false, act, guard }) {
  const failed = el('div', { role: 'alert' });
  const yes = confirmButton(label, danger);
  let done = false;
  const form = el('form', {}, el('h2', { id: 'dialog-title' }, title),
    words.map((text) => el('p', {}, text)), fields, failed,
    el('div', { class: 'buttons' }, yes.why, button('Cancel', closeSheet), yes.button));
  confirmByButton(form);
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    if (!yes.isFree(failed) || !isComplete(form)) return;
    done = await attempt(yes.button, failed, act);
    if (done) closeSheet();
  });
  const closed = sheet(form, { wide });
  guard?.((why) => yes.guard(why));
  await closed;
  return done;
}

/** The button of a dialog that makes the change. Why it cannot be used at present is written beside it. */
export function confirmButton(label, danger) {
  const why = el('p', { class: 'why muted', id: 'confirm-why' });
  const made = el('button', { type: 'submit', class: danger ? 'danger' : 'main', 'aria-describedby': 'confirm-why' }, label);
  return {
    button: made,
    why,
    guard: (text) => {
      made.setAttribute('aria-disabled', String(!!text));
      made.title = text;
      made.dataset.why = text;
      setText(why, text && `${label} is not possible yet: ${text}.`);
    },
    /** Whether it can be used; says why in `failed` if it cannot, as after Ctrl+Enter. */
    isFree: (failed) => {
      if (made.dataset.why) failed.replaceChildren(problemBox({ title: 'Not done', detail: made.dataset.why }));
      return !made.dataset.why;
    },
  };
}
