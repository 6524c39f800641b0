// Counts, tables and lists. Every name is put in as text.
import { kindCell } from "./charts.js";
import { LETTERS, TILES, phaseOf } from "./model.js";
import { fill } from "./paint.js";
import { cells, duration, find, heldFor, keep, make, say, seconds, teller, when } from "./text.js";

const ROWS = 200;
const SHOWN_RUNS = 25;
const SHOWN_DECISIONS = 60;

export function showTiles(model, press) {
  const counts = Object.fromEntries(TILES.map((phase) => [phase, 0]));
  for (const machine of model.instances.values()) if (model.matchesKind(machine)) counts[phaseOf(machine)] += 1;
  const live = TILES.reduce((sum, phase) => sum + (phase === "ended" ? 0 : counts[phase]), 0);
  say(find("live"), String(live));
  keep(find("tiles"), TILES, {
    key: (phase) => phase,
    create: (phase) => {
      const tile = make("button", "tile");
      tile.type = "button";
      tile.append(make("span", "count"), chip(phase), make("span", "name", phase));
      tile.addEventListener("click", () => press(phase));
      return tile;
    },
    update: (tile, phase) => {
      say(tile.firstElementChild, String(counts[phase]));
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
  for (const phase of [...TILES.slice(0, 6), "unknown"]) {
    const item = list.appendChild(make("li"));
    const sample = item.appendChild(make("canvas"));
    sample.setAttribute("aria-hidden", "true");
    sample.width = 26;
    sample.height = 12;
    const context = sample.getContext("2d");
    context.fillStyle = fill(context, phase);
    context.fillRect(0, 0, 26, 12);
    item.append(`${LETTERS[phase]} ${phase === "unknown" ? "not recorded" : phase}`);
  }
}

export function showChoices(model) {
  for (const name of ["class", "usage"]) {
    const select = find(name);
    const known = [...new Set([...model.instances.values()].map((machine) => machine[name]))].sort();
    // What was chosen stays to be seen, also where there is none of it any more.
    const all = model.filter[name] && !known.includes(model.filter[name]) ? [...known, model.filter[name]] : known;
    keep(select, ["", ...all], {
      key: (value) => `=${value}`,
      create: (value) => Object.assign(make("option", "", value || "all"), { value }),
      update: () => {},
    });
    if (select.value !== model.filter[name]) select.value = model.filter[name];
  }
}

export function showMachines(model, most) {
  const lanes = model.lanes();
  const shown = lanes.slice(0, most);
  const now = model.now();
  keep(find("machines"), shown, {
    key: (machine) => machine.id,
    create: () => make("tr"),
    update: (row, machine) => {
      const over = ["terminating", "terminated"].includes(machine.state);
      const left = machine.until - now;
      const held = heldFor(machine, now);
      cells(row, [
        [(cell) => teller(cell, machine.id), "whole"],
        [(cell) => stateCell(cell, phaseOf(machine)), "whole"],
        [(cell) => teller(cell, machine.run || machine.last, machine.run || (machine.last ? `(${machine.last})` : "")), "long"],
        [machine.class, "long"],
        [machine.type, "whole"],
        [machine.usage, "whole"],
        [String(machine.uses), "n"],
        [over ? "" : left >= 0 ? duration(left) : `over by ${duration(-left)}`, "n"],
        [held, machine.retire || (machine.busy ? "a job runs" : "")].filter(Boolean).join(": "),
      ]);
    },
  });
  find("more").hidden = lanes.length <= most;
  say(find("more"), `Show ${Math.min(ROWS, lanes.length - most)} more of ${lanes.length}`);
}

function stateCell(cell, phase) {
  if (cell.dataset.phase === phase) return;
  cell.dataset.phase = phase;
  cell.replaceChildren(chip(phase), phase);
}

export function showWarnings(model) {
  const { count, shown: warnings } = model.facts.get("warnings") ?? { count: 0, shown: [] };
  const more = count > warnings.length ? `, the first ${warnings.length} here` : "";
  say(find("warnings-count"), count ? `${count}${more}` : "");
  find("warnings-empty").hidden = warnings.length > 0;
  keep(find("warnings"), warnings, {
    key: (item) => `${item.kind} ${item.subject} ${item.kind === "unreadable" ? item.text : ""}`,
    create: () => {
      const row = make("li");
      row.append(make("span", "kind alert"), " ", make("span", "who"), " ", make("span", "means"));
      return row;
    },
    update: (row, item) => {
      say(row.children[0], item.kind);
      teller(row.children[1], item.subject);
      say(row.children[2], item.text);
    },
  });
}

// As `remuda report` reckons it, over all that the page has in sight.
export function showWorth(model) {
  const told = model.facts.get("worth");
  if (!told) return;
  const money = (value) => `${value.toFixed(Math.abs(value) >= 1 || value === 0 ? 2 : 4)} ${told.currency}`;
  const runners = told.reused + told.created;
  const priced = told.priced ? `prices as of ${told.priced}` : "no list of prices";
  const free = told.unpriced.length ? `; ${told.unpriced.join(", ")} without a price, counted as free` : "";
  const hours = (model.facts.get("about")?.since_s ?? 0) / 3600;
  say(find("worth-note"), `the last ${hours > 48 ? `${Math.round(hours / 24)} d` : `${Number(hours.toFixed(1))} h`}; ${priced}${free}`);
  say(find("reuse-rate"), runners ? `${Math.round((100 * told.reused) / runners)} %` : "–");
  say(find("reuse-of"), runners ? `${told.reused} of ${runners} runners, ${told.runs} runs` : "no run has got its runners yet");
  say(find("cost"), money(told.cost));
  say(find("cost-of"), `${money(told.idle)} of it idle in the pool`);
  say(find("saved"), told.boot_s === null ? "–" : `${duration(told.waiting_s * 1000)} of waiting`);
  say(find("saved-of"), told.boot_s === null ? "no boot was seen to compare with" : `${money(told.boots)} of boots at ${seconds(told.boot_s)} each; ${money(told.net)} less what idled`);
}

export function showClasses(model) {
  const groups = new Map();
  for (const machine of model.instances.values()) {
    if (machine.state === "terminated" || !model.matchesKind(machine)) continue;
    const name = JSON.stringify([machine.class, machine.usage]);
    if (!groups.has(name)) groups.set(name, { name, class: machine.class, usage: machine.usage, live: 0, running: 0, idle: 0 });
    const group = groups.get(name);
    group.live += 1;
    if (machine.state in group) group[machine.state] += 1;
  }
  const pools = model.facts.get("pools") ?? {};
  const rows = [...groups.values()].sort((one, other) => (one.name < other.name ? -1 : 1));
  find("classes-empty").hidden = rows.length > 0;
  let before = "";
  keep(find("classes"), rows, {
    key: (group) => group.name,
    create: () => make("tr"),
    update: (row, group) => {
      // A class has one queue, whatever its machines' usage.
      const hints = group.class === before ? "" : String(pools[group.class]?.hints ?? "");
      before = group.class;
      cells(row, [[group.class, "long"], [group.usage, "whole"], ...[group.live, group.running, group.idle, group.live - group.running - group.idle].map((count) => [String(count), "n"]), [hints, "n"]]);
    },
  });
}

export function showDecisions(model) {
  const now = model.now();
  const { text } = model.filter;
  const told = [...model.decisions.values()]
    .filter((item) => model.matchesKind(item) && (!text || `${item.instance} ${item.run}`.toLowerCase().includes(text.toLowerCase())))
    .sort((one, other) => other.at - one.at)
    .slice(0, SHOWN_DECISIONS);
  find("decisions-empty").hidden = told.length > 0;
  keep(find("decisions"), told, {
    key: (item) => item.id,
    create: () => {
      const row = make("li");
      row.append(make("span", "when"), make("span", "who"), " ", make("b", "what"), " ", make("span", "why"), " ", make("span", "by"));
      return row;
    },
    update: (row, item) => {
      const [at, who, what, why, by] = row.children;
      say(at, when(item.at, now));
      teller(who, item.instance);
      say(what, `${item.what}:`);
      say(why, item.why);
      say(by, `(${item.by})`);
    },
  });
}

export function showRuns(model) {
  const now = model.now();
  const { text } = model.filter;
  const held = model.facts.get("open") ?? {};
  const runs = [...model.provisions.values()]
    .filter((item) => model.matchesKind(item) && (!text || item.run.toLowerCase().includes(text.toLowerCase())))
    .sort((one, other) => other.at - one.at || (one.id < other.id ? 1 : -1))
    .slice(0, SHOWN_RUNS);
  find("runs-empty").hidden = runs.length > 0;
  keep(find("runs"), runs, {
    key: (item) => item.id,
    create: () => make("tr"),
    update: (row, item) => {
      const so = Object.entries(held[item.id] ?? {}).map(([state, count]) => `${count} ${state}`);
      const status = item.status === "open" ? `open: ${so.join(", ") || "nothing yet"}` : item.kind === "failed" ? `failed: ${item.why}` : item.status;
      const took = item.status === "open" ? `${duration(Math.max(now - item.at, 0))} so far` : seconds(item.seconds);
      cells(row, [
        [(cell) => teller(cell, item.run, item.attempt > 1 ? `${item.run} (${item.attempt})` : item.run), "long"],
        [when(item.at, now), "whole"],
        [item.class, "long"],
        [String(item.count), "n"],
        [(cell) => kindCell(cell, item.kind), "whole"],
        [took, "n"],
        status,
      ]);
    },
  });
  const known = [...runs.map((item) => item.run), ...model.lanes().slice(0, 20).map((machine) => machine.id)];
  keep(find("known"), [...new Set(known)], { key: (name) => name, create: (name) => Object.assign(make("option"), { value: name }), update: () => {} });
}

export { ROWS };
