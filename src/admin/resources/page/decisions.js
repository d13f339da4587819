// The last decisions: the question, its outcome and the reason.

import { badge, el, renew, table, timeOf } from './dom.js';
import { problemBox } from './dialog.js';
import { holderName } from './model.js';

const OUTCOMES = { granted: 'good', placed: 'good', offered: 'plain', denied: 'bad', refused: 'bad', triaged: 'warn' };

export function showDecisions(root, { decisions, allocations, name }) {
  const byId = new Map(allocations.map((a) => [a.id, a]));
  const rows = decisions.items.map((d) => ({ d, who: whose(d, byId), on: d.gpus.map((uuid) => name.get(uuid) ?? uuid) }));
  renew(root, [decisions.problem?.detail, rows.map(({ d, who, on }) => [d.seq, who, on])], () => {
    if (decisions.problem) return problemBox(decisions.problem);
    if (rows.length === 0) return el('p', { class: 'muted' }, 'No policy has been called yet.');
    return table('Newest first', ['When', 'Outcome', 'What', 'By', 'Reason'], rows.map(({ d, who, on }) => [
      timeOf(d.at),
      badge(d.outcome, OUTCOMES[d.outcome] ?? 'plain'),
      [what(d), on.length ? ` on ${list(on)}` : '', who ? [el('br'), el('span', { class: 'muted' }, who)] : ''].flat(),
      d.by.join(', ') || '–',
      reason(d),
    ]), 'stacked');
  });
}

function what(d) {
  if (d.request) return `${d.hook}: ${d.request.count} × ${d.request.resource}`;
  if (d.reading) return `${d.hook}: ${d.reading.source} ${d.reading.code}`;
  return d.hook;
}

function whose(d, byId) {
  if (d.allocation && byId.get(d.allocation)?.holder) return holderName(byId.get(d.allocation));
  return d.candidates.length === 1 ? d.candidates[0] : d.candidates.length > 1 ? `one of ${d.candidates.length} pods` : '';
}

function reason(d) {
  const faults = d.calls.filter((call) => call.fault).map((call) => `${call.policy}: ${call.fault}`);
  return [d.reason, ...faults].filter(Boolean).join('; ') || '–';
}

const list = (names) => (names.length > 4 ? `${names.slice(0, 3).join(', ')} and ${names.length - 3} more` : names.join(', '));
