// The time of the daemon: times in its answers are compared with this one, since the browser's clock may be wrong.

/** A difference of the clocks that is less than this, milliseconds, is none: the Date header has whole seconds. */
const SAME_MS = 2000;
let offset = 0;

/** The present time on the daemon's machine, milliseconds. */
export const now = () => Date.now() + offset;

/** Takes the time of an answer. The known difference stays as it is if it still fits, so that the time does not jump. */
export function setClock(response) {
  const at = Date.parse(response.headers.get('Date') ?? '');
  if (Math.abs(at - now()) > SAME_MS) offset = at - Date.now();
}
