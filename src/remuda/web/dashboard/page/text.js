// Times and durations as people read them, and elements whose words are only ever words.

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

// In quarantine, and for how long still; empty where it is not, or not any more.
export const heldFor = (machine, now) => (machine.held > now ? `in quarantine, ${duration(machine.held - now)} left` : "");

export const seconds = (value) => (value == null ? "" : value < 10 ? `${value.toFixed(2)} s` : value < 120 ? `${value.toFixed(1)} s` : duration(value * 1000));

export function make(tag, classes = "", words = "") {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  if (words) element.textContent = words;
  return element;
}

export function say(element, words) {
  if (element.textContent !== words) element.textContent = words;
}

export const find = (id) => document.getElementById(id);

// One element an item, kept while the item is: focus and scrolling stay where they are. What has the focus is never moved,
// for that would take it away; the others move around it.
export function keep(parent, items, { key, create, update }) {
  const wanted = new Set(items.map(key));
  const old = new Map();
  for (const child of [...parent.children]) {
    if (wanted.has(child.dataset.key) && !old.has(child.dataset.key)) old.set(child.dataset.key, child);
    else child.remove();
  }
  const focused = [...old.values()].find((child) => child.contains(document.activeElement));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let element = old.get(name);
    if (element) old.delete(name);
    else {
      element = create(item);
      element.dataset.key = name;
    }
    update(element, item);
    while (element === focused && place !== focused) {
      const next = place.nextElementSibling;
      parent.append(place);
      place = next;
    }
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
}

// A row of cells: each entry is words, or a function that fills its cell, or one of them with a class.
export function cells(row, values) {
  values.forEach((value, place) => {
    const cell = row.children[place] ?? row.appendChild(make("td"));
    const [words, classes = ""] = Array.isArray(value) ? value : [value];
    if (classes && cell.className !== classes) cell.className = classes;
    if (typeof words === "function") words(cell);
    else say(cell, words);
  });
}

// A name that tells its story when pressed.
export function teller(cell, subject, words = subject) {
  let button = cell.querySelector("button.name");
  if (!subject) {
    button?.remove();
    say(cell, words);
    return;
  }
  if (!button) {
    cell.replaceChildren();
    button = cell.appendChild(make("button", "name"));
    button.type = "button";
  }
  button.dataset.subject = subject;
  say(button, words);
}
