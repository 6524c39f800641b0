// The page: what is heard is shown, at most once a frame, and tables at most a few times a second.
import { drawLevel, drawTimes, showKinds } from "./charts.js";
import { Model } from "./model.js";
import { onTheme } from "./paint.js";
import { ROWS, showChoices, showClasses, showDecisions, showLegend, showMachines, showRuns, showTiles, showWarnings, showWorth } from "./panels.js";
import { fragment, tellStory } from "./story.js";
import { Stream } from "./stream.js";
import { clock, find, say } from "./text.js";
import { Timeline } from "./timeline.js";

const PANELS_MS = 250;
const CHARTS_MS = 500;
const USUAL_S = 1800;

const model = new Model();
const timeline = new Timeline(model, tellStory);
let rows = ROWS;
let link = "wait";
let lostAt = 0;
let refusal = "";
let panelsAt = 0;
let chartsAt = 0;
let due = 0;

const stream = new Stream(model, { changed: refresh, state: setLink });

function refresh() {
  timeline.ask();
  if (due) return;
  due = setTimeout(() => {
    due = 0;
    panels();
  }, Math.max(panelsAt + PANELS_MS - performance.now(), 0));
}

function panels() {
  panelsAt = performance.now();
  const live = showTiles(model, press);
  const about = model.facts.get("about");
  say(find("about"), about ? `pool ${about.pool}` : "");
  document.title = about ? `Remuda: ${about.pool}, ${live} live` : "Remuda";
  const lanes = model.lanes();
  const asked = filtered();
  say(find("shown"), asked ? `${lanes.length} of ${model.instances.size} machines` : `${lanes.length} machines`);
  say(find("lanes-empty"), asked ? "No machine is like that." : "No machine yet. remuda provision brings the first.");
  find("clear").hidden = !asked;
  showChoices(model);
  if (!find("table").hidden) showMachines(model, rows);
  showWorth(model);
  showWarnings(model);
  showClasses(model);
  showDecisions(model);
  showRuns(model);
  showKinds(model);
  banner();
  say(find("stats"), `Times are UTC. Version ${model.version}, ${stream.received} updates received, ${stream.merged} merged, ${timeline.drawn} frames drawn.`);
  if (performance.now() - chartsAt >= CHARTS_MS) charts();
  document.documentElement.dataset.ready = "true";
}

function charts() {
  chartsAt = performance.now();
  drawLevel(model);
  drawTimes(model);
}

// Connection and store -------------------------------------------------------------------------------------------

function setLink(state, why = "") {
  if (why || state !== "lost") refusal = why;
  if (state === "lost" && link !== "lost") lostAt = model.now();
  if (state !== link) {
    link = state;
    find("link").dataset.state = state;
    say(find("link-text"), state === "lost" ? "connection lost" : state);
  }
  banner();
}

function banner() {
  const trouble = model.facts.get("trouble") ?? "";
  const good = model.good ? `The last good look was at ${clock(model.good)} UTC.` : "There was no good look yet.";
  let words = "";
  if (link === "lost" && refusal) words = `The server refuses: ${refusal}; trying again. Shown is what was known at ${clock(lostAt)} UTC.`;
  else if (link === "lost") words = `No connection to the server since ${clock(lostAt)} UTC; trying again. Shown is what was known then.`;
  else if (trouble) words = `The store cannot be read: ${trouble}. ${good}`;
  say(find("banner"), words);
  find("banner").hidden = !words;
}

// Filters: they stand in the address, so that a reload and a shared link show the same -----------------------------

function filtered() {
  const { states, class: kind, usage, text } = model.filter;
  return Boolean(states.size || kind || usage || text);
}

function press(phase) {
  const { states } = model.filter;
  if (!states.delete(phase)) states.add(phase);
  refilter();
}

function refilter() {
  const wanted = new URLSearchParams();
  const { states, class: kind, usage, text, window: span } = model.filter;
  if (states.size) wanted.set("state", [...states].join(","));
  if (kind) wanted.set("class", kind);
  if (usage) wanted.set("usage", usage);
  if (text) wanted.set("text", text);
  if (span !== USUAL_S) wanted.set("time", String(span));
  if (!find("table").hidden) wanted.set("view", "table");
  const query = wanted.toString();
  history.replaceState(null, "", location.pathname + (query ? `?${query}` : "") + fragment());
  model.stale = true;
  rows = ROWS;
  chartsAt = 0;
  timeline.ask();
  panels();
}

function restore() {
  const wanted = new URLSearchParams(location.search);
  model.filter = {
    states: new Set((wanted.get("state") ?? "").split(",").filter(Boolean)),
    class: wanted.get("class") ?? "",
    usage: wanted.get("usage") ?? "",
    text: wanted.get("text") ?? "",
    window: Number(wanted.get("time") ?? USUAL_S),
  };
  find("text").value = model.filter.text;
  find("window").value = String(model.filter.window);
  if (find("window").selectedIndex < 0) find("window").value = String((model.filter.window = USUAL_S));
  view(wanted.get("view") === "table");
}

function view(table) {
  find("table").hidden = !table;
  find("lanes").hidden = table;
  find("legend").hidden = table;
  find("as-lanes").setAttribute("aria-pressed", String(!table));
  find("as-table").setAttribute("aria-pressed", String(table));
}

for (const name of ["class", "usage"]) {
  find(name).addEventListener("change", (event) => {
    model.filter[name] = event.target.value;
    refilter();
  });
}
find("window").addEventListener("change", (event) => {
  model.filter.window = Number(event.target.value);
  refilter();
});
find("text").addEventListener("input", (event) => {
  model.filter.text = event.target.value.trim();
  refilter();
});
find("filters").addEventListener("submit", (event) => event.preventDefault());
find("clear").addEventListener("click", () => {
  Object.assign(model.filter, { states: new Set(), class: "", usage: "", text: "" });
  find("text").value = "";
  refilter();
  find("text").focus();
});
for (const [name, table] of [["as-lanes", false], ["as-table", true]]) {
  find(name).addEventListener("click", () => {
    view(table);
    refilter();
  });
}
find("more").addEventListener("click", () => {
  rows += ROWS;
  refresh();
});

// Stories ----------------------------------------------------------------------------------------------------------

find("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const subject = find("subject").value.trim();
  if (subject) tellStory(subject);
});
document.addEventListener("click", (event) => {
  const subject = event.target.closest?.("button.name")?.dataset.subject;
  if (subject) tellStory(subject);
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select, textarea, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") find("subject").focus();
  else if (event.key === "t") find(find("table").hidden ? "as-table" : "as-lanes").click();
  else return;
  event.preventDefault();
});

// Time goes on where nothing changes ---------------------------------------------------------------------------------

setInterval(() => !document.hidden && refresh(), 1_000);
new ResizeObserver(charts).observe(find("level"));
find("level-details").addEventListener("toggle", charts);
onTheme(() => {
  showLegend(model);
  charts();
  refresh();
});
restore();
showLegend(model);
stream.start();
