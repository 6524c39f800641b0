// The story of a run or an instance, as `remuda explain` tells it. Its subject stands in the address: a reload tells it again.
import { day, find, make, precise, say } from "./text.js";

const dialog = find("story");
let asked = 0;

export function tellStory(subject) {
  const wanted = `#of=${encodeURIComponent(subject)}`;
  if (location.hash === wanted) return read(subject);
  location.hash = wanted;
}

function subject() {
  return new URLSearchParams(location.hash.slice(1)).get("of") ?? "";
}

// All that an address may say after its #: a token that came this way is not kept where it can be seen and shared.
export function fragment() {
  return subject() ? `#of=${encodeURIComponent(subject())}` : "";
}

async function read(subject) {
  const turn = (asked += 1);
  show({ title: subject, lines: [], next: [] }, "");
  if (!dialog.open) dialog.showModal();
  try {
    const response = await fetch(`/api/story?of=${encodeURIComponent(subject)}`);
    const answer = await response.json().catch(() => ({ error: { message: `The server answered with ${response.status}, and no reason` } }));
    if (turn !== asked) return;
    if (response.ok && !answer.error) show(answer, "");
    else show({ title: subject, lines: [], next: [] }, [answer.error.message, answer.error.fix].filter(Boolean).join("; "));
  } catch {
    if (turn === asked) show({ title: subject, lines: [], next: [] }, "The server cannot be reached.");
  }
}

function show(story, trouble) {
  say(find("story-title"), story.title);
  say(find("story-trouble"), trouble);
  find("story-trouble").hidden = !trouble;
  find("story-lines").classList.toggle("short", story.kind === "instance");
  find("story-lines").replaceChildren(...lines(story.lines));
  find("story-next").replaceChildren(...story.next.map((sentence) => make("li", "", sentence)));
  find("story-next-title").hidden = !story.next.length;
}

function* lines(told) {
  const began = told.length ? Date.parse(told[0].at) : 0;
  let today = "";
  for (const line of told) {
    const at = Date.parse(line.at);
    if (day(at) !== today) {
      today = day(at);
      yield make("li", "day", `${today} UTC`);
    }
    const item = make("li", ["good", "bad", "minor"].includes(line.tone) ? line.tone : "");
    const said = make("span", "said");
    said.append(make("b", "", line.what));
    if (line.why) said.append(make("span", "why", `: ${line.why}`));
    item.append(make("time", "", precise(at)), make("span", "after", `+${((at - began) / 1000).toFixed(2)} s`), make("span", "id", line.instance_id), said);
    yield item;
  }
}

function follow() {
  if (location.hash !== fragment()) history.replaceState(null, "", location.pathname + location.search + fragment());
  if (subject()) read(subject());
  else if (dialog.open) dialog.close();
}

find("story-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
dialog.addEventListener("close", () => {
  asked += 1;
  if (location.hash) history.replaceState(null, "", location.pathname + location.search);
});
addEventListener("hashchange", follow);
follow();
