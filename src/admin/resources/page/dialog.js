// The dialog that confirms a change and shows why the daemon refused it.

import { byId, el } from './dom.js';

/** A problem with its title, detail and hint. */
export function problemBox(problem) {
  return el('div', { class: 'problem' },
    el('p', { class: 'problem-title' }, problem.title ?? 'The request failed'),
    problem.detail && el('p', {}, problem.detail),
    problem.hint && el('p', { class: 'hint' }, el('strong', {}, 'What to do: '), problem.hint));
}

/** A labelled field; `help` is its description for screen readers. */
export function field(label, control, help) {
  const { id } = control;
  if (help) control.setAttribute('aria-describedby', `${id}-help`);
  return el('div', { class: 'field' },
    el('label', { for: id }, label),
    control,
    help && el('p', { class: 'muted', id: `${id}-help` }, help));
}

/**
 * Opens the dialog. `act` carries the change out: the dialog shows its failure, and closes on success.
 * Resolves to whether it succeeded.
 */
export function ask({ title, words = [], fields = [], label, danger = false, act }) {
  const dialog = byId('dialog');
  const failed = el('div', { role: 'alert' });
  const yes = el('button', { type: 'submit', class: danger ? 'danger' : 'main' }, label);
  const no = el('button', { type: 'button', onclick: () => dialog.close() }, 'Cancel');
  let done = false;
  const form = el('form', { novalidate: false }, el('h2', { id: 'dialog-title' }, title),
    words.map((text) => el('p', {}, text)), fields, failed,
    el('div', { class: 'buttons' }, no, yes));
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    yes.disabled = true;
    form.setAttribute('aria-busy', 'true');
    failed.replaceChildren();
    try {
      await act();
      done = true;
      dialog.close();
    } catch (problem) {
      failed.replaceChildren(problemBox(problem.title ? problem : { title: 'The request failed', detail: problem.message }));
      failed.scrollIntoView({ block: 'nearest' });
    } finally {
      yes.disabled = false;
      form.removeAttribute('aria-busy');
      if (dialog.open) yes.focus();
    }
  });
  dialog.replaceChildren(form);
  dialog.showModal();
  (form.querySelector('input, select, textarea') ?? no).focus();
  return new Promise((resolve) => {
    dialog.addEventListener('close', () => {
      dialog.replaceChildren();
      resolve(done);
    }, { once: true });
  });
}
