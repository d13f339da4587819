// The time of the daemon: times in its answers are compared with this one, since the browser's clock may be wrong.

/** A smaller difference of the clocks, milliseconds, is ignored: the Date header has whole seconds. */
const SAME_MS = 2000;
let offset = 0;

/** The present time on the daemon's machine, milliseconds. */
export const now = () => Date.now() + offset;

/** Sets the clock by the Date header of an answer, unless the difference is small, so that the time does not jump. */
export function setClock(response) {
  const at = Date.parse(response.headers.get('Date') ?? '');
  if (Math.abs(at - now()) > SAME_MS) offset = at - Date.now();
}
