// One lane a machine. Only the lanes in sight are drawn, however many there are.
import { eachSpan, phaseOf } from "./model.js";
import { colour, fill, letter, prepare, tickWords, ticks } from "./paint.js";
import { duration, find, heldFor, say, when } from "./text.js";

const LANE = 18;
const BAR = 12;
const AXIS = 22;
const LEAST = 150;
const MOST = 368;

export class Timeline {
  constructor(model, tellStory) {
    this.model = model;
    this.tellStory = tellStory;
    this.box = find("lanes");
    this.canvas = find("lanes-canvas");
    this.space = find("lanes-space");
    this.tip = find("tip");
    this.chosen = "";
    this.wanted = false;
    this.drawn = 0;
    this.box.addEventListener("scroll", () => this.ask(), { passive: true });
    new ResizeObserver(() => this.ask()).observe(this.box);
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("click", (event) => this.press(event));
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  // Once a frame, however often it is asked for.
  ask() {
    if (this.wanted || this.box.hidden) return;
    this.wanted = true;
    requestAnimationFrame(() => {
      this.wanted = false;
      this.draw();
    });
  }

  draw() {
    const lanes = this.model.lanes();
    this.fit(lanes.length);
    const view = this.box.clientHeight;
    this.space.style.height = `${Math.max(lanes.length * LANE + AXIS - view, 0)}px`;
    find("lanes-empty").hidden = lanes.length > 0;
    const { context, width } = prepare(this.canvas, view);
    this.narrow = width < 560;
    this.gutter = this.narrow ? 88 : 164;
    this.span = this.model.span();
    this.width = width;
    const first = Math.floor(this.box.scrollTop / LANE);
    const shift = -(this.box.scrollTop % LANE);
    const { since, until } = this.span;
    this.x = (at) => this.gutter + ((Math.min(Math.max(at, since), until) - since) / (until - since)) * (width - this.gutter);
    this.axis(context, width, view);
    context.save();
    context.beginPath();
    context.rect(0, AXIS, width, view - AXIS);
    context.clip();
    for (let place = first; place < lanes.length; place += 1) {
      const top = AXIS + shift + (place - first) * LANE;
      if (top > view) break;
      this.lane(context, lanes[place], top, width);
    }
    context.restore();
    this.drawn += 1;
  }

  // As tall as there are lanes, within bounds.
  fit(count) {
    const height = `${Math.min(Math.max(count * LANE + AXIS + 4, LEAST), MOST)}px`;
    if (this.box.style.height !== height) this.box.style.height = height;
  }

  axis(context, width, view) {
    const { step, found } = ticks(this.span, Math.max((width - this.gutter) / 90, 2));
    context.strokeStyle = colour("rule");
    context.fillStyle = colour("soft");
    context.textAlign = "center";
    for (const at of found) {
      const x = Math.round(this.x(at)) + 0.5;
      context.beginPath();
      context.moveTo(x, AXIS - 4);
      context.lineTo(x, view);
      context.stroke();
      if (x > this.gutter + 24 && x < width - 24) context.fillText(tickWords(at, step), x, AXIS / 2);
    }
    context.textAlign = "left";
    context.fillText("UTC", 2, AXIS / 2);
  }

  lane(context, machine, top, width) {
    const middle = top + LANE / 2;
    const phase = phaseOf(machine);
    if (machine.id === this.chosen) {
      context.fillStyle = colour("hover");
      context.fillRect(0, top, width, LANE);
    }
    context.fillStyle = colour(machine.state === "terminated" ? "soft" : "ink");
    context.font = "11px ui-monospace, Menlo, Consolas, monospace";
    context.fillText(this.narrow ? `…${machine.id.slice(-8)}` : machine.id, 20, middle);
    context.fillStyle = colour(phase);
    context.fillRect(2, middle - 6, 13, 12);
    context.font = "bold 9px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillStyle = phase === "running" ? colour("letter-dark") : colour("letter");
    context.fillText(letter(phase), 8.5, middle + 0.5);
    eachSpan(machine, this.span.until, (begin, end, each) => {
      if (end < this.span.since || begin > this.span.until) return;
      const from = this.x(begin);
      const wide = Math.max(this.x(end) - from, 1);
      context.fillStyle = fill(context, each);
      context.fillRect(from, middle - BAR / 2, wide, BAR);
      if (wide > 14) {
        context.fillStyle = each === "running" ? colour("letter-dark") : colour("letter");
        context.fillText(letter(each), from + 7, middle + 0.5);
      }
    });
    if (machine.held > this.span.until) this.flag(context, this.x(this.span.until) - 3, middle);
    context.textAlign = "left";
  }

  // In quarantine.
  flag(context, x, middle) {
    context.strokeStyle = colour("bad");
    context.lineWidth = 2;
    context.strokeRect(x - 6, middle - 5, 8, 10);
    context.lineWidth = 1;
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const y = event.clientY - box.top;
    if (y < AXIS) return {};
    const machine = this.model.lanes()[Math.floor((y - AXIS + this.box.scrollTop) / LANE)];
    const part = (event.clientX - box.left - this.gutter) / (this.width - this.gutter);
    return { machine, time: part < 0 ? null : this.span.since + part * (this.span.until - this.span.since) };
  }

  point(event) {
    const { machine, time } = this.at(event);
    this.tip.hidden = !machine;
    if (!machine) return;
    const lines = [this.words(machine)];
    if (time !== null) {
      eachSpan(machine, this.span.until, (begin, end, phase, run) => {
        if (time < begin || time >= end) return;
        lines.push(`${phase}${run ? ` for run ${run}` : ""}, ${when(begin, end)} for ${duration(end - begin)}`);
      });
    }
    say(this.tip, lines.join("\n"));
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - this.tip.offsetWidth - 8);
    this.tip.style.left = `${Math.max(left, 4)}px`;
    this.tip.style.top = `${event.clientY + 16}px`;
  }

  press(event) {
    const { machine } = this.at(event);
    if (!machine) return;
    this.chosen = machine.id;
    this.ask();
    this.tellStory(machine.id);
  }

  key(event) {
    const lanes = this.model.lanes();
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    const before = lanes.findIndex((machine) => machine.id === this.chosen);
    if (event.key === "Enter" && before >= 0) {
      this.tellStory(this.chosen);
    } else if (event.key in moves && lanes.length) {
      const place = Math.min(Math.max(before + moves[event.key], 0), lanes.length - 1);
      this.chosen = lanes[place].id;
      say(find("chosen"), this.words(lanes[place]));
      this.reveal(place);
      this.ask();
    } else return;
    event.preventDefault();
  }

  reveal(place) {
    const room = this.box.clientHeight - AXIS;
    const top = place * LANE;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + LANE > this.box.scrollTop + room) this.box.scrollTop = top + LANE - room;
  }

  words(machine) {
    const run = machine.run ? `, run ${machine.run}` : "";
    const held = heldFor(machine, this.model.now());
    const busy = machine.busy ? ", a job runs" : "";
    return `${machine.id}: ${phaseOf(machine)}${run}${busy}${held ? `, ${held}` : ""}, ${machine.class}, ${machine.type}, ${machine.usage}`;
  }
}
