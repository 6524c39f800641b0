// Charts: instances by state over time, and provision times.
import { PHASES, levels } from "./model.js";
import { colour, fill, prepare, shape, tickLabel, ticks } from "./paint.js";
import { clock, fillRow, find, make, setText, syncChildren } from "./text.js";

// The values are at the right, beside the newest time, which a narrow screen shows first.
const LEFT = 8;
const BOTTOM = 20;
const TOP = 8;
const RIGHT = 44;
const ROWS = 12;
const ORDER = ["idle", "running", "claimed", "releasing", "booting", "ending", "unknown"];

function prepareChart(canvas, span) {
  const { context, width, height } = prepare(canvas);
  const x = (at) => LEFT + ((at - span.since) / (span.until - span.since)) * (width - LEFT - RIGHT);
  const { step, found } = ticks(span, Math.max((width - LEFT - RIGHT) / 90, 2));
  context.fillStyle = colour("soft");
  context.textAlign = "center";
  for (const at of found) if (x(at) > LEFT + 20 && x(at) < width - RIGHT - 12) context.fillText(tickLabel(at, step), x(at), height - BOTTOM / 2 + 2);
  return { context, width, height, x };
}

function gridLine(context, y, label, width) {
  context.strokeStyle = colour("rule");
  context.beginPath();
  context.moveTo(LEFT, Math.round(y) + 0.5);
  context.lineTo(width - RIGHT, Math.round(y) + 0.5);
  context.stroke();
  context.fillStyle = colour("soft");
  context.textAlign = "left";
  context.fillText(label, width - RIGHT + 6, y);
}

export function drawLevel(model) {
  const canvas = find("level");
  const span = model.span();
  const { context, width, height } = prepareChart(canvas, span);
  const steps = Math.max(Math.min(Math.floor((width - LEFT - RIGHT) / 2), 600), 10);
  const instances = [...model.instances.values()].filter((instance) => model.matchesKind(instance));
  const counts = levels(instances, span, steps);
  let highest = 1;
  for (let step = 0; step < steps; step += 1) {
    let sum = 0;
    for (const phase of PHASES) sum += counts[phase][step];
    if (sum > highest) highest = sum;
  }
  const rise = niceStep(highest);
  const top = Math.ceil(highest / rise) * rise;
  const y = (value) => height - BOTTOM - (value / top) * (height - BOTTOM - TOP);
  for (let value = 0; value <= top; value += rise) gridLine(context, y(value), String(value), width);
  const base = new Float64Array(steps);
  const stepWidth = (width - LEFT - RIGHT) / steps;
  for (const phase of ORDER) {
    const each = counts[phase];
    if (!each.some((value) => value > 0)) continue;
    context.beginPath();
    context.moveTo(LEFT, y(base[0]));
    for (let step = 0; step < steps; step += 1) {
      const level = y(base[step] + each[step]);
      context.lineTo(LEFT + step * stepWidth, level);
      context.lineTo(LEFT + (step + 1) * stepWidth, level);
    }
    for (let step = steps - 1; step >= 0; step -= 1) {
      context.lineTo(LEFT + (step + 1) * stepWidth, y(base[step]));
      context.lineTo(LEFT + step * stepWidth, y(base[step]));
      base[step] += each[step];
    }
    context.closePath();
    context.fillStyle = fill(context, phase);
    context.fill();
  }
  const idle = counts.idle[steps - 1];
  const peak = Math.max(...counts.idle);
  setText(find("level-note"), `${idle} idle now, ${peak} at most; idle is drawn at the bottom`);
  canvas.setAttribute("aria-label", `Instances by state over time: ${idle} idle now, ${peak} idle at most, ${highest} instances at most`);
  if (find("level-details").open) levelTable(instances, span);
}

function levelTable(instances, span) {
  // One row per round point in time.
  const { step: width, found } = ticks(span, ROWS);
  const counts = levels(instances, { since: found[0] - width / 2, until: found.at(-1) + width / 2 }, found.length);
  const present = ORDER.filter((phase) => counts[phase].some((value) => value > 0));
  syncChildren(find("level-head"), ["time", ...present], { key: (name) => name, create: (name) => make("th", name === "time" ? "" : "n", name), update: () => {} });
  const rows = found.map((_, step) => step).reverse();
  syncChildren(find("level-rows"), rows, {
    key: String,
    create: () => make("tr"),
    update: (row, step) => {
      while (row.children.length > present.length + 1) row.lastElementChild.remove();
      fillRow(row, [clock(found[step]), ...present.map((phase) => [String(counts[phase][step]), "n"])]);
    },
  });
}

function niceStep(highest) {
  const rough = highest / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  return Math.max([1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough) ?? power, 1);
}

export function drawTimes(model) {
  const span = model.span();
  const provisions = [...model.provisions.values()].filter((item) => item.seconds !== null && item.at >= span.since && model.matchesKind(item));
  const values = provisions.map((item) => Math.max(item.seconds, 0.05));
  const low = Math.floor(Math.log10(Math.min(...values, 1)));
  const high = Math.max(Math.ceil(Math.log10(Math.max(...values, 10))), low + 1);
  const { context, width, height, x } = prepareChart(find("times"), span);
  const y = (value) => height - BOTTOM - ((Math.log10(value) - low) / (high - low)) * (height - BOTTOM - TOP - 4);
  for (let power = low; power <= high; power += 1) gridLine(context, y(10 ** power), `${Number((10 ** power).toFixed(2))} s`, width);
  for (const item of provisions) shape(context, item.kind, x(item.at), y(Math.max(item.seconds, 0.05)));
}

const KINDS = ["warm", "mixed", "cold", "failed"];

export function showKinds(model) {
  const times = model.facts.get("provision_times") ?? {};
  syncChildren(find("kinds"), KINDS.filter((kind) => times[kind]), {
    key: (kind) => kind,
    create: () => make("tr"),
    update: (row, kind) => {
      const { count, p50, p95 } = times[kind];
      fillRow(row, [[(td) => showKindIn(td, kind), "whole"], [String(count), "n"], [`${p50.toFixed(2)} s`, "n"], [`${p95.toFixed(2)} s`, "n"]]);
    },
  });
}

export function showKindIn(td, kind) {
  if (td.dataset.kind === kind && td.dataset.dark === String(matchMedia("(prefers-color-scheme: dark)").matches)) return;
  td.dataset.kind = kind;
  td.dataset.dark = String(matchMedia("(prefers-color-scheme: dark)").matches);
  td.replaceChildren();
  if (!kind) return;
  const mark = td.appendChild(make("canvas", "shape"));
  mark.setAttribute("aria-hidden", "true");
  td.append(kind);
  const scale = window.devicePixelRatio || 1;
  mark.width = mark.height = 12 * scale;
  const context = mark.getContext("2d");
  context.scale(scale, scale);
  shape(context, kind, 6, 6);
}
