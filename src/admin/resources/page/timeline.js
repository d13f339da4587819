// The events of the last hour or day that concern operators: one row for each group of kinds, and the list.

import { now } from './clock.js';
import { problemNote } from './dialog.js';
import { badge, button, count, el, renew, svg, timeOf } from './dom.js';
import { rangeButtons, timeMarks } from './graph.js';
import { EVENTS_MAX, LANES, START } from './history.js';
import { recordedSince, sinceText, startOf } from './record.js';
import { RANGES_MS } from './route.js';
import { gpuButton } from './row.js';
import { search } from './words.js';

/** Events of the list. */
const LIST_MAX = 200;
/** The picture, in pixels; it is as wide as the page, within limits. */
const WIDE_MIN = 340;
const WIDE_MAX = 1700;
const LANE = 28;
const LEFT = 76;
const KINDS = { Health: 'bad', Drains: 'busy', Refusals: 'warn', Policies: 'good', Node: 'plain' };
/** Beyond the present, so that a mark of now is whole. */
const MARGIN = 12;

const laneOf = (event) => Object.keys(LANES).find((lane) => LANES[lane].includes(event.kind)) ?? 'Node';
/** A health event that is good news. */
const kindOf = (event) => (event.kind === 'gpuFound' ? 'plain' : event.kind === 'gpuHealth' && /healthy again|is healthy/.test(event.words) ? 'good' : KINDS[laneOf(event)]);

/** The start of the daemon, as an event: it is the first that the record has. */
const startEvent = ({ startedAt, version }) => ({ kind: START, at: startedAt, words: `The daemon started (Berth ${version}); it records events from then on` });

/** `problem` is why the events could not be read. */
export function showTimeline(root, tools, { events, problem }, state, { route }) {
  const last = route.get('last');
  const lane = route.get('lane');
  renew(tools, [last, lane], () => [laneButtons(route), rangeButtons(route)]);
  const finds = search(route.get('q'));
  const since = now() - RANGES_MS[last];
  const all = [...events ?? [], ...startOf(state.node) ? [startEvent(state.node)] : []];
  const shown = all.filter((event) => Date.parse(event.at) >= since && (!LANES[lane] || laneOf(event) === lane) && finds(`${event.words} ${event.kind} gpu${state.gpu.get(event.gpu)?.index}`.toLowerCase()));
  // The picture moves by a step each minute.
  const wide = Math.max(WIDE_MIN, Math.min(WIDE_MAX, root.clientWidth - 18));
  renew(root, [wide, events === undefined, problem?.detail, last, lane, Math.floor(now() / 60_000), shown.length, shown[0]?.at, sinceText(state.node, last)], () => {
    if (problem) return problemNote(problem);
    if (events === undefined) return el('p', { class: 'muted' }, 'No past events: this daemon keeps none, or you may not read them.');
    const listed = shown.slice(0, LIST_MAX);
    const runs = folded(listed);
    return [picture(shown, last, wide, startOf(state.node)),
      el('p', { class: 'muted', role: 'status' }, `${count(shown.length, 'event')} in the last ${last === '1h' ? 'hour' : '24 hours'}${listed.length < shown.length ? `, the newest ${LIST_MAX} are listed` : ''}${runs.length < listed.length ? `, in ${count(runs.length, 'line')}, since those of one cause share a line` : ''}`),
      recordedSince(state.node, last), events.length >= EVENTS_MAX && el('p', { class: 'muted' }, `At most ${EVENTS_MAX} events are kept: older ones may be missing.`),
      el('ol', { class: 'events timeline', 'aria-label': 'Events, newest first' }, runs.map((run) => el('li', {}, timeOf(run[0].at), ' ', badge(laneOf(run[0]), kindOf(run[0])), ' ',
        run.length === 1 ? sentence(run[0], state, route) : el('details', { class: 'run' }, el('summary', {}, `${run.length} ${RUNS[run[0].kind]}`),
          el('ul', { class: 'events' }, run.map((event) => el('li', {}, sentence(event, state, route))))))))];
  });
}

