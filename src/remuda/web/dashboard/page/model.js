// Data and filters of the page. All strings are untrusted: they are shown as text, never as markup.

export const PHASES = ["booting", "claimed", "running", "releasing", "idle", "ending", "unknown"];
export const LETTERS = { booting: "B", claimed: "C", running: "R", releasing: "L", idle: "I", ending: "E", ended: "X", unknown: "?" };
const PHASE_OF = { created: "booting", terminating: "ending", terminated: "ended" };
export const TILES = ["booting", "claimed", "running", "releasing", "idle", "ending", "ended"];

export const phaseOf = (instance) => PHASE_OF[instance.state] ?? (PHASES.includes(instance.state) ? instance.state : "unknown");

export class Model {
  constructor() {
    this.reset();
    this.filter = { states: new Set(), class: "", usage: "", text: "", window: 1800 };
    this.offset = 0;
    this.lastSuccess = 0;
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

  // Apply a snapshot, or the changes since the known version.
  apply(document) {
    for (const kind of ["instances", "provisions", "decisions", "facts"]) {
      for (const [name, value] of Object.entries(document[kind] ?? {})) {
        if (value === null) this[kind].delete(name);
        else this[kind].set(name, kind === "facts" ? value : Object.assign(value, { id: name }));
      }
    }
    this.version = document.version;
    this.tag = document.tag;
    this.stale = true;
  }

  setPollTimes(poll) {
    this.offset = poll.now - Date.now();
    this.lastSuccess = poll.last_success;
  }

  // The running job of a machine of a runner set.
  jobOf(instance) {
    if (!instance.set) return undefined;
    return (this.facts.get("jobs") ?? []).find((job) => job.instance === instance.id && job.started_at && !job.completed_at);
  }

  now() {
    return Date.now() + this.offset;
  }

  matches(instance) {
    const { states, text } = this.filter;
    return this.matchesKind(instance) && (!states.size || states.has(phaseOf(instance))) && (!text || this.matchesText(instance, text));
  }

  matchesKind(item) {
    const filter = this.filter;
    return (!filter.class || item.class === filter.class) && (!filter.usage || !item.usage || item.usage === filter.usage);
  }

  matchesText(instance, text) {
    const pattern = text.toLowerCase();
    return [instance.id, instance.set, instance.holder, instance.last_holder, ...instance.holders].some((name) => name.toLowerCase().includes(pattern));
  }

  // Instances of the chosen window that match the filters: live before terminated, then newest first.
  lanes() {
    const since = this.windowStart();
    if (this.stale || this.nextToLeave < since) {
      const rank = (instance) => (instance.state === "terminated" ? 1 : 0);
      const left = (instance) => instance.state === "terminated" && instance.ended_at < since;
      const matching = [...this.instances.values()].filter((instance) => this.matches(instance));
      this.shown = matching
        .filter((instance) => !left(instance))
        .sort((one, other) => rank(one) - rank(other) || other.created_at - one.created_at || (one.id < other.id ? -1 : 1));
      // Matching instances that ended before the window, and the end of the one that leaves it next.
      this.endedBefore = matching.length - this.shown.length;
      this.nextToLeave = Infinity;
      for (const { state, ended_at: endedAt } of this.shown) if (state === "terminated" && endedAt < this.nextToLeave) this.nextToLeave = endedAt;
      this.stale = false;
    }
    return this.shown;
  }

  windowStart() {
    return this.now() - (this.filter.window || (this.facts.get("about")?.since_s ?? 3600)) * 1000;
  }

  // The time range to draw: the chosen window, shortened to the oldest instance.
  span() {
    const until = this.now();
    let first = until - 60_000;
    for (const instance of this.lanes()) if (instance.created_at < first) first = instance.created_at;
    return { since: Math.max(first, this.windowStart()) - 1000, until };
  }
}

// Call `visit(begin, end, phase, holder)` for each span of an instance.
export function eachSpan(instance, until, visit) {
  const { spans, holders, created_at: createdAt } = instance;
  if (!spans) return;
  const end = instance.ended_at || until;
  for (let index = 0; index < spans.length; index += 3) {
    const begin = createdAt + spans[index];
    const stop = index + 3 < spans.length ? createdAt + spans[index + 3] : Math.max(end, begin);
    visit(begin, stop, PHASES[spans[index + 1]], spans[index + 2] < 0 ? "" : holders[spans[index + 2]]);
  }
}

// Number of instances in each phase at each of `steps` points in time.
export function levels(instances, { since, until }, steps) {
  const width = (until - since) / steps;
  const counts = Object.fromEntries(PHASES.map((phase) => [phase, new Float64Array(steps + 1)]));
  const stepOf = (at) => Math.min(Math.max(Math.ceil((at - since) / width - 0.5), 0), steps);
  for (const instance of instances) {
    eachSpan(instance, until, (begin, end, phase) => {
      if (end < since || begin > until) return;
      counts[phase][stepOf(begin)] += 1;
      counts[phase][stepOf(end)] -= 1;
    });
  }
  for (const values of Object.values(counts)) for (let step = 1; step < steps; step += 1) values[step] += values[step - 1];
  return counts;
}
