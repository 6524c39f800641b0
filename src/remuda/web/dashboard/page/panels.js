// Counts, tables and lists. Every name is inserted as text.
import { showKindIn } from "./charts.js";
import { LETTERS, TILES, phaseOf } from "./model.js";
import { fill, quarantineMark } from "./paint.js";
import { clock, duration, explainButton, fillRow, find, make, makeRow, quarantineLeft, runLink, seconds, setText, showRepository, syncChildren, when } from "./text.js";

export const ROWS = 200;
const SHOWN_RUNS = 25;
const SHOWN_DECISIONS = 60;

export function showTiles(model, onPress) {
  const counts = Object.fromEntries(TILES.map((phase) => [phase, 0]));
  for (const instance of model.instances.values()) if (model.matchesKind(instance)) counts[phaseOf(instance)] += 1;
  const live = TILES.reduce((sum, phase) => sum + (phase === "ended" ? 0 : counts[phase]), 0);
  setText(find("live"), String(live));
  syncChildren(find("tiles"), TILES, {
    key: (phase) => phase,
    create: (phase) => {
      const tile = make("button", "tile");
      tile.type = "button";
      tile.append(make("span", "count"), chip(phase), make("span", "name", phase));
      tile.addEventListener("click", () => onPress(phase));
      return tile;
    },
    update: (tile, phase) => {
      setText(tile.firstElementChild, String(counts[phase]));
      tile.classList.toggle("none", !counts[phase]);
      tile.setAttribute("aria-pressed", String(model.filter.states.has(phase)));
    },
  });
  return live;
}

function chip(phase) {
  const mark = make("span", `chip ${phase}`, LETTERS[phase]);
  mark.setAttribute("aria-hidden", "true");
  return mark;
}

export function showLegend(model) {
  const list = find("legend");
  list.replaceChildren();
  for (const phase of [...TILES, "unknown"]) {
    legendItem(list, `${LETTERS[phase]} ${phase === "unknown" ? "not recorded" : phase}`, (context) => {
      context.fillStyle = fill(context, phase);
      context.fillRect(0, 0, 26, 12);
    });
  }
  legendItem(list, "in quarantine", (context) => quarantineMark(context, 13, 6));
}

function legendItem(list, text, draw) {
  const item = list.appendChild(make("li"));
  const sample = item.appendChild(make("canvas"));
  sample.setAttribute("aria-hidden", "true");
  sample.width = 26;
  sample.height = 12;
  draw(sample.getContext("2d"));
  item.append(text);
}

export function showChoices(model) {
  for (const name of ["class", "usage"]) {
    const select = find(name);
    const known = [...new Set([...model.instances.values()].map((instance) => instance[name]))].sort();
    // Keep the selected value in the list even if no instance has it any more.
    const all = model.filter[name] && !known.includes(model.filter[name]) ? [...known, model.filter[name]] : known;
    syncChildren(select, ["", ...all], {
      key: (value) => `=${value}`,
      create: (value) => Object.assign(make("option", "", value || "all"), { value }),
      update: () => {},
    });
    if (select.value !== model.filter[name]) select.value = model.filter[name];
  }
}

export function showInstances(model, limit) {
  const lanes = model.lanes();
  const shown = lanes.slice(0, limit);
  const now = model.now();
  syncChildren(find("instances"), shown, {
    key: (instance) => instance.id,
    create: () => makeRow("instances"),
    update: (row, instance) => {
      const ending = ["terminating", "terminated"].includes(instance.state);
      const left = instance.threshold - now;
      const quarantine = quarantineLeft(instance, now);
      fillRow(row, [
        [(td) => explainButton(td, instance.id), "whole"],
        [(td) => showStateIn(td, phaseOf(instance)), "whole"],
        [(td) => explainButton(td, instance.holder || instance.last_holder, instance.holder || (instance.last_holder ? `(${instance.last_holder})` : "")), "long"],
        [instance.class, "long"],
        [instance.type, "whole"],
        [instance.usage, "whole"],
        [String(instance.uses), "n"],
        [ending ? "" : left >= 0 ? duration(left) : `overdue by ${duration(-left)}`, "n"],
        [quarantine, instance.retire_text || remark(model, instance)].filter(Boolean).join(": "),
      ]);
    },
  });
  find("more").hidden = lanes.length <= limit;
  setText(find("more"), `Show ${Math.min(ROWS, lanes.length - limit)} more of ${lanes.length}`);
}

