// The help: keys, and what is shown.

import { closeSheet, sheet } from './dialog.js';
import { button, el } from './dom.js';

const KEYS = [
  ['/', 'search'], ['j, k', 'next and previous GPU or pod, in the list or in an open drawer'], ['Enter', 'open its details; in the search field, go to the first result'], ['x', 'select the GPU, for several at once'],
  ['c', 'cordon it, or the selected ones'], ['d', 'drain it, or the selected ones'], ['1 to 6', 'views'], ['?', 'this help'], ['Escape', 'close, or clear the search'], ['Ctrl+Enter', 'confirm a dialog while a field of it has the focus'],
];

export function help(route) {
  const off = el('input', { id: 'keys-off', type: 'checkbox', checked: route.get('keys') === 'off', onchange: () => route.set({ keys: off.checked ? 'off' : 'on' }, { replace: true }) });
  return sheet(el('div', {}, el('h2', { id: 'dialog-title' }, 'Help'),
    el('h3', {}, 'Keys'),
    el('dl', { class: 'keys' }, KEYS.map(([key, text]) => el('div', {}, el('dt', {}, el('kbd', {}, key)), el('dd', {}, text)))),
    el('div', { class: 'field check' }, off, el('label', { for: 'keys-off' }, 'Turn keyboard shortcuts off (for example while using speech input)')),
    el('h3', {}, 'What is shown'),
    el('ul', {},
      el('li', {}, 'A link to this page shows the same to someone else: view, filter, drawer and time range are in its address. The token is not.'),
      el('li', {}, 'Scheduling: “open” means that new pods may get the GPU; cordoned, draining and drained GPUs get none.'),
      el('li', {}, 'Memory of shares: the granted amount is not enforced, so that a pod can use more, unless “Limit enforced by” in its drawer names what stops it.'),
      el('li', {}, 'A search finds words from their beginning; “gpu 3” finds the GPU with this index.')),
    el('div', { class: 'buttons' }, button('Close', closeSheet, { kind: 'main' }))));
}
