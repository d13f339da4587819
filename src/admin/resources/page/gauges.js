// The small pictures of a GPU: its memory, its shares by namespace, and the last hour.

import { now } from './clock.js';
import { count, el, gib, renew, setText, svg } from './dom.js';
import { DRIVER_MIB, devicesOf, grantedMiB } from './model.js';
import { colourOf, listed } from './words.js';

/** Size of the picture of shares, in units of the picture. */
const WIDE = 160;
const HIGH = 16;
/** Least width of a cell with a gap. */
const GAP_FROM = 3;

/** One bar: what is granted, and in it what is in use. */
export class MemoryBar {
  /** `short`: only numbers, under a head that says which. */
  constructor(short = false) {
    this.short = short;
    this.used = el('span', { class: 'used' });
    this.granted = el('span', { class: 'granted' });
    this.number = el('span', {});
    this.rest = el('span', {});
    this.text = el('span', { class: 'amount' }, this.number, this.rest);
    this.root = el('div', { class: 'memory' }, el('div', { class: 'bar', 'aria-hidden': 'true' }, this.granted, this.used), this.text);
  }

  show(gpu) {
    const granted = grantedMiB(gpu);
    const used = gpu.memoryUsedMiB;
    const percent = (mib) => `${gpu.memoryMiB ? Math.min(100, (mib / gpu.memoryMiB) * 100).toFixed(1) : 0}%`;
    this.used.style.width = percent(used ?? 0);
    this.granted.style.width = percent(granted);
    const all = gpu.memoryMiB ? gib(gpu.memoryMiB) : '?';
    // Shares without reserved memory have 0 granted; their use is not compared with it. The driver itself uses some.
    const over = granted > 0 && used > granted + DRIVER_MIB;
    this.number.className = over ? 'over' : '';
    this.number.title = over ? 'more than granted' : '';
    setText(this.number, (over ? '▲ ' : '') + (this.short ? used === undefined ? '?' : gib(used) : used === undefined ? 'use not known' : `${gib(used)} used`));
    setText(this.rest, this.short ? ` / ${gib(granted)} / ${all}` : `, ${gib(granted)} granted, of ${all} GiB`);
    this.root.title = `${used ?? 'unknown'} MiB in use, ${granted} MiB granted, ${gpu.memoryMiB ?? 'unknown'} MiB in total`;
  }
}

/** The devices that a picture shows: of a GPU that is held whole that one, otherwise its shares or instances. */
export function cellsOf(gpu) {
  const all = devicesOf(gpu).filter((device) => device.state !== 'leaving');
  const held = all.filter((device) => device.state === 'held');
  const whole = held.filter((device) => device.consumes.whole && !device.part.mig);
  if (whole.length > 0) return whole;
  const shares = all.filter((device) => !device.consumes.whole || device.part.mig);
  const cells = shares.length > 0 ? shares : all;
  const order = { held: 0, free: 1, withdrawn: 2 };
  const key = (cell) => `${cell.allocation?.holder?.namespace ?? '~'}/${cell.allocation?.holder?.pod ?? '~'}`;
  return cells.sort((a, b) => order[a.state] - order[b.state] || key(a).localeCompare(key(b)));
}

/** What the cells show, in words: `10 shares: 4 ml-train, 2 batch, 4 free`. */
export function sharesText(cells) {
  const sums = new Map();
  for (const cell of cells) {
    const name = cell.state === 'held' ? cell.allocation?.holder?.namespace ?? 'not known yet' : cell.state;
    sums.set(name, (sums.get(name) ?? 0) + 1);
  }
  const whole = cells.length === 1 && cells[0].consumes.whole;
  return `${whole ? 'whole' : count(cells.length, 'share')}: ${listed([...sums].map(([name, n]) => (whole ? name : `${n} ${name}`))) || 'none'}`;
}

/** A cell for each share in the colour of its holder's namespace: one shape for each colour. */
export function showShares(root, gpu) {
  const cells = cellsOf(gpu);
  const kinds = cells.map((cell) => (cell.state === 'held' ? colourOf(cell.allocation?.holder?.namespace) : cell.state));
  renew(root, [kinds, sharesText(cells)], () => {
    const text = sharesText(cells);
    const width = WIDE / Math.max(1, cells.length);
    const gap = width > GAP_FROM ? 1.5 : 0;
    const shapes = new Map();
    kinds.forEach((kind, i) => shapes.set(kind, `${shapes.get(kind) ?? ''}M${(i * width).toFixed(2)} 1h${(width - gap).toFixed(2)}v${HIGH - 2}h-${(width - gap).toFixed(2)}z`));
    const drawn = svg('svg', { class: 'shares', viewBox: `0 0 ${WIDE} ${HIGH}`, role: 'img', 'aria-label': text, preserveAspectRatio: 'none' },
      svg('title', {}, text), [...shapes].map(([kind, d]) => svg('path', { class: kind, d })));
    return drawn;
  });
}

/** The length of the line, and a distance of points that is a gap, milliseconds. */
const HOUR_MS = 3_600_000;
const GAP_MS = 150_000;

/** A line of the last hour. `points` are `[milliseconds, value]`, oldest first; `start` is when the record begins. */
export function sparkline(points, max, text, start) {
  const wide = 100;
  const high = 20;
  const from = now() - HOUR_MS;
  let d = '';
  let before = -Infinity;
  for (const [at, value] of points) {
    const place = `${(((at - from) / HOUR_MS) * wide).toFixed(1)} ${(high - 1 - Math.min(1, value / (max || 1)) * (high - 2)).toFixed(1)}`;
    d += at - before > GAP_MS ? `M${place}h0` : `L${place}`;
    before = at;
  }
  return svg('svg', { class: 'spark', viewBox: `0 0 ${wide} ${high}`, role: 'img', 'aria-label': text, preserveAspectRatio: 'none' },
    svg('title', {}, text), start > from ? svg('rect', { class: 'unrecorded', width: (((start - from) / HOUR_MS) * wide).toFixed(1), height: high }) : [], svg('path', { d: d || 'M0 0' }));
}
