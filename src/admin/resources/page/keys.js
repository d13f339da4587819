// Keyboard shortcuts of one key.

import { byId } from './dom.js';

/** `on` has what the keys do, by key; each is called while no text is edited and no dialog is open. */
export function listen(route, on) {
  document.addEventListener('keydown', (event) => {
    const { key, target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || byId('node').hidden || byId('dialog').open) return;
    if (target.matches('input:not([type=checkbox]), textarea, select')) {
      if (target.id !== 'find') return;
      if (key === 'Escape') on.Escape?.();
      if (['Enter', 'ArrowDown'].includes(key)) {
        event.preventDefault();
        on.first();
      }
      return;
    }
    const does = /^[1-9]$/.test(key) ? () => on.view(Number(key) - 1) : on[key];
    if (!does || (route.get('keys') === 'off' && key !== 'Escape')) return;
    event.preventDefault();
    does();
  });
}
