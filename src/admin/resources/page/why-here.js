// Why a pod has its GPU: the sentences of the daemon's explanation of an allocation.

import { problemBox } from './dialog.js';
import { button, el } from './dom.js';

/** Explanations that are open, by allocation, so that they outlast an update of the list that they are in. */
const OPEN_MAX = 20;
const open = new Map();

/** The sentences, or why there are none. */
export async function explanation(api, id) {
  try {
    const { sentences } = await api.get(`/allocations/${encodeURIComponent(id)}/explanation`, { conditional: false });
    return el('ul', { class: 'why-here' }, sentences.map((sentence) => el('li', {}, sentence)));
  } catch (problem) {
    return problemBox(problem);
  }
}

/** The open explanation of an allocation, if it is. */
export const opened = (id) => open.get(id);

/** Forgets the explanations: the page keeps no data of the node after a sign-out. */
export const forgetExplanations = () => open.clear();

/** A button that shows and hides the explanation of an allocation in `box`. */
export function whyHere(api, id, box, name) {
  const made = button('Explain', () => {
    if (open.delete(id)) box.replaceChildren();
    else {
      const text = el('div', {}, 'Loading…');
      if (open.size >= OPEN_MAX) open.delete(open.keys().next().value);
      open.set(id, text);
      box.replaceChildren(text);
      explanation(api, id).then((content) => text.replaceChildren(content));
    }
    made.setAttribute('aria-expanded', String(open.has(id)));
  }, { kind: 'small', name: `Explain: ${name}` });
  made.setAttribute('aria-expanded', String(open.has(id)));
  return made;
}
