// A menu of actions under a button, after the ARIA pattern of a menu button.

import { button, el } from './dom.js';

let open;

/** Opens a menu under its button. `items` are `[label, act, why]`: `why` says why an action cannot be used. */
export function openMenu(opener, label, items) {
  if (open) {
    // The browser closes a menu that is moved or removed with its row.
    const same = open.opener === opener && open.root.matches(':popover-open');
    open.close();
    if (same) return;
  }
  const root = el('div', { class: 'menu', role: 'menu', 'aria-label': label, popover: 'manual' });
  const stop = new AbortController();
  const close = (focus = true) => {
    stop.abort();
    open = undefined;
    root.remove();
    opener.setAttribute('aria-expanded', 'false');
    if (focus) opener.focus();
  };
  const entries = items.map(([text, act, why]) => {
    const made = button(text, () => {
      close();
      act();
    }, { why });
    made.setAttribute('role', 'menuitem');
    made.tabIndex = -1;
    if (why) made.append(el('span', { class: 'why' }, why));
    return made;
  });
  root.append(...entries);
  root.addEventListener('keydown', (event) => {
    const at = entries.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: entries.length - 1 }[event.key];
    if (to !== undefined) entries.at(to % entries.length).focus();
    else if (event.key === 'Escape' || event.key === 'Tab') close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  document.addEventListener('pointerdown', (event) => {
    if (!root.contains(event.target) && !opener.contains(event.target)) close(false);
  }, { signal: stop.signal });
  addEventListener('scroll', () => close(false), { signal: stop.signal, capture: true });
  opener.after(root);
  opener.setAttribute('aria-expanded', 'true');
  root.showPopover();
  const at = opener.getBoundingClientRect();
  root.style.left = `${Math.max(8, Math.min(at.right - root.offsetWidth, innerWidth - root.offsetWidth - 8))}px`;
  root.style.top = `${at.bottom + root.offsetHeight > innerHeight ? Math.max(8, at.top - root.offsetHeight) : at.bottom}px`;
  open = { opener, root, close };
  entries[0]?.focus({ preventScroll: true });
}

/** Closes what is open, as before a sign-out. */
export const closeMenu = () => open?.close(false);
