// Lines over time as SVG, with a summary in words and the values as a table.

import { now } from './clock.js';
import { button, count, el, setText, svg, table, time } from './dom.js';
import { RANGES_MS } from './route.js';
import { listed, placeOf } from './words.js';

/** The picture, in its own units. */
const WIDE = 480;
const HIGH = 118;
const LEFT = 40;
const BOTTOM = 18;
const TOP = 6;
/** Lines of one picture, each in a colour of its own: further ones are only in the table, below which their names are. */
const LINES_MAX = 6;
/** Rows of the table of values. */
const ROWS = 24;
/** A line whose newest point is older than so many steps has no present value. */
const OLD_STEPS = 4;
const MARKS = { '1h': 15 * 60_000, '24h': 6 * 3_600_000 };

/** A round number at or above: 1, 2, 2.5, 4, 5, 8 times a power of ten. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return power * ([1, 2, 2.5, 4, 5, 8, 10].find((n) => n * power >= value) ?? 10);
}

const clock = (at) => new Date(at).toLocaleTimeString('en-GB', { hour: '2-digit', minute: '2-digit' });

/** Marks of the time axis at full quarters of an hour, or of a day. */
export function timeMarks(to, last) {
  const every = MARKS[last];
  const offset = new Date(to).getTimezoneOffset() * 60_000;
  const marks = [];
  for (let at = Math.ceil((to - RANGES_MS[last] - offset) / every) * every + offset; at <= to; at += every) marks.push(at);
  return marks;
}

/**
 * The classes of the lines. A line without one gets a colour by its name, so that it keeps it while others come and go; of
 * two lines with the same colour the later name takes the next one.
 */
function kindsOf(lines) {
  const taken = new Map();
  for (const { name } of lines.filter(({ kind }) => !kind).toSorted((a, b) => a.name.localeCompare(b.name))) {
    let place = placeOf(name, LINES_MAX);
    while (taken.has(place)) place = (place + 1) % LINES_MAX;
    taken.set(place, name);
  }
  const places = new Map([...taken].map(([place, name]) => [name, place]));
  return lines.map(({ kind, name }) => kind ?? `line-${places.get(name)}`);
}

/**
 * A figure of lines. `lines` are `{name, kind, points: [[milliseconds, value]]}`, oldest first; `most` is the top of the
 * axis where it is known; `step`, milliseconds, is the distance of the points: a larger one is a gap. `start` is when the
 * record begins; `sorted` says which lines come first.
 */