/** Kinds of event that one cause produces in large numbers, such as a start, and the text of the line that stands for them. */
const RUNS = { gpuFound: 'GPUs were found', policyUploaded: 'policies came with the daemon' };
const RUN_MS = 2000;

/** Whether an event is shown in one line with the event before it in the list. */
const isOfRun = (event, before) => before?.kind === event.kind && Object.hasOwn(RUNS, event.kind) && Date.parse(before.at) - Date.parse(event.at) <= RUN_MS
  && (event.kind !== 'policyUploaded' || [event, before].every(({ words }) => words.includes('came with the daemon')));

/** The events in runs: one run is one line. */
function folded(events) {
  const runs = [];
  for (const event of events) {
    if (isOfRun(event, runs.at(-1)?.at(-1))) runs.at(-1).push(event);
    else runs.push([event]);
  }
  return runs;
}

/** Buttons for the rows of the picture: one shows only its events. */
function laneButtons(route) {
  return el('div', { class: 'layouts', role: 'group', 'aria-label': 'Kinds of event' }, Object.keys(LANES).map((lane) => {
    const on = route.get('lane') === lane;
    return button(lane, () => route.set({ lane: on ? '' : lane }), { kind: 'chip', pressed: String(on) });
  }));
}

/** The words of an event, in which the GPU's name opens its drawer. */
function sentence({ words, gpu: uuid }, state, route) {
  const gpu = state.gpu.get(uuid);
  const [before, after] = gpu ? words.split(new RegExp(`\\bGPU ${gpu.index}\\b(.*)`, 's')) : [words];
  if (!gpu) return el('span', {}, words);
  return el('span', {}, before, after === undefined && ' ', gpuButton(gpu, route), after);
}

function picture(events, last, wide, start) {
  const to = now();
  const from = to - RANGES_MS[last];
  const lanes = Object.keys(LANES);
  const high = lanes.length * LANE + 20;
  const x = (at) => LEFT + ((at - from) / RANGES_MS[last]) * (wide - LEFT - MARGIN);
  const sums = lanes.map((lane) => `${events.filter((event) => laneOf(event) === lane).length} ${lane.toLowerCase()}`);
  const drawn = svg('svg', { class: 'lanes', viewBox: `0 0 ${wide} ${high}`, role: 'img', 'aria-label': `Events of the last ${last}: ${sums.join(', ')}. The list below has each.` });
  if (start > from) {
    drawn.append(svg('rect', { class: 'unrecorded', x: LEFT, y: 0, width: (x(start) - LEFT).toFixed(1), height: lanes.length * LANE }, svg('title', {}, 'not recorded')),
      svg('path', { class: 'recorded-from', d: `M${x(start).toFixed(1)} 0V${lanes.length * LANE}` }));
  }
  lanes.forEach((lane, i) => drawn.append(svg('path', { class: 'grid', d: `M${LEFT} ${(i + 0.5) * LANE}H${wide - MARGIN}` }), svg('text', { class: 'axis start', x: 0, y: (i + 0.5) * LANE + 4 }, lane)));
  for (const mark of timeMarks(to, last)) {
    if (x(mark) > LEFT + 16 && x(mark) < wide - 20) drawn.append(svg('text', { class: 'axis', x: x(mark).toFixed(1), y: high - 5 }, new Date(mark).toLocaleTimeString('en-GB', { hour: '2-digit', minute: '2-digit' })));
  }
  // The newest are drawn last, above older ones.
  for (const event of events.toReversed()) {
    const mark = svg('circle', { class: `mark ${kindOf(event)}`, cx: x(Date.parse(event.at)).toFixed(1), cy: (lanes.indexOf(laneOf(event)) + 0.5) * LANE, r: 5 });
    mark.append(svg('title', {}, event.words));
    drawn.append(mark);
  }
  return drawn;
}
