// The panels next to the image: classes, detections and stages.

import { colourOf } from "./drawing.js";

// Title and explanation of each stage in the header Server-Timing.
const STAGES = {
  read: ["Receive", "receiving the image"],
  model: ["Model", "admitting the request, and looking up its model"],
  queue: ["Queue", "waiting for a thread"],
  decode: ["Decode", "decoding and resizing the image"],
  batch: ["Batch", "waiting for other images that go along"],
  infer: ["Inference", "running the model in Triton"],
  post: ["Boxes", "turning the model's output into boxes"],
  outside: ["Network", "network and browser"],
  total: ["Total", "from the first byte sent to the last one received"],
};

/** Show a button for each class: [{id, name, count, isOn}]. */
export function showClasses(container, classes, toggle) {
  keepFocus(container, classes.map(({ id, name, count, isOn }) => {
    const button = make("button", { type: "button", ariaPressed: String(isOn) }, swatch(id), `${name} ${count}`);
    button.dataset.key = id;
    button.addEventListener("click", () => toggle(id));
    return button;
  }));
}

/** Show a row for each detection; call `choose` with the hovered or pressed one, or null. */
export function showDetections(list, detections, chosen, choose) {
  keepFocus(list, detections.map((detection, index) => {
    const bar = make("span", {});
    bar.style.width = `${detection.confidence * 100}%`;
    const button = make(
      "button",
      { type: "button", ariaPressed: String(detection === chosen.pinned) },
      swatch(detection.class_id),
      make("span", {}, detection.class_name),
      make("span", { className: "score" }, `${(detection.confidence * 100).toFixed(1)} %`),
      make("span", { className: "meter", ariaHidden: "true" }, bar),
    );
    button.dataset.key = index;
    button.addEventListener("click", () => choose({ pinned: detection === chosen.pinned ? null : detection }));
    button.addEventListener("pointerenter", () => choose({ pointed: detection }));
    button.addEventListener("pointerleave", () => choose({ pointed: null }));
    return make("li", {}, button);
  }));
}

/** Show the stages of a request in order, and the time of network and browser. */
export function showStages(container, { stages, total, roundTrip }) {
  const whole = Math.max(total, roundTrip);
  let begin = 0;
  const rows = stages.map(({ name, duration, description }) => {
    const row = makeRow(name, duration, description && ` of ${description}`, makeBar(begin / whole, duration / whole));
    begin += duration;
    return row;
  });
  const outside = Math.max(0, roundTrip - total);
  rows.push(makeRow("outside", outside, "", makeBar(total / whole, outside / whole)), makeRow("total", whole, "", make("span", {})));
  container.replaceChildren(...rows);
}

function makeRow(name, duration, description, bar) {
  const [label, title] = STAGES[name] ?? [name, ""];
  return make(
    "div",
    { className: name, title },
    make("span", {}, label + (description ?? "")),
    bar,
    make("span", { className: "duration" }, milliseconds(duration)),
  );
}

/** Make a bar whose start and length are fractions of the whole. */
function makeBar(begin, length) {
  const bar = make("span", {});
  bar.style.left = `${Math.min(0.99, begin) * 100}%`;
  bar.style.width = `${length * 100}%`;
  return make("div", { className: "track", ariaHidden: "true" }, bar);
}

export function milliseconds(value) {
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
}

function swatch(classId) {
  const square = make("span", { className: "swatch", ariaHidden: "true" });
  square.style.background = colourOf(classId);
  return square;
}

export function make(name, properties, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** Replace the children; keep the focus on the button with the same `data-key`. */
function keepFocus(container, children) {
  const key = container.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  container.replaceChildren(...children);
  if (key !== undefined) container.querySelector(`[data-key="${key}"]`)?.focus();
}
