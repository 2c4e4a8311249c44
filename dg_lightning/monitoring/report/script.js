"use strict";
// Shows values on hover or by keyboard. Charts store the values in data-tip, maps as bytes.
const tip = document.getElementById("tip");

function show(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
}

function hide() { tip.hidden = true; }

function move(key, index, count) {
  if (key === "ArrowRight" || key === "ArrowDown") return Math.min(index + 1, count - 1);
  if (key === "ArrowLeft" || key === "ArrowUp") return Math.max(index - 1, 0);
  if (key === "Home") return 0;
  return key === "End" ? count - 1 : -1;
}

for (const chart of document.querySelectorAll(".chart")) {
  const svg = chart.querySelector("svg");
  let near = null;
  const marks = () => [...svg.querySelectorAll(".series:not(.off) [data-tip]")];
  const middle = (mark) => {
    const box = mark.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  const away = (mark, x, y) => {
    const box = mark.getBoundingClientRect();
    return Math.hypot(Math.max(box.left - x, 0, x - box.right), Math.max(box.top - y, 0, y - box.bottom));
  };
  const point = (mark) => {
    if (near) near.classList.remove("near");
    near = mark;
    if (!mark) return hide();
    mark.classList.add("near");
    show(mark.dataset.tip, ...middle(mark));
  };
  const seek = (event) => {
    let best = null, least = 40;
    for (const mark of marks()) {
      const distance = away(mark, event.clientX, event.clientY);
      if (distance < least) { least = distance; best = mark; }
    }
    point(best);
  };
  svg.addEventListener("pointermove", seek);
  svg.addEventListener("click", seek);  // touch screens cannot hover
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && point(null));
  svg.addEventListener("blur", () => point(null));
  svg.addEventListener("keydown", (event) => {
    const all = marks();
    if (event.key === "Escape") return point(null);
    const next = move(event.key, near ? all.indexOf(near) : -1, all.length);
    if (next < 0 || !all.length) return;
    event.preventDefault();
    point(all[next]);
  });
  for (const key of chart.querySelectorAll(".key")) {
    key.addEventListener("click", () => {
      const on = key.getAttribute("aria-pressed") !== "true";
      key.setAttribute("aria-pressed", on);
      const series = svg.querySelector(`.series[data-series="${key.dataset.series}"]`);
      series.classList.toggle("off", !on);
    });
  }
}

// Viridis in nine steps, which is readable with colour blindness. Dark is closed, bright is open.
const STEPS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141],
  [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];

function colour(value) {
  if (value === 255) return [128, 128, 128];
  const place = value / 250 * (STEPS.length - 1), low = Math.min(Math.floor(place), STEPS.length - 2);
  return STEPS[low].map((part, i) => part + (STEPS[low + 1][i] - part) * (place - low));
}

for (const canvas of document.querySelectorAll(".map canvas")) {
  const bytes = Uint8Array.from(atob(canvas.dataset.values), (letter) => letter.charCodeAt(0));
  const rows = JSON.parse(canvas.dataset.rows), columns = JSON.parse(canvas.dataset.columns);
  const shown = canvas.dataset.shown ? JSON.parse(canvas.dataset.shown) : null;
  const context = canvas.getContext("2d"), image = context.createImageData(columns.length, rows.length);
  bytes.forEach((value, index) => image.data.set([...colour(value), 255], index * 4));
  context.putImageData(image, 0, 0);
  canvas.dataset.drawn = bytes.length;
  const value = (row, column) => {
    const byte = bytes[row * columns.length + column];
    if (shown) return shown[row][column];
    return byte === 255 ? "unseen" : (byte / 2.5).toFixed(1) + " %";
  };
  const say = (row, column) => {
    const box = canvas.getBoundingClientRect();
    const { rowLabel, columnLabel } = canvas.dataset;
    show(`${rowLabel} ${rows[row]}, ${columnLabel} ${columns[column]}: ${value(row, column)}`,
      box.x + (column + .5) / columns.length * box.width, box.y + (row + .5) / rows.length * box.height);
  };
  let row = 0, column = -1;
  const seek = (event) => {
    const box = canvas.getBoundingClientRect();
    row = Math.floor((event.clientY - box.y) / box.height * rows.length);
    column = Math.floor((event.clientX - box.x) / box.width * columns.length);
    row = Math.max(0, Math.min(row, rows.length - 1));
    column = Math.max(0, Math.min(column, columns.length - 1));
    say(row, column);
  };
  canvas.addEventListener("pointermove", seek);
  canvas.addEventListener("click", seek);
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  canvas.addEventListener("blur", hide);
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      row = move(event.key, row, rows.length);
      column = Math.max(column, 0);
    } else column = move(event.key, column, columns.length);
    say(row, column);
  });
}

// Clicking a column header sorts the rows by the first number in each cell, or by name in the
// first column.
for (const table of document.querySelectorAll(".wide table")) {
  const body = table.tBodies[0];
  const figure = (row, column) => {
    const found = row.cells[column].textContent.replaceAll(",", "").match(/[-+]?\d+(\.\d+)?(e[-+]?\d+)?/i);
    return found ? Number(found[0]) : -Infinity;
  };
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const falls = head.ariaSort !== "descending";
      for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
      head.ariaSort = falls ? "descending" : "ascending";
      const by = (a, b) => column
        ? figure(b, column) - figure(a, column) || 0
        : b.cells[0].textContent.localeCompare(a.cells[0].textContent);
      const sorted = [...body.rows].sort((a, b) => falls ? by(a, b) : by(b, a));
      body.append(...sorted);
    });
  });
}
