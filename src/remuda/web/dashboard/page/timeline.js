// Timeline: one lane per instance. Only the visible lanes are drawn.
import { eachSpan, phaseOf } from "./model.js";
import { colour, fill, letter, prepare, quarantineMark, tickLabel, ticks } from "./paint.js";
import { duration, find, quarantineLeft, setText, when } from "./text.js";

const LANE_HEIGHT = 18;
const BAR_HEIGHT = 12;
const AXIS_HEIGHT = 22;
const MIN_HEIGHT = 150;
const MIN_LABEL = 40;
const MAX_HEIGHT = 368;
// Below this width the time axis scrolls sideways; the style sheet has the same limit for charts.
const MIN_WIDTH = 416;
const SCROLLED_WIDTH = 640;

export class Timeline {
  constructor(model, explain) {
    this.model = model;
    this.explain = explain;
    this.box = find("lanes");
    this.canvas = find("lanes-canvas");
    this.space = find("lanes-space");
    this.tip = find("tip");
    this.selected = "";
    this.drawRequested = false;
    this.box.addEventListener("scroll", () => this.requestDraw(), { passive: true });
    new ResizeObserver(() => this.requestDraw()).observe(this.box);
    this.canvas.addEventListener("mousemove", (event) => this.showTip(event));
    this.canvas.addEventListener("mouseleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("click", (event) => this.select(event));
    this.box.addEventListener("keydown", (event) => this.pressKey(event));
  }

  // Draw in the next frame. Several requests per frame draw once.
  requestDraw() {
    if (this.drawRequested || this.box.hidden) return;
    this.drawRequested = true;
    requestAnimationFrame(() => {
      this.drawRequested = false;
      this.draw();
    });
  }

  draw() {
    const lanes = this.model.lanes();
    this.fit(lanes.length);
    const view = this.box.clientHeight;
    this.space.style.height = `${Math.max(lanes.length * LANE_HEIGHT + AXIS_HEIGHT - view, 0)}px`;
    this.fitWidth();
    find("lanes-empty").hidden = lanes.length > 0;
    const { context, width } = prepare(this.canvas, view);
    this.narrow = width < 560;
    this.gutter = this.narrow ? 88 : 164;
    this.span = this.model.span();
    this.plot = Math.max(this.box.scrollWidth, width) - this.gutter;
    const first = Math.floor(this.box.scrollTop / LANE_HEIGHT);
    const shift = -(this.box.scrollTop % LANE_HEIGHT);
    const { since, until } = this.span;
    const left = this.gutter - this.box.scrollLeft;
    this.x = (at) => left + ((Math.min(Math.max(at, since), until) - since) / (until - since)) * this.plot;
    this.axis(context, width, view);
    context.save();
    context.beginPath();
    context.rect(0, AXIS_HEIGHT, width, view - AXIS_HEIGHT);
    context.clip();
    for (let index = first; index < lanes.length; index += 1) {
      const top = AXIS_HEIGHT + shift + (index - first) * LANE_HEIGHT;
      if (top > view) break;
      this.lane(context, lanes[index], top, width);
    }
    context.restore();
  }

  // Fit the height to the number of lanes, within bounds.
  fit(count) {
    const height = `${Math.min(Math.max(count * LANE_HEIGHT + AXIS_HEIGHT + 4, MIN_HEIGHT), MAX_HEIGHT)}px`;
    if (this.box.style.height !== height) this.box.style.height = height;
  }

  // On a narrow screen, make room for the time axis and show the newest time first.
  fitWidth() {
    const wanted = this.box.clientWidth < MIN_WIDTH ? `${SCROLLED_WIDTH}px` : "";
    if (this.space.style.width === wanted) return;
    this.space.style.width = wanted;
    this.box.scrollLeft = this.box.scrollWidth;
  }

  axis(context, width, view) {
    const { step, found } = ticks(this.span, Math.max(this.plot / 90, 2));
    context.strokeStyle = colour("rule");
    context.fillStyle = colour("soft");
    context.textAlign = "center";
    for (const at of found) {
      const x = Math.round(this.x(at)) + 0.5;
      if (x < this.gutter) continue;
      context.beginPath();
      context.moveTo(x, AXIS_HEIGHT - 4);
      context.lineTo(x, view);
      context.stroke();
      if (x > this.gutter + 24 && x < width - 24) context.fillText(tickLabel(at, step), x, AXIS_HEIGHT / 2);
    }
    context.textAlign = "left";
    context.fillText("UTC", 2, AXIS_HEIGHT / 2);
  }

  lane(context, instance, top, width) {
    const middle = top + LANE_HEIGHT / 2;
    const phase = phaseOf(instance);
    if (instance.id === this.selected) {
      context.fillStyle = colour("hover");
      context.fillRect(0, top, width, LANE_HEIGHT);
    }
    context.fillStyle = colour(instance.state === "terminated" ? "soft" : "ink");
    context.font = "11px ui-monospace, Menlo, Consolas, monospace";
    context.fillText(this.narrow ? `…${instance.id.slice(-8)}` : instance.id, 20, middle);
    context.fillStyle = colour(phase);
    context.fillRect(2, middle - 6, 13, 12);
    context.font = "bold 9px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillStyle = phase === "running" ? colour("letter-dark") : colour("letter");
    context.fillText(letter(phase), 8.5, middle + 0.5);
    eachSpan(instance, this.span.until, (begin, end, each) => {
      if (end < this.span.since || begin > this.span.until || this.x(end) < this.gutter) return;
      const from = Math.max(this.x(begin), this.gutter);
      const wide = Math.max(this.x(end) - from, 1);
      context.fillStyle = fill(context, each);
      context.fillRect(from, middle - BAR_HEIGHT / 2, wide, BAR_HEIGHT);
      if (wide > 14) {
        context.fillStyle = each === "running" ? colour("letter-dark") : colour("letter");
        context.fillText(letter(each), from + 7, middle + 0.5);
      }
    });
    if (instance.set) this.label(context, instance, middle);
    if (instance.quarantined_until > this.span.until) quarantineMark(context, this.x(this.span.until) - 5, middle);
    context.textAlign = "left";
  }

  // Write the set and the job of a machine into its current bar, if there is room.
  label(context, instance, middle) {
    let from = 0;
    eachSpan(instance, this.span.until, (begin, end, phase) => (from = phase === phaseOf(instance) ? Math.max(this.x(begin), this.gutter) + 16 : from));
    const room = this.x(this.span.until) - from - 4;
    if (!from || room < MIN_LABEL) return;
    const job = this.model.jobOf(instance);
    context.save();
    context.beginPath();
    context.rect(from, middle - BAR_HEIGHT / 2, room, BAR_HEIGHT);
    context.clip();
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "left";
    context.fillStyle = phaseOf(instance) === "running" ? colour("letter-dark") : colour("letter");
    context.fillText(`${instance.set}${job ? `: ${job.name || job.id}` : ""}`, from, middle + 0.5);
    context.restore();
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const y = event.clientY - box.top;
    if (y < AXIS_HEIGHT) return {};
    const instance = this.model.lanes()[Math.floor((y - AXIS_HEIGHT + this.box.scrollTop) / LANE_HEIGHT)];
    const right = event.clientX - box.left - this.gutter;
    const part = (right + this.box.scrollLeft) / this.plot;
    return { instance, time: right < 0 ? null : this.span.since + part * (this.span.until - this.span.since) };
  }

  showTip(event) {
    const { instance, time } = this.at(event);
    this.tip.hidden = !instance;
    if (!instance) return;
    const lines = [this.describe(instance)];
    if (time !== null) {
      eachSpan(instance, this.span.until, (begin, end, phase, holder) => {
        if (time < begin || time >= end) return;
        lines.push(`${phase}${holder ? ` for ${holder}` : ""}, ${when(begin, end)} for ${duration(end - begin)}`);
      });
    }
    setText(this.tip, lines.join("\n"));
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - this.tip.offsetWidth - 8);
    this.tip.style.left = `${Math.max(left, 4)}px`;
    this.tip.style.top = `${event.clientY + 16}px`;
  }

