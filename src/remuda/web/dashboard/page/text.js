// Formatting of times and durations, and DOM helpers that only insert text.

const pad = (number, width = 2) => String(number).padStart(width, "0");

export function clock(at) {
  const time = new Date(at);
  return `${pad(time.getUTCHours())}:${pad(time.getUTCMinutes())}:${pad(time.getUTCSeconds())}`;
}

export function day(at) {
  const time = new Date(at);
  return `${time.getUTCFullYear()}-${pad(time.getUTCMonth() + 1)}-${pad(time.getUTCDate())}`;
}

export const precise = (at) => `${clock(at)}.${pad(new Date(at).getUTCMilliseconds(), 3)}`;

export function when(at, now) {
  return day(at) === day(now) ? clock(at) : `${day(at).slice(5)} ${clock(at).slice(0, 5)}`;
}

export function duration(milliseconds) {
  const seconds = Math.round(milliseconds / 1000);
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

// Remaining quarantine time; empty if the instance is not in quarantine.
export const quarantineLeft = (instance, now) =>
  instance.quarantined_until > now ? `in quarantine, ${duration(instance.quarantined_until - now)} left` : "";

export const seconds = (value) => (value == null ? "" : value < 10 ? `${value.toFixed(2)} s` : value < 120 ? `${value.toFixed(1)} s` : duration(value * 1000));

export function make(tag, classes = "", text = "") {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  if (text) element.textContent = text;
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const find = (id) => document.getElementById(id);

// Keep one child element per item, by key, so that focus and scroll position survive updates. The focused element is never
// moved, because moving it would remove the focus; the others move around it.
export function syncChildren(parent, items, { key, create, update }) {
  const keys = new Set(items.map(key));
  const old = new Map();
  for (const child of [...parent.children]) {
    if (keys.has(child.dataset.key) && !old.has(child.dataset.key)) old.set(child.dataset.key, child);
    else child.remove();
  }
  const focused = [...old.values()].find((child) => child.contains(document.activeElement));
  let current = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let element = old.get(name);
    if (element) old.delete(name);
    else {
      element = create(item);
      element.dataset.key = name;
    }
    update(element, item);
    while (element === focused && current !== focused) {
      const following = current.nextElementSibling;
      parent.append(current);
      current = following;
    }
    if (element === current) current = current.nextElementSibling;
    else parent.insertBefore(element, current);
  }
}

// A row of a table with its cells. A phone shows the row as a block, with the name of the column before each value.
export function makeRow(body) {
  const row = make("tr");
  for (const head of find(body).closest("table").tHead.rows[0].cells) row.appendChild(make("td")).dataset.column = head.textContent;
  return row;
}

// Fill a table row. Each value is a text, a function that fills its td element, or a pair of one of these and a CSS class.
export function fillRow(row, values) {
  values.forEach((value, index) => {
    const td = row.children[index] ?? row.appendChild(make("td"));
    const [content, classes = ""] = Array.isArray(value) ? value : [value];
    if (classes && td.className !== classes) td.className = classes;
    if (typeof content === "function") content(td);
    else setText(td, content);
  });
}

// Repository names may break after the owner; they are not cut anywhere else unless they are very long.
export function showRepository(element, repository) {
  if (element.textContent === repository) return;
  const [owner, ...rest] = repository.split("/");
  element.replaceChildren(owner);
  if (rest.length) element.append("/", make("wbr"), rest.join("/"));
}

// A link to a run's page on GitHub, or none. Only web addresses become links.
export function runLink(parent, url, run) {
  let link = parent.querySelector("a.out");
  if (!/^https?:\/\//.test(url)) {
    link?.remove();
    return;
  }
  if (!link) {
    link = parent.appendChild(make("a", "out", "↗"));
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  if (link.href !== url) link.href = url;
  link.title = `Run ${run} on GitHub`;
  link.setAttribute("aria-label", link.title);
}

// A name that opens its explanation when pressed.
export function explainButton(parent, subject, text = subject) {
  let button = parent.querySelector("button.name");
  if (!subject) {
    button?.remove();
    setText(parent, text);
    return;
  }
  if (!button) {
    parent.replaceChildren();
    button = parent.appendChild(make("button", "name"));
    button.type = "button";
  }
  button.dataset.subject = subject;
  setText(button, text);
}
