// The drawer at the side: one GPU or one pod, each with an address of its own.

import { GpuDrawer } from './gpu-drawer.js';
import { button, byId, el } from './dom.js';
import { PodDrawer } from './pod-drawer.js';
import { forgetExplanations } from './why-here.js';

/** Below this width the drawer covers the page. */
const COVERS = matchMedia('(max-width: 50rem)');

export class Drawer {
  #root = byId('drawer');
  #context; #route; #onClose;
  #key = '';
  #view;

  /** `context` has what the drawers use: `api`, `route`, `past`, `actions(gpu)`. `onClose(gpu, pod)` moves the focus when
   * the drawer closes. */
  constructor(context, onClose) {
    this.#context = context;
    this.#route = context.route;
    this.#onClose = onClose;
    this.#root.addEventListener('keydown', (event) => {
      if (event.key !== 'Escape' || event.defaultPrevented) return;
      // Otherwise the same key would clear the search as well.
      event.preventDefault();
      this.close();
    });
    COVERS.addEventListener('change', () => this.#cover());
  }

  get isOpen() { return !this.#root.hidden; }

  close() {
    const [gpu, pod] = [this.#route.get('gpu'), this.#route.get('pod')];
    this.#route.set({ gpu: '', pod: '' });
    this.#onClose(gpu, pod);
  }

  /** Shows what the address says. */
  async show(state) {
    const [gpu, pod] = [this.#route.get('gpu'), this.#route.get('pod')];
    const key = gpu ? `gpu ${gpu}` : pod ? `pod ${pod}` : '';
    if (key !== this.#key) {
      this.#key = key;
      this.#root.hidden = key === '';
      this.#root.replaceChildren();
      document.body.classList.toggle('with-drawer', key !== '');
      this.#cover();
      if (!key) {
        this.#view = undefined;
        return;
      }
      this.#view = gpu ? new GpuDrawer(this.#context, gpu) : new PodDrawer(this.#context, pod);
      this.#root.append(el('div', { class: 'drawer-head' }, this.#view.head,
        button('✕', () => this.close(), { kind: 'more', name: 'Close' })), this.#view.body);
      this.#root.scrollTop = 0;
      this.#root.focus({ preventScroll: true });
    }
    await this.#view?.show(state);
  }

  clear() {
    forgetExplanations();
    this.#key = '';
    this.#view = undefined;
    this.#root.hidden = true;
    this.#root.replaceChildren();
    document.body.classList.remove('with-drawer');
    this.#cover();
  }

  #cover() { byId('main').inert = this.isOpen && COVERS.matches; }
}
