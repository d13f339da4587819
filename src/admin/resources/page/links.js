// The link matrix as a small picture, and as a table for screen readers.

import { el, svg, table } from './dom.js';
import { errorOf } from './words.js';

/** Names of paths as in `nvidia-smi topo -m`, nearest first. */
const PATHS = {
  sameBoard: ['PSB', 'on one board'],
  singleSwitch: ['PIX', 'through one PCIe switch'],
  multiSwitch: ['PXB', 'through several PCIe switches'],
  hostBridge: ['PHB', 'through a PCIe host bridge'],
  sameNuma: ['NODE', 'within a NUMA node'],
  crossNuma: ['SYS', 'across NUMA nodes'],
};
/** Most GPUs with which each cell contains its text. */
const WORDS_MAX = 16;
/** Side of a cell and width of the heads, in units of the picture. */
const CELL = 40;
const HEAD = 34;
/** The same where only every eighth GPU is named, in letters that can be read at that scale. */
const HEAD_BIG = 110;
/** The matrix by place: what lies between two GPUs, or nothing where it is not known. */
function matrix(gpus) {
  const place = new Map(gpus.map((gpu, i) => [gpu.uuid, i]));
  return gpus.map((gpu) => {
    const row = new Array(gpus.length);
    for (const link of gpu.links ?? []) {
      const at = place.get(link.gpu);
      if (at !== undefined) row[at] = { nvlinks: link.nvlinks, path: link.path, away: isAway(gpu) || isAway(gpus[at]) };
    }
    return row;
  });
}

const short = (link) => (!link ? '?' : link.nvlinks > 0 ? `NV${link.nvlinks}` : PATHS[link.path]?.[0] ?? link.path);
export const longLink = (link) => {
  if (!link) return 'not known';
  const path = PATHS[link.path]?.[1] ?? link.path;
  return link.nvlinks > 0 ? `${link.nvlinks} NVLinks; PCIe ${path}` : `no NVLink; PCIe ${path}`;
};
const kind = (link) => (!link ? 'unknown' : link.away ? 'away' : link.nvlinks > 0 ? (link.nvlinks >= 12 ? 'nv-many' : 'nv-few') : `p-${link.path}`);
/** Whether a GPU is not found or does not answer: its links are those of the last successful scan. */
const isAway = (gpu) => gpu.health.state === 'vanished' || ['does not answer', 'fell off the bus'].includes(errorOf(gpu));
const AS_READ = 'not found or does not answer; links as last read';
const KIND_WORDS = { away: AS_READ, 'nv-many': 'NVLink, 12 or more', 'nv-few': 'NVLink, fewer', unknown: 'not known',
  ...Object.fromEntries(Object.entries(PATHS).map(([name, [word, text]]) => [`p-${name}`, `${word}: PCIe ${text}`])) };

/** Draws the links if they differ from those of the last call. */
export function showLinks(root, gpus) {
  const cells = matrix(gpus);
  const sign = JSON.stringify([gpus.map((g) => g.index), cells.map((row) => row.map((link) => [short(link), link?.away]))]);
  if (root.berthSign === sign) return;
  root.berthSign = sign;
  const kinds = new Set(cells.flatMap((row, y) => row.map((link, x) => (x === y ? null : kind(link)))).filter(Boolean));
  cells.forEach((row, y) => row.length && [...row].forEach((link, x) => { if (x !== y && !link) kinds.add('unknown'); }));
  const asTable = el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'Links as a table' });
  const details = el('details', { ontoggle: () => {
    if (details.open && !asTable.firstChild) asTable.append(linkTable(gpus, cells));
  } }, el('summary', {}, 'Links as a table'), asTable);
  root.replaceChildren(
    el('div', { class: 'links' }, picture(gpus, cells, kinds),
      el('ul', { class: 'legend', 'aria-label': 'Legend' }, Object.keys(KIND_WORDS).filter((k) => kinds.has(k)).map((k) => el('li', {},
        svg('svg', { viewBox: '0 0 12 12', width: 12, height: 12, 'aria-hidden': 'true' }, svg('rect', { class: `cell ${k}`, width: 12, height: 12, rx: 2 })),
        ` ${KIND_WORDS[k]}`)))),
    details);
}

function picture(gpus, cells, kinds) {
  const n = gpus.length;
  const words = n <= WORDS_MAX;
  const head = words ? HEAD : HEAD_BIG;
  const side = head + n * CELL;
  const every = words ? 1 : 8;
  const label = `Links between ${n} GPUs: ${[...kinds].map((k) => KIND_WORDS[k]).join('; ')}. The table below has each pair.`;
  const drawn = svg('svg', { class: words ? 'matrix' : 'matrix large', viewBox: `0 0 ${side} ${side}`, role: 'img', 'aria-label': label });
  gpus.forEach((gpu, i) => {
    if (i % every) return;
    const at = head + i * CELL + CELL / 2;
    const size = words ? '' : ' big';
    drawn.append(svg('text', { class: `axis${size}`, x: at, y: head * 0.65 }, String(gpu.index)),
      svg('text', { class: `axis${size}`, x: head * 0.55, y: at + head * 0.15 }, String(gpu.index)));
  });
  // One shape for each kind: 64 GPUs have 4,032 cells, and as many elements would be slow.
  const shapes = new Map();
  for (let y = 0; y < n; y += 1) {
    for (let x = 0; x < n; x += 1) {
      const k = x === y ? 'self' : kind(cells[y][x]);
      shapes.set(k, `${shapes.get(k) ?? ''}M${head + x * CELL + 1} ${head + y * CELL + 1}h${CELL - 2}v${CELL - 2}h-${CELL - 2}z`);
    }
  }
  for (const [k, d] of shapes) drawn.append(svg('path', { class: `cell ${k}`, d }));
  if (!words) return drawn;
  for (let y = 0; y < n; y += 1) {
    for (let x = 0; x < n; x += 1) {
      if (x === y) continue;
      const text = svg('text', { class: `word ${kind(cells[y][x])}`, x: head + x * CELL + CELL / 2, y: head + y * CELL + CELL / 2 + 4 }, short(cells[y][x]));
      text.append(svg('title', {}, `GPU ${gpus[y].index} to GPU ${gpus[x].index}: ${longLink(cells[y][x])}${cells[y][x]?.away ? `; ${AS_READ}` : ''}`));
      drawn.append(text);
    }
  }
  return drawn;
}

function linkTable(gpus, cells) {
  const rows = gpus.map((gpu, y) => [`GPU ${gpu.index}`, ...gpus.map((_, x) => (x === y ? '–' : short(cells[y][x])))]);
  return table('Links between GPUs', ['', ...gpus.map((gpu) => `GPU ${gpu.index}`)].map((h) => h || 'From'), rows, 'matrix-table');
}