function remark(model, instance) {
  const job = model.jobOf(instance);
  if (instance.set) return `set ${instance.set}${job ? `, job ${job.name || job.id}` : ""}`;
  return instance.agent_dead ? "agent dead" : instance.busy ? "a job is running" : "";
}

function showStateIn(td, phase) {
  if (td.dataset.phase === phase) return;
  td.dataset.phase = phase;
  td.replaceChildren(chip(phase), phase);
}

export function showWarnings(model) {
  const { count, shown: warnings } = model.facts.get("warnings") ?? { count: 0, shown: [] };
  const more = count > warnings.length ? `, showing the first ${warnings.length}` : "";
  setText(find("warnings-count"), count ? `${count}${more}` : "");
  find("warnings-card").hidden = !count;
  syncChildren(find("warnings"), warnings, {
    key: (item) => `${item.kind} ${item.subject} ${item.kind === "unreadable" ? item.text : ""}`,
    create: () => {
      const row = make("li");
      row.append(make("span", "kind alert"), " ", make("span", "who"), " ", make("span", "means"));
      return row;
    },
    update: (row, item) => {
      setText(row.children[0], item.kind);
      explainButton(row.children[1], item.subject);
      setText(row.children[2], item.text);
    },
  });
}

// Runner sets and their newest jobs. Hidden in a pool without sets.
export function showDemand(model) {
  const sets = model.facts.get("sets") ?? [];
  find("demand").hidden = !sets.length;
  if (!sets.length) return;
  const now = model.now();
  showSets(sets, now);
  const known = [...(model.facts.get("queued") ?? []), ...(model.facts.get("jobs") ?? [])];
  const jobs = known.map((job) => ({ ...job, waited: Math.max((job.started_at || job.completed_at || now) - job.queued_at, 0) }));
  // Waiting jobs first, then the newest.
  const rank = (job) => (job.started_at || job.completed_at ? 1 : 0);
  jobs.sort((one, other) => rank(one) - rank(other) || other.queued_at - one.queued_at || (one.id < other.id ? -1 : 1));
  const unknown = new Set(sets.filter((set) => !set.current).map((set) => set.name));
  const longest = Math.max(...jobs.map((job) => job.waited), 1000);
  find("jobs-empty").hidden = jobs.length > 0;
  syncChildren(find("jobs"), jobs, {
    key: (job) => job.id,
    create: () => makeRow("jobs"),
    update: (row, job) => {
      row.title = job.detail ?? "";
      fillRow(row, [
        [(td) => showJobIn(td, job), "job"],
        [(td) => explainButton(td, job.set && `set.${job.set}`, job.set), "whole"],
        [(td) => showWaitIn(td, job.waited, longest, !job.started_at && !job.completed_at), "wait"],
        [jobState(job, now, unknown.has(job.set)), "whole"],
        [(td) => explainButton(td, job.instance, job.instance && `…${job.instance.slice(-8)}`), "whole"],
      ]);
    },
  });
}

function showSets(sets, now) {
  setText(find("sets-note"), waitingNote(sets));
  syncChildren(find("sets"), sets, {
    key: (set) => set.name,
    create: () => makeRow("sets"),
    update: (row, set) => {
      row.title = set.labels.join(", ");
      fillRow(row, [
        [(td) => explainButton(td, `set.${set.name}`, set.name), "whole"],
        // An old count has a question mark; the list below has its time.
        ...[set.waiting, set.assigned].map((count) => [set.current ? String(count) : `${count}?`, "n"]),
        ...[set.running, set.hot, set.warm, set.launching].map((count) => [String(count), "n"]),
        [(td) => showKind(td, set.at_capacity ? `yes, ${set.max}` : `${set.running + set.hot + set.launching} of ${set.max}`, set.at_capacity), "whole"],
        [(td) => showKind(td, set.session, set.session !== "open"), "whole"],
      ]);
    },
  });
  syncChildren(find("sets-reasons"), sets.filter((set) => set.detail || !set.current), {
    key: (set) => set.name,
    create: () => {
      const row = make("li");
      row.append(make("span", "who"), " ", make("span", "means"));
      return row;
    },
    update: (row, set) => {
      explainButton(row.children[0], `set.${set.name}`, set.name);
      const oldest = set.oldest_queued_at ? `; the oldest job waits for ${duration(Math.max(now - set.oldest_queued_at, 0))}` : "";
      setText(row.children[1], `${set.summary}${oldest}`);
    },
  });
}

