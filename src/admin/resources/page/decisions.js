// The last decisions: one row for each request of a pod, refusals above all others.

import { badge, el, renew, table, timeOf } from './dom.js';
import { problemBox } from './dialog.js';
import { holderName } from './model.js';
import { search } from './words.js';

const OUTCOMES = { granted: 'good', placed: 'plain', offered: 'plain', denied: 'bad', refused: 'bad', triaged: 'warn' };
/** A placement belongs to the next request of the same devices within this time, milliseconds. */
const TOGETHER_MS = 10_000;

export function showDecisions(root, { decisions, allocations, gpu }, route) {
  const byId = new Map(allocations.map((a) => [a.id, a]));
  const name = (uuid) => (gpu.has(uuid) ? `GPU ${gpu.get(uuid).index}` : uuid);
  const finds = search(route.get('q'));
  const line = ({ d, placed }) => ({ d, placed, who: whose(d, byId), on: (d.outcome === 'granted' || d.outcome === 'placed' || d.hook === 'triage' ? d.gpus : []).map(name) });
  const fits = ({ d, who, on }) => finds([d.outcome, d.hook, d.reason, who, ...on.map((text) => text.replace(' ', '')), ...d.by, d.request?.resource].join(' ').toLowerCase());
  const pinned = (decisions.refusals ?? []).map((d) => line({ d })).filter(fits);
  const kept = new Set(pinned.map(({ d }) => d.seq));
  const rows = joinPlacements(decisions.items).map(line).filter((row) => fits(row) && !kept.has(row.d.seq));
  renew(root, [decisions.problem?.detail, [...pinned, ...rows].map(({ d, who, on, placed }) => [d.seq, placed?.seq, who, on])], () => {
    if (decisions.problem) return problemBox(decisions.problem);
    if (rows.length + pinned.length === 0) return el('p', { class: 'muted' }, route.get('q') ? 'No decision matches.' : 'No policy has been called yet.');
    return [pinned.length > 0 && decisionTable('Refused, newest first', pinned, 'refusals'), rows.length > 0 && decisionTable('Newest first', rows, '')];
  });
}

const decisionTable = (caption, rows, kind) => table(caption, ['When', 'Outcome', 'Request', 'Pod', 'By', 'Reason'], rows.map(({ d, placed, who, on }) => [
  timeOf(d.at), badge(d.outcome, OUTCOMES[d.outcome] ?? 'plain'), what(d) + (on.length > 0 ? ` on ${list(on)}` : ''), who || '–',
  [...new Set([...placed?.by ?? [], ...d.by])].join(', ') || '–', [placed && reason(placed), reason(d)].filter(Boolean).join('; ') || (d.hook === 'offer' ? '' : '–')]), `stacked ${kind}`);

/** Placements are joined with the requests that follow them with the same devices: both are of one pod. */
function joinPlacements(items) {
  const rows = [];
  const placements = new Map();
  const key = (resource, devices) => `${resource} ${[...devices ?? []].sort().join()}`;
  for (const d of items.toReversed()) {
    if (d.hook === 'place') {
      const row = { d };
      rows.push(row);
      placements.set(key(d.request.resource, d.answer.devices), row);
    } else {
      const row = d.hook === 'admit' ? placements.get(key(d.request.resource, d.request.devices)) : undefined;
      if (row && row.d.hook === 'place' && Date.parse(d.at) - Date.parse(row.d.at) < TOGETHER_MS) Object.assign(row, { d, placed: row.d });
      else rows.push({ d });
    }
  }
  return rows.sort((a, b) => b.d.seq - a.d.seq);
}

function what(d) {
  if (d.request) return `${d.hook === 'place' ? 'placement of ' : ''}${d.request.count} × ${d.request.resource}`;
  if (d.reading) return `health: ${d.reading.source} ${d.reading.code}`;
  return d.hook === 'offer' ? 'what GPUs are offered as' : d.hook;
}

/** The pod of a decision: of a grant the holder, also of an ended one. */
function whose(d, byId) {
  const holder = d.holder?.pod ? d : byId.get(d.allocation);
  if (holder?.holder?.pod) return holderName(holder);
  if (d.candidates.length === 1) return d.candidates[0];
  if (d.candidates.length > 1) return `one of ${d.candidates.length} pods`;
  return d.allocation ? `not known (allocation ${d.allocation})` : '';
}

function reason(d) {
  const faults = d.calls.filter((call) => call.fault).map((call) => `${call.policy}: ${call.fault}`);
  return [d.reason, ...faults].filter(Boolean).join('; ');
}

const list = (names) => (names.length > 4 ? `${names.slice(0, 3).join(', ')} and ${names.length - 3} more` : names.join(', '));
