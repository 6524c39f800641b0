// Canvas drawing: colours from the style sheet, and a pattern per phase so that no phase is shown by colour alone.
import { LETTERS } from "./model.js";

let styles = null;
const patterns = new Map();
const theme = matchMedia("(prefers-color-scheme: dark)");
theme.addEventListener("change", () => {
  styles = null;
  patterns.clear();
});
export const onThemeChange = (callback) => theme.addEventListener("change", callback);

export function colour(name) {
  styles ??= getComputedStyle(document.documentElement);
  return styles.getPropertyValue(`--${name}`).trim();
}

const PATTERN_LINES = {
  booting: [[0, 8, 8, 0]],
  claimed: [[4, 0, 4, 8]],
  releasing: [[0, 0, 8, 8]],
  ending: [[0, 8, 8, 0], [0, 0, 8, 8]],
  unknown: [[0, 4, 8, 4]],
};

// Fill style of a phase: a colour, or a pattern with the phase's lines.
export function fill(context, phase) {
  if (!PATTERN_LINES[phase]) return colour(phase);
  if (!patterns.has(phase)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    pen.fillStyle = colour(phase);
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = colour("mark");
    pen.lineWidth = 1.5;
    for (const [x, y, toX, toY] of PATTERN_LINES[phase]) {
      for (const shift of [-8, 0, 8]) {
        pen.beginPath();
        pen.moveTo(x + (x === toX ? 0 : shift), y);
        pen.lineTo(toX + (x === toX ? 0 : shift), toY);
        pen.stroke();
      }
    }
    patterns.set(phase, context.createPattern(tile, "repeat"));
  }
  return patterns.get(phase);
}

// Clear a canvas and scale it to the screen's resolution. Returns its size in CSS pixels.
export function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const tall = height ?? canvas.clientHeight;
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(tall * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(tall * scale);
    if (height !== undefined) canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, tall);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return { context, width, height: tall };
}

// The mark of an instance in quarantine.
export function quarantineMark(context, x, middle) {
  context.fillStyle = colour("bad-paper");
  context.fillRect(x - 4, middle - 5, 8, 10);
  context.strokeStyle = colour("bad");
  context.lineWidth = 2;
  context.strokeRect(x - 4, middle - 5, 8, 10);
  context.lineWidth = 1;
}

export const letter = (phase) => LETTERS[phase] ?? "?";

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800].map((step) => step * 1000);

// At most about `limit` round points in time within a range.
export function ticks({ since, until }, limit) {
  const step = STEPS.find((each) => (until - since) / each <= limit) ?? STEPS.at(-1);
  const found = [];
  for (let at = Math.ceil(since / step) * step; at <= until; at += step) found.push(at);
  return { step, found };
}

export function tickLabel(at, step) {
  const text = new Date(at).toISOString();
  if (step >= 86_400_000) return text.slice(5, 10);
  return step < 60_000 ? text.slice(11, 19) : text.slice(11, 16);
}

const SHAPES = { cold: "M-4-4H4V4H-4Z", mixed: "M0-5L5 4H-5Z", failed: "M-5-3L-3-5L0-2L3-5L5-3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z" };

// Draw the shape of a kind of provision, as in the HTML report.
export function shape(context, kind, x, y) {
  context.fillStyle = colour(kind in SHAPES || kind === "warm" ? kind : "unknown");
  context.save();
  context.translate(x, y);
  if (SHAPES[kind]) context.fill(new Path2D(SHAPES[kind]));
  else {
    context.beginPath();
    context.arc(0, 0, 4, 0, 2 * Math.PI);
    context.fill();
  }
  context.restore();
}
