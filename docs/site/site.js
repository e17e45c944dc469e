// The menu of a narrow window, and the search: no server, and nothing is fetched but search.js beside this file.
"use strict";
const root = document.documentElement;
root.classList.add("js");
const field = document.querySelector("input");
const found = document.getElementById("found");
const menu = document.getElementById("menu");
const opener = document.getElementById("open-menu");

opener.addEventListener("click", () => {
  opener.setAttribute("aria-expanded", String(menu.classList.toggle("open")));
});

let passages; // a promise of rows: address, page, heading, text
function load() {
  passages ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = `${root.dataset.root}/search.js`;
    script.onload = () => done(window.passages);
    script.onerror = failed;
    document.head.append(script);
  });
  return passages;
}

// All words must be there. A heading counts more than a text, a whole word more than a part of one, and words
// that stand together more than those that do not.
function score([, page, heading, text], words) {
  let sum = 0;
  for (const word of words) {
    const whole = new RegExp(`(^|[^a-z0-9])${word.replace(/[^a-z0-9\s]/g, "\\$&")}($|[^a-z0-9])`);
    let best = 0;
    for (const [place, weight] of [[heading, 12], [page, 6], [text, 2]]) {
      const low = place.toLowerCase();
      if (low.includes(word)) best += whole.test(low) ? 2 * weight : weight;
    }
    if (!best) return 0;
    sum += best;
  }
  const phrase = words.join(" ");
  return sum + (heading.toLowerCase().includes(phrase) ? 30 : text.toLowerCase().includes(phrase) ? 20 : 0);
}

function excerpt(text, words) {
  const line = document.createElement("small");
  const low = text.toLowerCase();
  const phrase = words.join(" ");
  const places = low.includes(phrase) ? [phrase] : words;
  const at = Math.min(...places.map((word) => low.indexOf(word)).filter((place) => place >= 0), text.length);
  const first = at < text.length ? text.lastIndexOf(" ", Math.max(0, at - 50)) + 1 : 0;
  const end = text.length > first + 150 ? text.lastIndexOf(" ", first + 150) : text.length;
  const part = text.slice(first, Math.max(first, end));
  let rest = part;
  while (rest) {
    const marks = words.map((word) => [rest.toLowerCase().indexOf(word), word.length]).filter(([place]) => place >= 0);
    if (!marks.length) break;
    const [next, length] = marks.sort((a, b) => a[0] - b[0])[0];
    const mark = document.createElement("mark");
    mark.textContent = rest.slice(next, next + length);
    line.append(rest.slice(0, next), mark);
    rest = rest.slice(next + length);
  }
  line.append(rest);
  return line;
}

async function search() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  found.hidden = !words.length;
  if (!words.length) return;
  const rows = (await load()).map((row) => [score(row, words), row]).filter(([points]) => points);
  rows.sort((a, b) => b[0] - a[0]);
  found.replaceChildren(...rows.slice(0, 20).map(([, [address, page, heading, text]]) => {
    const item = document.createElement("li");
    const link = document.createElement("a");
    const title = document.createElement("b");
    link.href = `${root.dataset.root}/${address}`;
    title.textContent = heading === page ? page : `${page} › ${heading}`;
    link.append(title, excerpt(text, words));
    link.addEventListener("click", () => { found.hidden = true; });
    item.append(link);
    return item;
  }));
  if (!rows.length) {
    const item = document.createElement("li");
    item.className = "nothing";
    item.textContent = "Nothing found.";
    found.append(item);
  }
}

function move(by) {
  const items = [...found.children];
  const next = items.findIndex((item) => item.classList.contains("chosen")) + by;
  for (const item of items) item.classList.remove("chosen");
  const item = items[Math.max(0, Math.min(next, items.length - 1))];
  item?.classList.add("chosen");
  item?.scrollIntoView({ block: "nearest" });
}

field.addEventListener("focus", load);
field.addEventListener("input", search);
field.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    move(event.key === "ArrowDown" ? 1 : -1);
  }
});
field.form.addEventListener("submit", (event) => {
  event.preventDefault();
  (found.querySelector(".chosen a") ?? found.querySelector("a"))?.click();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== field) {
    event.preventDefault();
    field.focus();
  } else if (event.key === "Escape") {
    found.hidden = true;
    field.blur();
  }
});
document.addEventListener("click", (event) => {
  if (!field.form.contains(event.target)) found.hidden = true;
});