// Sets whose counts are old do not count, and do not prove that no job waits.
function waitingNote(sets) {
  const waiting = sets.filter((set) => set.current).reduce((sum, set) => sum + set.waiting, 0);
  const unknown = sets.filter((set) => !set.current).map((set) => set.name);
  const rest = unknown.length ? `not known for ${unknown.join(", ")}` : "";
  if (waiting) return [`${waiting} waiting`, rest].filter(Boolean).join("; ");
  // GitHub does not tell of jobs above the maximum of a set: they are counted from time to time.
  const counted = Math.min(...sets.map((set) => set.counted_at ?? Infinity));
  return rest || (counted < Infinity ? `no job waited at ${clock(counted)} UTC` : "no job waits");
}

function showKind(td, text, alert) {
  const mark = td.querySelector(".kind") ?? td.appendChild(make("span", "kind"));
  mark.classList.toggle("alert", alert);
  setText(mark, text);
}

function showJobIn(td, job) {
  const name = td.querySelector(".who") ?? td.appendChild(make("span", "who"));
  explainButton(name, job.id, job.name || job.id);
  showOriginIn(td, job);
}

// The link to the run on GitHub, and the repository in its own line.
function showOriginIn(td, { url, run, repository }) {
  runLink(td.querySelector(".who"), url, run);
  showRepository(td.querySelector(".repository") ?? td.appendChild(make("div", "repository soft")), repository);
}

function showRunIn(td, item) {
  const name = td.querySelector(".who") ?? td.appendChild(make("span", "who"));
  explainButton(name, item.run, item.attempt > 1 ? `${item.run} (${item.attempt})` : item.run);
  showOriginIn(td, item);
}

// A bar in proportion to the longest wait, beside the time.
function showWaitIn(td, waited, longest, waiting) {
  const bar = td.querySelector(".fill") ?? td.appendChild(make("span", "fill"));
  const text = td.querySelector(".time") ?? td.appendChild(make("span", "time"));
  bar.classList.toggle("waiting", waiting);
  bar.style.width = `${Math.max((40 * waited) / longest, 2)}px`;
  setText(text, seconds(waited / 1000));
}

// Without news of its set, the end of a job would not be known.
function jobState(job, now, old) {
  const lost = job.lost ? "instance lost" : "";
  if (job.completed_at) return [job.result || "completed", lost].filter(Boolean).join(", ");
  if (lost) return lost;
  const state = job.started_at ? `runs for ${duration(Math.max(now - job.started_at, 0))}` : "waits";
  return old ? `${state}?` : state;
}

// Reuse, cost and savings, calculated as in `remuda report`.
export function showUsage(model) {
  const usage = model.facts.get("usage");
  if (!usage) return;
  const money = (value) => `${value.toFixed(Math.abs(value) >= 1 || value === 0 ? 2 : 4)} ${usage.currency}`;
  const runners = usage.reused + usage.created;
  const prices = usage.prices_as_of ? `prices as of ${usage.prices_as_of}` : "no price list";
  const unpriced = usage.unpriced.length ? `; no price for ${usage.unpriced.join(", ")} (counted as 0)` : "";
  const hours = (model.facts.get("about")?.since_s ?? 0) / 3600;
  setText(find("usage-note"), `last ${hours > 48 ? `${Math.round(hours / 24)} d` : `${Number(hours.toFixed(1))} h`}; ${prices}${unpriced}`);
  setText(find("reuse-rate"), runners ? `${Math.round((100 * usage.reused) / runners)} %` : "–");
  setText(find("reuse-of"), runners ? `${usage.reused} of ${runners} runners, ${usage.runs} runs` : "no runs yet");
  setText(find("cost"), money(usage.cost));
  setText(find("cost-of"), `of which ${money(usage.idle_cost)} idle in the pool`);
  setText(find("saved"), usage.boot_s === null ? "–" : `${duration(usage.saved_waiting_s * 1000)} of waiting`);
  setText(find("saved-of"), usage.boot_s === null ? "no boot time measured yet" : `${money(usage.saved_boot_cost)} for boots of ${seconds(usage.boot_s)} each; ${usage.saved_cost}`);
}

