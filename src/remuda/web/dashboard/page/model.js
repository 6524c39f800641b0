// What the page knows, and what of it is asked for. Everything here comes from outside: it is shown as text, never as markup.

export const PHASES = ["booting", "claimed", "running", "releasing", "idle", "ending", "unknown"];
export const LETTERS = { booting: "B", claimed: "C", running: "R", releasing: "L", idle: "I", ending: "E", ended: "X", unknown: "?" };
const PHASE_OF = { created: "booting", terminating: "ending", terminated: "ended" };
export const TILES = ["booting", "claimed", "running", "releasing", "idle", "ending", "ended"];

export const phaseOf = (machine) => PHASE_OF[machine.state] ?? (PHASES.includes(machine.state) ? machine.state : "unknown");

export class Model {
  constructor() {
    this.reset();
    this.filter = { states: new Set(), class: "", usage: "", text: "", window: 1800 };
    this.offset = 0;
    this.good = 0;
  }

  reset() {
    this.version = 0;
    this.tag = "";
    this.instances = new Map();
    this.provisions = new Map();
    this.decisions = new Map();
    this.facts = new Map();
    this.stale = true;
  }

  // A snapshot, or what has changed since the version that is known.
  apply(board) {
    for (const kind of ["instances", "provisions", "decisions", "facts"]) {
      for (const [name, value] of Object.entries(board[kind] ?? {})) {
        if (value === null) this[kind].delete(name);
        else this[kind].set(name, kind === "facts" ? value : Object.assign(value, { id: name }));
      }
    }
    this.version = board.version;
    this.tag = board.tag;
    this.stale = true;
  }

  heard(look) {
    this.offset = look.now - Date.now();
    this.good = look.good;
  }

  now() {
    return Date.now() + this.offset;
  }

  matches(machine) {
    const { states, text } = this.filter;
    return this.matchesKind(machine) && (!states.size || states.has(phaseOf(machine))) && (!text || this.matchesText(machine, text));
  }

  matchesKind(item) {
    const wanted = this.filter;
    return (!wanted.class || item.class === wanted.class) && (!wanted.usage || !item.usage || item.usage === wanted.usage);
  }

  matchesText(machine, text) {
    const told = text.toLowerCase();
    return [machine.id, machine.run, machine.last, ...machine.runs].some((name) => name.toLowerCase().includes(told));
  }

  // Machines that are asked for: the living first, then the newest first.
  lanes() {
    if (this.stale) {
      const living = (machine) => (machine.state === "terminated" ? 1 : 0);
      this.shown = [...this.instances.values()]
        .filter((machine) => this.matches(machine))
        .sort((one, other) => living(one) - living(other) || other.born - one.born || (one.id < other.id ? -1 : 1));
      this.stale = false;
    }
    return this.shown;
  }

  // From when on things are drawn: as far back as was asked for, and no further than there is something.
  span() {
    const until = this.now();
    const { window } = this.filter;
    const about = this.facts.get("about");
    const oldest = until - (window || (about?.since_s ?? 3600)) * 1000;
    let first = until - 60_000;
    for (const machine of this.lanes()) if (machine.born < first) first = machine.born;
    return { since: Math.max(first, oldest) - 1000, until };
  }
}

// Each span of a machine: begin, end, phase, run.
export function eachSpan(machine, until, tell) {
  const { lane, runs, born } = machine;
  if (!lane) return;
  const end = machine.end || until;
  for (let place = 0; place < lane.length; place += 3) {
    const begin = born + lane[place];
    const stop = place + 3 < lane.length ? born + lane[place + 3] : Math.max(end, begin);
    tell(begin, stop, PHASES[lane[place + 1]], lane[place + 2] < 0 ? "" : runs[lane[place + 2]]);
  }
}

// How many machines were in each phase at each of so many moments.
export function levels(machines, { since, until }, steps) {
  const width = (until - since) / steps;
  const found = Object.fromEntries(PHASES.map((phase) => [phase, new Float64Array(steps + 1)]));
  const place = (at) => Math.min(Math.max(Math.ceil((at - since) / width - 0.5), 0), steps);
  for (const machine of machines) {
    eachSpan(machine, until, (begin, end, phase) => {
      if (end < since || begin > until) return;
      found[phase][place(begin)] += 1;
      found[phase][place(end)] -= 1;
    });
  }
  for (const counts of Object.values(found)) for (let step = 1; step < steps; step += 1) counts[step] += counts[step - 1];
  return found;
}
