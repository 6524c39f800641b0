// Entry point of the page. The timeline is redrawn at most once per frame; tables and charts a few times per second.
import { drawLevel, drawTimes, showKinds } from "./charts.js";
import { Model } from "./model.js";
import { onThemeChange } from "./paint.js";
import { ROWS, showChoices, showClasses, showDecisions, showDemand, showLegend, showInstances, showRuns, showTiles, showUsage, showWarnings } from "./panels.js";
import { fragment, explain } from "./explanation.js";
import { Stream } from "./stream.js";
import { clock, find, setText } from "./text.js";
import { Timeline } from "./timeline.js";

const PANELS_INTERVAL_MS = 250;
const CHARTS_INTERVAL_MS = 500;
const DEFAULT_WINDOW_S = 1800;

const model = new Model();
const timeline = new Timeline(model, explain);
let rows = ROWS;
let link = "wait";
let lostAt = 0;
let rejection = "";
let panelsAt = 0;
let chartsAt = -Infinity;
let refreshTimer = 0;

const stream = new Stream(model, { changed: refresh, state: setLink });

function refresh() {
  timeline.requestDraw();
  if (refreshTimer) return;
  refreshTimer = setTimeout(() => {
    refreshTimer = 0;
    showPanels();
  }, Math.max(panelsAt + PANELS_INTERVAL_MS - performance.now(), 0));
}

function showPanels() {
  panelsAt = performance.now();
  const live = showTiles(model, toggleState);
  const about = model.facts.get("about");
  setText(find("about"), about ? `pool ${about.pool}` : "");
  const warned = model.facts.get("warnings")?.count ? `(${model.facts.get("warnings").count}) ` : "";
  document.title = warned + (about ? `Remuda: ${about.pool}, ${live} live` : "Remuda");
  const lanes = model.lanes();
  const filtered = isFiltered();
  const ended = model.endedBefore ? `; ${model.endedBefore} ended earlier` : "";
  setText(find("shown"), `${filtered ? `${lanes.length} of ${model.instances.size}` : lanes.length} instances${ended}`);
  setText(find("lanes-empty"), filtered ? "No instance matches the filters." : model.instances.size ? "No instance lived in this time." : "No instances yet. Run 'remuda provision' to create one.");
  find("clear").hidden = !filtered;
  showChoices(model);
  if (!find("table").hidden) showInstances(model, rows);
  showUsage(model);
  showDemand(model);
  showWarnings(model);
  showClasses(model);
  showDecisions(model);
  showRuns(model);
  showKinds(model);
  showBanner();
  if (performance.now() - chartsAt >= CHARTS_INTERVAL_MS) {
    chartsAt = performance.now();
    drawCharts();
  }
  document.documentElement.dataset.ready = "true";
}

function drawCharts() {
  drawLevel(model);
  drawTimes(model);
}

// Connection and store -------------------------------------------------------------------------------------------

function setLink(state, reason = "") {
  if (reason || state !== "lost") rejection = reason;
  if (state === "lost" && link !== "lost") lostAt = model.now();
  if (state !== link) {
    link = state;
    find("link").dataset.state = state;
    setText(find("link-text"), state === "lost" ? "connection lost" : state);
  }
  showBanner();
}

function showBanner() {
  const error = model.facts.get("error") ?? "";
  const success = model.lastSuccess ? `Last successful read: ${clock(model.lastSuccess)} UTC.` : "It has not been read yet.";
  let text = "";
  if (link === "lost" && rejection) text = `The server rejected the connection: ${rejection}. Reconnecting; the data is from ${clock(lostAt)} UTC.`;
  else if (link === "lost") text = `No connection to the server since ${clock(lostAt)} UTC. Reconnecting; the data is from that time.`;
  else if (error) text = `The store cannot be read: ${error}. ${success}`;
  setText(find("banner"), text);
  find("banner").hidden = !text;
}

// Filters are kept in the URL, so that a reload and a shared link show the same -----------------------------------

function isFiltered() {
  const { states, class: resourceClass, usage, text } = model.filter;
  return Boolean(states.size || resourceClass || usage || text);
}

function toggleState(phase) {
  const { states } = model.filter;
  if (!states.delete(phase)) states.add(phase);
  applyFilter();
}

function applyFilter() {
  const query = new URLSearchParams();
  const { states, class: resourceClass, usage, text, window: seconds } = model.filter;
  if (states.size) query.set("state", [...states].join(","));
  if (resourceClass) query.set("class", resourceClass);
  if (usage) query.set("usage", usage);
  if (text) query.set("text", text);
  if (seconds !== DEFAULT_WINDOW_S) query.set("time", String(seconds));
  if (!find("table").hidden) query.set("view", "table");
  const search = query.toString();
  history.replaceState(null, "", location.pathname + (search ? `?${search}` : "") + fragment());
  model.stale = true;
  rows = ROWS;
  chartsAt = -Infinity;
  timeline.requestDraw();
  showPanels();
}

function restoreFilter() {
  const query = new URLSearchParams(location.search);
  model.filter = {
    states: new Set((query.get("state") ?? "").split(",").filter(Boolean)),
    class: query.get("class") ?? "",
    usage: query.get("usage") ?? "",
    text: query.get("text") ?? "",
    window: Number(query.get("time") ?? DEFAULT_WINDOW_S),
  };
  find("text").value = model.filter.text;
  find("window").value = String(model.filter.window);
  if (find("window").selectedIndex < 0) find("window").value = String((model.filter.window = DEFAULT_WINDOW_S));
  showView(query.get("view") === "table");
}

function showView(table) {
  find("table").hidden = !table;
  find("lanes").hidden = table;
  find("legend").hidden = table;
  find("as-lanes").setAttribute("aria-pressed", String(!table));
  find("as-table").setAttribute("aria-pressed", String(table));
}

for (const name of ["class", "usage"]) {
  find(name).addEventListener("change", (event) => {
    model.filter[name] = event.target.value;
    applyFilter();
  });
}
find("window").addEventListener("change", (event) => {
  model.filter.window = Number(event.target.value);
  applyFilter();
});
find("text").addEventListener("input", (event) => {
  model.filter.text = event.target.value.trim();
  applyFilter();
});
find("filters").addEventListener("submit", (event) => event.preventDefault());
find("clear").addEventListener("click", () => {
  Object.assign(model.filter, { states: new Set(), class: "", usage: "", text: "" });
  find("text").value = "";
  applyFilter();
  find("text").focus();
});
for (const [name, table] of [["as-lanes", false], ["as-table", true]]) {
  find(name).addEventListener("click", () => {
    showView(table);
    applyFilter();
  });
}
find("more").addEventListener("click", () => {
  rows += ROWS;
  refresh();
});

// Explanations -----------------------------------------------------------------------------------------------------

find("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const subject = find("subject").value.trim();
  if (subject) explain(subject);
});
document.addEventListener("click", (event) => {
  const subject = event.target.closest?.("button.name")?.dataset.subject;
  if (subject) explain(subject);
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select, textarea, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") find("subject").focus();
  else if (event.key === "t") find(find("table").hidden ? "as-table" : "as-lanes").click();
  else return;
  event.preventDefault();
});

// Ages and the time axis advance even if nothing changes --------------------------------------------------------------

setInterval(() => !document.hidden && refresh(), 1_000);
new ResizeObserver(drawCharts).observe(find("level"));
find("level-details").addEventListener("toggle", drawCharts);
onThemeChange(()  => {
  showLegend(model);
  drawCharts();
  refresh();
});
restoreFilter();
showLegend(model);
stream.start();