export function graph({ title, unit, lines, most, last, step, start, sorted, to = now() }) {
  const from = to - RANGES_MS[last];
  const read = lines.filter((line) => line.points.length > 0);
  const drawn = read.slice(0, LINES_MAX);
  const others = read.slice(LINES_MAX);
  const kinds = kindsOf(drawn);
  const values = drawn.flatMap((line) => line.points.map(([, value]) => value));
  const top = most ?? round(Math.max(1, ...values));
  const x = (at) => LEFT + ((at - from) / (to - from)) * (WIDE - LEFT - 2);
  const y = (value) => TOP + (1 - Math.min(1, value / top)) * (HIGH - BOTTOM - TOP);
  const write = (value) => value.toLocaleString('en', { maximumFractionDigits: value < 10 ? 1 : 0 });
  const recorded = start > from ? `. Recorded since ${clock(start)}, when the daemon started` : '';
  const summary = drawn.length === 0 ? `${title}: no readings` : lines.filter((line) => !others.includes(line)).map(({ name, points }) => {
    if (points.length === 0) return `${name}: no reading`;
    const all = points.map(([, value]) => value);
    const newest = points.at(-1)[0];
    // An old value is not the present one.
    if (to - newest > step * OLD_STEPS) return `${name}: no reading since ${clock(newest)}`;
    return `${name}: ${write(all.at(-1))} ${unit}, between ${write(Math.min(...all))} and ${write(Math.max(...all))}`;
  }).join('; ');
  const picture = svg('svg', { class: 'graph', viewBox: `0 0 ${WIDE} ${HIGH}`, role: 'img', 'aria-label': `${title}, last ${last}. ${summary}${recorded}` });
  if (recorded) {
    // Without readings before the start, the line would look like one of a GPU that was not read.
    picture.append(svg('rect', { class: 'unrecorded', x: LEFT, y: TOP, width: (x(start) - LEFT).toFixed(1), height: HIGH - BOTTOM - TOP }, svg('title', {}, 'not recorded')),
      svg('path', { class: 'recorded-from', d: `M${x(start).toFixed(1)} ${TOP}V${HIGH - BOTTOM}` }, svg('title', {}, `the daemon started at ${clock(start)}`)));
  }
  for (const part of [0, 0.5, 1]) {
    const at = y(top * part).toFixed(1);
    picture.append(svg('path', { class: 'grid', d: `M${LEFT} ${at}H${WIDE - 2}` }), svg('text', { class: 'axis end', x: LEFT - 5, y: Number(at) + 4 }, write(top * part)));
  }
  for (const mark of timeMarks(to, last)) {
    const at = x(mark);
    if (at > LEFT + 14 && at < WIDE - 16) picture.append(svg('text', { class: 'axis', x: at.toFixed(1), y: HIGH - 4 }, clock(mark)));
  }
  drawn.forEach(({ points }, i) => {
    let d = '';
    let before = -Infinity;
    for (const [at, value] of points) {
      const place = `${x(Math.max(from, at)).toFixed(1)} ${y(value).toFixed(1)}`;
      // A point alone is drawn as a dot.
      d += at - before > step * 2.5 ? `M${place}h0` : `L${place}`;
      before = at;
    }
    picture.append(svg('path', { class: `line ${kinds[i]}`, d }));
  });
  const cross = svg('path', { class: 'cross', d: '' });
  picture.append(cross);
  const readout = el('p', { class: 'readout muted' }, summary);
  picture.addEventListener('pointermove', (event) => {
    const box = picture.getBoundingClientRect();
    const at = from + (((event.clientX - box.left) / box.width) * WIDE - LEFT) / (WIDE - LEFT - 2) * (to - from);
    const near = drawn.map((line) => [line, line.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))]);
    if (near.length === 0) return;
    cross.setAttribute('d', `M${x(near[0][1][0]).toFixed(1)} ${TOP}V${HIGH - BOTTOM}`);
    setText(readout, `${clock(near[0][1][0])}: ${near.map(([line, [, value]]) => `${line.name} ${write(value)} ${unit}`).join(', ')}`);
  });
  picture.addEventListener('pointerleave', () => {
    cross.setAttribute('d', '');
    setText(readout, summary);
  });
  const legend = drawn.length > 1 && el('ul', { class: 'legend' }, drawn.map((line, i) => el('li', {}, el('i', { class: `dot ${kinds[i]}` }), line.name)));
  return el('figure', {}, el('figcaption', {}, el('strong', {}, title), ` ${unit}`, legend), picture, readout,
    others.length > 0 && el('p', { class: 'muted' }, `${drawn.length} of ${count(read.length, 'line')} are drawn${sorted ? `, ${sorted}` : ''}. Only in the table: ${listed(others.map(({ name }) => name))}.`),
    values.length > 0 && asTable(title, unit, read, write));
}

/** The values as a table, which is made when it is opened. */
function asTable(title, unit, lines, write) {
  const box = el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': `${title} as a table` });
  const details = el('details', { ontoggle: () => {
    if (!details.open || box.firstChild) return;
    const times = [...new Set(lines.flatMap(({ points }) => points.map(([at]) => at)))].sort((a, b) => a - b);
    const every = Math.max(1, Math.ceil(times.length / ROWS));
    const rows = times.filter((_, i) => i % every === 0).map((at) => [time(at), ...lines.map((line) => {
      const found = line.points.find(([other]) => other === at);
      return found ? write(found[1]) : '–';
    })]);
    box.append(table(`${title}, ${unit}${every > 1 ? `: one of each ${every} readings` : ''}`, ['Time', ...lines.map((line) => line.name)], rows));
  } }, el('summary', {}, 'Values as a table'), box);
  return details;
}

/** Buttons for the time range of graphs. */
export function rangeButtons(route) {
  return el('div', { class: 'layouts', role: 'group', 'aria-label': 'Time range' }, ['1h', '24h'].map((last) =>
    button(last === '1h' ? '1 hour' : '24 hours', () => route.set({ last }), { kind: 'chip', pressed: String(route.get('last') === last) })));
}
