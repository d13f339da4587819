// Lines over time as SVG, with a summary in words and the values as a table.

import { now } from './clock.js';
import { button, el, svg, table, time } from './dom.js';
import { RANGES_MS } from './route.js';

/** The picture, in its own units. */
const WIDE = 480;
const HIGH = 118;
const LEFT = 40;
const BOTTOM = 18;
const TOP = 6;
/** Lines of one picture: further ones are in the table only. */
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
 * A figure of lines. `lines` are `{name, kind, points: [[milliseconds, value]]}`, oldest first; `most` is the top of the
 * axis where it is known; `step`, milliseconds, is the distance of the points: a larger one is a gap.
 */
export function graph({ title, unit, lines, most, last, step, to = now() }) {
  const from = to - RANGES_MS[last];
  const drawn = lines.filter((line) => line.points.length > 0).slice(0, LINES_MAX);
  const values = drawn.flatMap((line) => line.points.map(([, value]) => value));
  const top = most ?? round(Math.max(1, ...values));
  const x = (at) => LEFT + ((at - from) / (to - from)) * (WIDE - LEFT - 2);
  const y = (value) => TOP + (1 - Math.min(1, value / top)) * (HIGH - BOTTOM - TOP);
  const write = (value) => value.toLocaleString('en', { maximumFractionDigits: value < 10 ? 1 : 0 });
  const summary = drawn.length === 0 ? `${title}: no readings` : lines.slice(0, LINES_MAX).map(({ name, points }) => {
    if (points.length === 0) return `${name}: no reading`;
    const all = points.map(([, value]) => value);
    const newest = points.at(-1)[0];
    // An old value is not the present one.
    if (to - newest > step * OLD_STEPS) return `${name}: no reading since ${clock(newest)}`;
    return `${name}: ${write(all.at(-1))} ${unit}, between ${write(Math.min(...all))} and ${write(Math.max(...all))}`;
  }).join('; ');
  const picture = svg('svg', { class: 'graph', viewBox: `0 0 ${WIDE} ${HIGH}`, role: 'img', 'aria-label': `${title}, last ${last}. ${summary}` });
  for (const part of [0, 0.5, 1]) {
    const at = y(top * part).toFixed(1);
    picture.append(svg('path', { class: 'grid', d: `M${LEFT} ${at}H${WIDE - 2}` }), svg('text', { class: 'axis end', x: LEFT - 5, y: Number(at) + 4 }, write(top * part)));
  }
  for (const mark of timeMarks(to, last)) {
    const at = x(mark);
    if (at > LEFT + 14 && at < WIDE - 16) picture.append(svg('text', { class: 'axis', x: at.toFixed(1), y: HIGH - 4 }, clock(mark)));
  }
  drawn.forEach(({ points, kind }, i) => {
    let d = '';
    let before = -Infinity;
    for (const [at, value] of points) {
      const place = `${x(Math.max(from, at)).toFixed(1)} ${y(value).toFixed(1)}`;
      // A point alone is drawn as a dot.
      d += at - before > step * 2.5 ? `M${place}h0` : `L${place}`;
      before = at;
    }
    picture.append(svg('path', { class: `line ${kind ?? `line-${i}`}`, d }));
  });
  const cross = svg('path', { class: 'cross', d: '' });
  picture.append(cross);
  const read = el('p', { class: 'readout muted' }, summary);
  picture.addEventListener('pointermove', (event) => {
    const box = picture.getBoundingClientRect();
    const at = from + (((event.clientX - box.left) / box.width) * WIDE - LEFT) / (WIDE - LEFT - 2) * (to - from);
    const near = drawn.map((line) => [line, line.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))]);
    if (near.length === 0) return;
    cross.setAttribute('d', `M${x(near[0][1][0]).toFixed(1)} ${TOP}V${HIGH - BOTTOM}`);
    read.textContent = `${clock(near[0][1][0])}: ${near.map(([line, [, value]]) => `${line.name} ${write(value)} ${unit}`).join(', ')}`;
  });
  picture.addEventListener('pointerleave', () => {
    cross.setAttribute('d', '');
    read.textContent = summary;
  });
  const legend = drawn.length > 1 && el('ul', { class: 'legend' }, drawn.map((line, i) => el('li', {}, el('i', { class: `dot ${line.kind ?? `line-${i}`}` }), line.name)));
  return el('figure', {}, el('figcaption', {}, el('strong', {}, title), ` ${unit}`, legend), picture, read, values.length > 0 && asTable(title, unit, drawn, write));
}

/** The values as a table, which is made when it is opened. */
function asTable(title, unit, lines, write) {
  const box = el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': `${title} as a table` });
  const details = el('details', { ontoggle: () => {
    if (!details.open || box.firstChild) return;
    const { points } = lines[0];
    const every = Math.max(1, Math.ceil(points.length / ROWS));
    const rows = points.filter((_, i) => i % every === 0).map(([at]) => [time(at), ...lines.map((line) => {
      const found = line.points.find(([other]) => other === at);
      return found ? write(found[1]) : '–';
    })]);
    box.append(table(`${title}, ${unit}`, ['Time', ...lines.map((line) => line.name)], rows));
  } }, el('summary', {}, 'Values as a table'), box);
  return details;
}

/** Buttons for the time range of graphs. */
export function rangeButtons(route) {
  return el('div', { class: 'layouts', role: 'group', 'aria-label': 'Time range' }, ['1h', '24h'].map((last) =>
    button(last === '1h' ? '1 hour' : '24 hours', () => route.set({ last }), { kind: 'chip', pressed: String(route.get('last') === last) })));
}
