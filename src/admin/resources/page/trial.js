// Trials: what a whole stack would do on the node as it is. Nothing changes.

import { byNumber, named } from './changes.js';
import { problemBox } from './dialog.js';
import { count, el, table } from './dom.js';
import { listed } from './words.js';

/** GPUs that would be offered differently and are named; further ones are counted. */
const NAMED_MAX = 20;

/** The fields of an entry that are sent to the daemon. */
export const sent = ({ policy, digest, parameters, permissions, onFault }) => ({ policy, digest, parameters, permissions, onFault });

/** The trial of exactly these entries, and of a request for devices if there is one. */
export const tryStack = (api, entries, request) => api.post('/trials', { entries: entries.map(sent), request });

/** What a trial found: devices before and after, GPUs that change, and where a request would be. */
export function trialReport(report, { node, gpus }) {
  const differs = report.offers.filter((offer) => offer.differs);
  const names = differs.map((offer) => offer.name.replace('GPU ', ''));
  const more = names.length - NAMED_MAX;
  const which = more > 0 ? `${names.slice(0, NAMED_MAX).join(', ')} and ${more} more` : listed(names);
  const change = (now, then) => (now === then ? String(now) : [el('del', {}, String(now)), ' ', el('ins', {}, String(then))]);
  const faults = report.calls.filter((call) => call.fault);
  const { request } = report;
  const taken = report.resources.filter((r) => r.freeNow > 0 && r.free === 0).map((r) => r.resource);
  // A trial does not see GPUs that vanished; the page counts their devices.
  const away = gpus.filter((gpu) => gpu.health.state === 'vanished');
  const without = report.resources.some((r) => node.resources.some((shown) => shown.resource === r.resource && shown.devices !== r.devicesNow)) && away.length > 0;
  return [
    report.refused ? el('p', { class: 'notice bad' }, `It would be refused: ${report.refused}`)
      : el('p', { class: `notice ${taken.length > 0 ? 'warn' : 'good'}` }, `${taken.length > 0 ? `It works, but no device of ${listed(taken)} would be free.` : 'It works on this node.'} ${differs.length === 0 ? 'No GPU is offered differently.' : `${count(differs.length, 'GPU')} would be offered differently: ${which}.`}`),
    ...(report.warnings ?? []).map((text) => el('p', { class: 'note warn' }, text)),
    !report.refused && table('Devices now and after activation', ['Resource', 'Devices', 'Free'], report.resources.map((r) => [el('code', {}, r.resource), change(r.devicesNow, r.devices), change(r.freeNow, r.free)])),
    without && el('p', { class: 'muted' }, `Devices of ${named(away)} are not counted, since ${byNumber(away, 'it is', 'they are')} not found.`),
    request && el('p', {}, `A request for ${request.count} × ${request.resource} would be ${request.outcome}${request.names.length > 0 ? ` on ${listed(request.names)}` : ''}${request.reason || request.placedBecause ? `: ${request.reason || request.placedBecause}` : ''}.`),
    faults.length > 0 && el('ul', { class: 'events' }, faults.map((call) => el('li', {}, `${call.policy}, ${call.hook}: ${call.fault}`))),
    el('p', { class: 'muted' }, report.stack.length > 0 ? `Called in this order: ${report.stack.join(', ')}` : 'No policy is called: each GPU is offered whole.'),
  ].filter(Boolean);
}

/**
 * A trial that a dialog makes when it opens: its box, and a guard for `ask`, by which the change waits for the result. A
 * failed trial, such as one beside another, does not keep from the change: the daemon checks it again.
 */
export function trialOf(api, entries, state) {
  const box = el('div', { class: 'trial', role: 'status' }, 'Tried on this node…');
  const guard = async (set) => {
    set('it is being tried');
    try {
      const report = await tryStack(api, entries);
      box.replaceChildren(...trialReport(report, state));
      set(report.refused ? 'this stack would be refused' : '');
    } catch (problem) {
      box.replaceChildren(problemBox(problem));
      set('');
    }
  };
  return { box, guard };
}
