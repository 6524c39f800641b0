// Explanation dialog: the events of a run or an instance, as in `remuda explain`. Its subject is kept in the URL.
import { day, find, make, precise, setText } from "./text.js";

const dialog = find("explanation");
let requests = 0;

export function explain(subject) {
  const hash = `#explain=${encodeURIComponent(subject)}`;
  if (location.hash === hash) return load(subject);
  location.hash = hash;
}

function subjectInUrl() {
  return new URLSearchParams(location.hash.slice(1)).get("explain") ?? "";
}

// The URL fragment to keep. Anything else, such as a token, is removed from the address.
export function fragment() {
  return subjectInUrl() ? `#explain=${encodeURIComponent(subjectInUrl())}` : "";
}

async function load(subject) {
  const request = (requests += 1);
  show({ title: subject, events: [], next: [] }, "");
  if (!dialog.open) dialog.showModal();
  try {
    const response = await fetch(`/api/explanation?subject=${encodeURIComponent(subject)}`);
    const answer = await response.json().catch(() => ({ error: { message: `The server responded with status ${response.status}` } }));
    if (request !== requests) return;
    if (response.ok && !answer.error) show(answer, "");
    else show({ title: subject, events: [], next: [] }, [answer.error.message, answer.error.fix].filter(Boolean).join("; "));
  } catch {
    if (request === requests) show({ title: subject, events: [], next: [] }, "The server cannot be reached.");
  }
}

function show(explanation, error) {
  setText(find("explanation-title"), explanation.title);
  setText(find("explanation-error"), error);
  find("explanation-error").hidden = !error;
  find("explanation-lines").classList.toggle("short", explanation.kind === "instance");
  find("explanation-lines").replaceChildren(...lines(explanation.events));
  find("explanation-next").replaceChildren(...explanation.next.map((text) => make("li", "", text)));
  find("explanation-next-title").hidden = !explanation.next.length;
}

function* lines(events) {
  const began = events.length ? Date.parse(events[0].at) : 0;
  let lastDay = "";
  for (const line of events) {
    const at = Date.parse(line.at);
    if (day(at) !== lastDay) {
      lastDay = day(at);
      yield make("li", "day", `${lastDay} UTC`);
    }
    const item = make("li", ["good", "bad", "minor"].includes(line.severity) ? line.severity : "");
    const text = make("span", "text");
    text.append(make("b", "", line.what));
    if (line.why) text.append(make("span", "why", `: ${line.why}`));
    item.append(make("time", "", precise(at)), make("span", "after", `+${((at - began) / 1000).toFixed(2)} s`), make("span", "id", line.instance_id), text);
    yield item;
  }
}

function followUrl() {
  if (location.hash !== fragment()) history.replaceState(null, "", location.pathname + location.search + fragment());
  if (subjectInUrl()) load(subjectInUrl());
  else if (dialog.open) dialog.close();
}

find("explanation-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
dialog.addEventListener("close", () => {
  requests += 1;
  if (location.hash) history.replaceState(null, "", location.pathname + location.search);
});
addEventListener("hashchange", followUrl);
followUrl();