export function showClasses(model) {
  const groups = new Map();
  for (const instance of model.instances.values()) {
    if (instance.state === "terminated" || !model.matchesKind(instance)) continue;
    const name = JSON.stringify([instance.class, instance.usage]);
    if (!groups.has(name)) groups.set(name, { name, class: instance.class, usage: instance.usage, live: 0, running: 0, idle: 0 });
    const group = groups.get(name);
    group.live += 1;
    if (instance.state in group) group[instance.state] += 1;
  }
  const pools = model.facts.get("pools") ?? {};
  const rows = [...groups.values()].sort((one, other) => (one.name < other.name ? -1 : 1));
  find("classes-empty").hidden = rows.length > 0;
  let before = "";
  syncChildren(find("classes"), rows, {
    key: (group) => group.name,
    create: () => makeRow("classes"),
    update: (row, group) => {
      // All usage classes of a resource class share one queue.
      const messages = group.class === before ? "" : String(pools[group.class]?.messages ?? "");
      before = group.class;
      fillRow(row, [[group.class, "long"], [group.usage, "whole"], ...[group.live, group.running, group.idle, group.live - group.running - group.idle].map((count) => [String(count), "n"]), [messages, "n"]]);
    },
  });
}

export function showDecisions(model) {
  const now = model.now();
  const { text } = model.filter;
  const decisions = [...model.decisions.values()]
    .filter((item) => model.matchesKind(item) && (!text || `${item.instance} ${item.run}`.toLowerCase().includes(text.toLowerCase())))
    .sort((one, other) => other.at - one.at)
    .slice(0, SHOWN_DECISIONS);
  find("decisions-empty").hidden = decisions.length > 0;
  syncChildren(find("decisions"), decisions, {
    key: (item) => item.id,
    create: () => {
      const row = make("li");
      row.append(make("span", "when"), make("span", "who"), " ", make("b", "what"), " ", make("span", "why"), " ", make("span", "by"));
      return row;
    },
    update: (row, item) => {
      const [at, who, what, why, by] = row.children;
      setText(at, when(item.at, now));
      explainButton(who, item.instance);
      setText(what, `${item.what}:`);
      setText(why, item.why);
      setText(by, `(${item.by})`);
    },
  });
}

export function showRuns(model) {
  const now = model.now();
  const { text } = model.filter;
  const open = model.facts.get("open_provisions") ?? {};
  const lost = model.facts.get("lost") ?? {};
  const runs = [...model.provisions.values()]
    .filter((item) => !item.set && model.matchesKind(item) && (!text || item.run.toLowerCase().includes(text.toLowerCase())))
    .sort((one, other) => other.at - one.at || (one.id < other.id ? 1 : -1))
    .slice(0, SHOWN_RUNS);
  find("runs-empty").hidden = runs.length > 0;
  syncChildren(find("runs"), runs, {
    key: (item) => item.id,
    create: () => makeRow("runs"),
    update: (row, item) => {
      const acquired = Object.entries(open[item.id] ?? {}).map(([state, count]) => `${count} ${state}`);
      const status = item.status === "open" ? `open: ${acquired.join(", ") || "no instances yet"}` : lost[item.id] ? `${item.status}: ${lost[item.id]}` : ["failed", "expired", "interrupted", "unreleased"].includes(item.status) ? `${item.status}: ${item.why}` : item.status;
      const elapsed = item.status === "open" ? `${duration(Math.max(now - item.at, 0))} so far` : seconds(item.seconds);
      fillRow(row, [
        [(td) => showRunIn(td, item), "long"],
        [when(item.at, now), "whole"],
        [item.class, "long"],
        [String(item.count), "n"],
        [(td) => showKindIn(td, item.kind), "whole"],
        [elapsed, "n"],
        status,
      ]);
    },
  });
  const sets = (model.facts.get("sets") ?? []).map((set) => `set.${set.name}`);
  const known = [...sets, ...runs.map((item) => item.run), ...model.lanes().slice(0, 20).map((instance) => instance.id)];
  syncChildren(find("known"), [...new Set(known)], { key: (name) => name, create: (name) => Object.assign(make("option"), { value: name }), update: () => {} });
}