  select(event) {
    const { instance } = this.at(event);
    if (!instance) return;
    this.selected = instance.id;
    this.requestDraw();
    this.explain(instance.id);
  }

  pressKey(event) {
    const lanes = this.model.lanes();
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    const before = lanes.findIndex((instance) => instance.id === this.selected);
    if (event.key === "Enter" && before >= 0) {
      this.explain(this.selected);
    } else if (event.key in moves && lanes.length) {
      const index = Math.min(Math.max(before + moves[event.key], 0), lanes.length - 1);
      this.selected = lanes[index].id;
      setText(find("selected"), this.describe(lanes[index]));
      this.reveal(index);
      this.requestDraw();
    } else return;
    event.preventDefault();
  }

  reveal(index) {
    const room = this.box.clientHeight - AXIS_HEIGHT;
    const top = index * LANE_HEIGHT;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + LANE_HEIGHT > this.box.scrollTop + room) this.box.scrollTop = top + LANE_HEIGHT - room;
  }

  describe(instance) {
    const job = this.model.jobOf(instance);
    const set = instance.set ? `, set ${instance.set}${job ? `, job ${job.name || job.id}` : ""}` : "";
    const run = instance.run ? `, run ${instance.run}` : "";
    const quarantine = quarantineLeft(instance, this.model.now());
    const busy = instance.agent_dead ? ", agent dead" : instance.busy ? ", a job is running" : "";
    return `${instance.id}: ${phaseOf(instance)}${set}${run}${busy}${quarantine ? `, ${quarantine}` : ""}, ${instance.class}, ${instance.type}, ${instance.usage}`;
  }
}
