// The GPUs: counters that filter, table or tiles with the bad ones first, and what can be done with the selected ones.

import * as changes from './changes.js';
import { button, count, el, renew, setText } from './dom.js';
import { cellsOf } from './gauges.js';
import { closeMenu } from './menu.js';
import { COLUMNS, Row } from './row.js';
import { STATES, badFirst, colourOf, errorOf, isMoving, listed, search, searchAny, statesOf } from './words.js';

/** Namespaces of the legend; further ones are counted, and named by their cells. */
const LEGEND_MAX = 10;

export class Gpus {
  #api; #route; #parts; #state; #changed;
  #rows = new Map();
  #layout = '';
  #chips = el('div', { class: 'chips', role: 'group', 'aria-label': 'States of GPUs: choose which are shown' });
  #bulk = el('div', { class: 'bulk', role: 'group', 'aria-label': 'Selected GPUs', hidden: true });
  #legend = el('ul', { class: 'legend', 'aria-label': 'Colours of namespaces' });
  #layouts = el('div', { class: 'layouts', role: 'group', 'aria-label': 'Layout' });
  #list;

  /** `parts` has the elements `tools`, `root` and `found`; `state` gives the newest state, whichever view shows it. */
  constructor(api, route, parts, state, changed) {
    this.#api = api;
    this.#route = route;
    this.#parts = parts;
    this.#state = state;
    this.#changed = changed;
    parts.tools.append(this.#chips, this.#legend, this.#layouts);
    // Below the list, where its appearance moves no row.
    parts.root.after(this.#bulk);
  }

  show(state) {
    const layout = this.#route.get('layout') === 'tiles' ? 'tiles' : 'table';
    if (layout !== this.#layout) this.#build(layout);
    const sorted = state.gpus.toSorted(badFirst);
    const finds = searchAny(this.#route.get('q'));
    for (const [uuid, row] of this.#rows) {
      if (state.gpu.has(uuid)) continue;
      if (row.root.querySelector('[role=menu]')) closeMenu();
      row.root.remove();
      this.#rows.delete(uuid);
    }
    // The browser closes the menu of a row that moves: the order stays until the menu is closed.
    const hasOpenMenu = this.#list.querySelector('[role=menu]');
    const focused = this.#list.contains(document.activeElement) ? document.activeElement : undefined;
    sorted.forEach((gpu, place) => {
      let row = this.#rows.get(gpu.uuid);
      if (!row) {
        row = new Row(gpu, layout === 'tiles', {
          open: ({ uuid }) => this.#route.set({ gpu: uuid, pod: '' }),
          pod: (key) => this.#route.set({ pod: key, gpu: '' }),
          select: () => this.#showBulk(),
          actions: (of) => this.actions(of),
        });
        this.#rows.set(gpu.uuid, row);
      }
      row.show(gpu, this.#route.get('gpu') === gpu.uuid, finds);
      if (hasOpenMenu && row.root.isConnected) return;
      if (this.#list.children[place] !== row.root) this.#list.insertBefore(row.root, this.#list.children[place] ?? null);
    });
    // A row that moved has lost the focus.
    if (focused && document.activeElement !== focused) focused.focus({ preventScroll: true });
    this.#showChips(state.gpus);
    this.#showLegend(state.gpus);
    this.#filter();
    this.#showBulk();
  }

  clear() {
    this.#rows.clear();
    this.#layout = '';
    this.#list = undefined;
    this.#parts.root.replaceChildren();
    for (const part of [this.#chips, this.#bulk, this.#legend, this.#layouts]) {
      part.replaceChildren();
      delete part.berthSign;
    }
    setText(this.#parts.found, '');
  }

  /** The line of the last hour of each GPU. */
  showHours(hours, node) {
    for (const [uuid, row] of this.#rows) row.showHour(hours.get(uuid), node);
  }

  /** The GPUs that are shown, in their order. */
  shown() { return [...this.#list?.children ?? []].filter((item) => !item.hidden).map((item) => this.#rows.get(item.dataset.gpu)); }

  /** The GPU of the row that has the focus. */
  focused() { return this.#rows.get(document.activeElement?.closest('[data-gpu]')?.dataset.gpu)?.gpu; }

  /** Moves by so many rows: the drawer of a GPU if one is open, else the focus. */
  move(by) {
    const rows = this.shown();
    const inDrawer = this.#route.get('gpu');
    const at = rows.findIndex(({ gpu }) => (inDrawer ? gpu.uuid === inDrawer : gpu === this.focused()));
    const next = rows[at < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, at + by))];
    if (!inDrawer) next?.open.focus();
    else if (next) {
      next.root.scrollIntoView({ block: 'nearest' });
      this.#route.set({ gpu: next.gpu.uuid }, { replace: true });
    }
  }

  focusOn(uuid) { this.#rows.get(uuid)?.open.focus(); }

  toggle(uuid) {
    const row = this.#rows.get(uuid);
    if (!row) return;
    row.check.checked = !row.check.checked;
    this.#showBulk();
  }

  selected() { return [...this.#rows.values()].filter((row) => row.check.checked).map((row) => row.gpu); }

  /** What can be done with a GPU: `[label, act, why not]`. */
  actions(gpu) {
    const { health, drain } = gpu;
    const active = drain.state === 'active';
    const act = (change) => () => this.change(change, [gpu]);
    const items = [];
    if (active) items.push(['Cordon…', act('cordon')]);
    items.push(['draining', 'drained'].includes(drain.state) ? ['Progress of the drain…', act('drain')] : ['Drain…', act('drain')]);
    if (drain.state === 'draining') items.push(['Stop drain…', act('stopDrain')]);
    if (!active) items.push(['Uncordon…', act('uncordon')]);
    if (['unhealthy', 'degraded'].includes(health.state)) items.push(['Mark healthy…', act('markHealthy')]);
    if (this.#state()?.node.dra && health.state !== 'vanished') items.push([isMoving(gpu) ? 'Cancel the move…' : gpu.via?.api === 'dra' ? 'Move to the device plugin…' : 'Move to DRA…', act('move')]);
    if (health.state === 'vanished') items.push(['Forget…', act('forget'), gpu.allocations.length ? 'its allocations have not ended yet' : undefined]);
    const why = document.body.dataset.why;
    const changing = items.map(([label, does, not]) => [label, does, label.startsWith('Progress') ? undefined : why || not]);
    return [['Details', () => this.#route.set({ gpu: gpu.uuid, pod: '' })], ...changing];
  }

  /** These GPUs as they are now, without those that are gone. A button knows them as they were when it was made. */
  newest(gpus) { return gpus.map(({ uuid }) => this.#state()?.gpu.get(uuid)).filter(Boolean); }

  async change(name, of) {
    const gpus = this.newest(of);
    if (gpus.length === 0) return;
    const done = async () => {
      this.#leave(gpus[0]);
      await this.#changed();
      // The row of a GPU that was forgotten is gone.
      if (document.activeElement === document.body) document.getElementById('main').focus();
    };
    if (name === 'drain') {
      const { drainSheet } = await import('./drain.js');
      if (await drainSheet(this.#api, gpus, this.#state, done)) this.#leave(gpus[0]);
    } else if (await changes[name](this.#api, gpus)) await done();
  }

  /** After a change the focus is not on a button: another Enter would begin the next change. */
  #leave({ uuid }) {
    const heading = !document.getElementById('drawer').hidden && document.getElementById('drawer-title');
    (heading || this.#rows.get(uuid)?.open)?.focus();
  }

  #build(layout) {
    this.#layout = layout;
    const checked = new Set(this.selected().map((gpu) => gpu.uuid));
    this.#rows.clear();
    if (layout === 'tiles') this.#parts.root.replaceChildren(this.#list = el('ul', { class: 'tiles', 'aria-label': 'GPUs' }));
    else {
      const all = el('input', { type: 'checkbox', 'aria-label': 'Select all that are shown', onchange: () => this.#selectAll(all.checked) });
      const heads = COLUMNS.map((head, i) => el('th', { role: 'columnheader', scope: 'col', class: `c${i}` }, i === 0 ? all : i === COLUMNS.length - 1 ? el('span', { class: 'unseen' }, head) : head));
      this.#list = el('tbody', { role: 'rowgroup' });
      this.#parts.root.replaceChildren(el('table', { role: 'table', class: 'gpus' }, el('caption', { class: 'unseen' }, 'GPUs, those that need attention first'),
        el('thead', { role: 'rowgroup' }, el('tr', { role: 'row' }, heads)), this.#list));
    }
    renew(this.#layouts, layout, () => ['table', 'tiles'].map((of) =>
      button(of === 'table' ? 'Table' : 'Tiles', () => this.#route.set({ layout: of }), { kind: 'chip', pressed: String(of === layout) })));
    queueMicrotask(() => {
      for (const [uuid, row] of this.#rows) row.check.checked = checked.has(uuid);
      this.#showBulk();
    });
  }

  #selectAll(checked) {
    for (const row of this.shown()) row.check.checked = checked;
    this.#showBulk();
  }

  #wanted() { return this.#route.get('state').split(',').filter((state) => STATES[state]); }

  #showChips(gpus) {
    const sums = new Map();
    for (const gpu of gpus) for (const state of statesOf(gpu)) sums.set(state, (sums.get(state) ?? 0) + 1);
    const wanted = this.#wanted();
    const why = this.#route.get('why');
    const shown = Object.keys(STATES).filter((state) => sums.get(state) || wanted.includes(state));
    renew(this.#chips, [gpus.length, wanted, why, shown.map((state) => sums.get(state))], () => [
      chip('All', gpus.length, wanted.length === 0 && !why, () => this.#route.set({ state: '', why: '' })),
      ...shown.map((state) => chip(STATES[state], sums.get(state) ?? 0, wanted.includes(state), () => this.#route.set({
        state: (wanted.includes(state) ? wanted.filter((other) => other !== state) : [...wanted, state]).join(','), why: '' }), state)),
      wanted.length > 1 && el('span', { class: 'muted' }, 'any of these'),
      why && chip(why, gpus.filter((gpu) => errorOf(gpu) === why).length, true, () => this.#route.set({ why: '' }), 'attention'),
    ]);
  }

  #showLegend(gpus) {
    const names = new Set(gpus.flatMap((gpu) => cellsOf(gpu).map((cell) => cell.allocation?.holder?.namespace)).filter(Boolean));
    const sorted = [...names].sort();
    renew(this.#legend, sorted, () => [...sorted.slice(0, LEGEND_MAX).map((name) => el('li', {}, el('i', { class: `dot ${colourOf(name)}` }), name)),
      sorted.length > LEGEND_MAX && el('li', { title: listed(sorted.slice(LEGEND_MAX)) }, `and ${sorted.length - LEGEND_MAX} more`)]);
  }

  #filter() {
    const query = this.#route.get('q').trim();
    const wanted = this.#wanted();
    const why = this.#route.get('why');
    const finds = search(query);
    let shown = 0;
    for (const row of this.#rows.values()) {
      const states = statesOf(row.gpu);
      const fits = (wanted.length === 0 || wanted.some((state) => states.includes(state))) && (!why || errorOf(row.gpu) === why) && finds(row.text);
      if (row.root.hidden === fits) row.root.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    setText(this.#parts.found, query || wanted.length || why ? `${shown} of ${count(this.#rows.size, 'GPU')} ${shown === 1 ? 'matches' : 'match'}` : '');
  }

  #showBulk() {
    const chosen = this.selected();
    this.#bulk.hidden = chosen.length === 0;
    for (const row of this.#rows.values()) row.root.classList.toggle('selected', row.check.checked);
    renew(this.#bulk, [chosen.map((gpu) => [gpu.index, gpu.drain.state]), document.body.dataset.why], () => {
      const open = chosen.filter((gpu) => gpu.drain.state === 'active');
      const out = chosen.filter((gpu) => gpu.drain.state !== 'active');
      const drainable = chosen.filter((gpu) => ['active', 'cordoned'].includes(gpu.drain.state));
      const of = (label, name, gpus, not) => button(label, () => this.change(name, gpus), { change: true, why: gpus.length ? undefined : not });
      return [
        el('strong', {}, `${chosen.length} selected`),
        of('Cordon…', 'cordon', open, 'all of them are cordoned already'),
        of('Drain…', 'drain', drainable, 'all of them are drained or draining already'),
        of('Uncordon…', 'uncordon', out, 'none of them is cordoned'),
        button('Clear', () => {
          for (const row of this.#rows.values()) row.check.checked = false;
          this.#showBulk();
        }),
      ];
    });
  }
}

function chip(label, n, pressed, act, state) {
  const made = button([label, ' ', el('span', { class: 'n' }, String(n))], act, { kind: 'chip', pressed: String(pressed) });
  if (state) made.dataset.state = state;
  return made;
}
