// The page: its state and event handlers.

import { draw } from "./drawing.js";
import { detect, hasKey, listModels, listServices, Problem, useKey } from "./gateway.js";
import { milliseconds, showClasses, showDetections, showStages } from "./panels.js";
import { prepare, receiveExample, refresh } from "./search.js";
import { shrink } from "./shrink.js";
import { snippet } from "./snippets.js";
import { watch } from "./sources.js";

const IOU_DELAY_MS = 250;
const MAX_ENLARGEMENT = 2;
const MAX_HEIGHT_PERCENT = 66; // of the window
const element = (id) => document.getElementById(id);

const state = {
  image: null, // the current File
  result: null, // the result of `detect`
  off: new Set(), // ids of hidden classes
  chosen: { pinned: null, pointed: null }, // detections
  iou: null, // null: the model's default
  language: "curl", // of the code for the same request
};
let running = null; // AbortController of the request in progress
let iouTimer = 0;
let views = []; // which there are; the fragment of the address names the shown one
let view = null;

function settings() {
  const { value: model, selectedOptions: [{ dataset }] } = element("model");
  return { task: dataset.task, model, iou: state.iou };
}

function minimum() {
  return Number(element("confidence").value);
}

/** Return the detections of all classes with enough confidence. */
function confident() {
  return state.result?.answer.detections.filter(({ confidence }) => confidence >= minimum()) ?? [];
}

function receive(file) {
  return view === "search" ? receiveExample(file) : receiveImage(file);
}

function receiveImage(file) {
  state.image = file;
  state.result = null;
  state.off.clear();
  state.chosen = { pinned: null, pointed: null };
  const image = element("image");
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  image.classList.remove("failed");
  Object.assign(element("shown").style, { aspectRatio: "", width: "" });
  render();
  return run();
}

/** Request the detections of the image; abort a previous request. */
async function run() {
  if (!state.image) return;
  running?.abort();
  const own = (running = new AbortController());
  element("busy").hidden = false;
  try {
    const longestSide = Number(element("send").value);
    const image = longestSide ? await shrink(state.image, longestSide) : state.image;
    const result = await detect(image, settings(), own.signal);
    if (own !== running) return;
    state.result = result;
    state.chosen = { pinned: null, pointed: null };
    hideProblem();
  } catch (error) {
    if (own !== running) return;
    state.result = null;
    showProblem(error);
  }
  element("busy").hidden = true;
  render();
}

async function loadModels() {
  try {
    const { usable, defaultModel } = await listModels();
    const options = usable.map(({ name, task, width, height }) => {
      const option = new Option(`${name} (${task}, ${width} × ${height})`, name);
      option.dataset.task = task;
      return option;
    });
    const select = element("model");
    const wanted = select.value || defaultModel;
    if (options.length) select.replaceChildren(...options);
    if (usable.some(({ name }) => name === wanted)) select.value = wanted;
  } catch (error) {
    showProblem(error);
  }
  renderCommand();
}

async function retry() {
  hideProblem();
  if (!views.length) return openViews();
  if (view === "search") return refresh();
  await loadModels();
  await run();
}

/** Find out which views this gateway has, and show one. */
async function openViews() {
  try {
    const { detection, search, thumbnails } = await listServices();
    prepare((error) => (error ? showProblem(error) : hideProblem()), thumbnails);
    views = [...(detection ? ["detect"] : []), ...(search ? ["search"] : [])];
  } catch (error) {
    return showProblem(error);
  }
  element("views").hidden = views.length < 2;
  await showView();
}

/** Show the view that the address names. Both show problems, and ask for a key, in the same elements. */
async function showView() {
  const wanted = location.hash.slice(1);
  const next = views.includes(wanted) ? wanted : views[0];
  if (next === view) return;
  view = next;
  for (const name of ["detect", "search"]) element(`${name}-view`).hidden = name !== view;
  for (const link of element("views").children) link.ariaCurrent = link.hash === `#${view}` ? "page" : null;
  element("subject").textContent = view === "search" ? "Image search" : "Object detection";
  element(view === "search" ? "question" : "picture").append(element("problem"), element("key-form"));
  hideProblem();
  await (view === "search" ? refresh() : loadModels());
}

function render() {
  const all = confident();
  const detections = all.filter(({ class_id: id }) => !state.off.has(id));
  const { result } = state;
  showClasses(element("classes"), countClasses(all), toggleClass);
  showDetections(element("detections"), detections, state.chosen, choose);
  element("nothing").hidden = detections.length > 0;
  element("nothing").textContent = result ? "No objects with this confidence." : "Nothing yet.";
  element("stages").hidden = !result;
  element("no-time").hidden = Boolean(result);
  if (result) showStages(element("stages"), result);
  element("summary").textContent = result ? summary(detections.length, result) : "";
  element("boxes").ariaLabel = describe(detections);
  renderBoxes();
  renderCommand();
}

function renderBoxes() {
  const size = state.result?.answer.image;
  const detections = confident().filter(({ class_id: id }) => !state.off.has(id));
  const { pointed, pinned } = state.chosen;
  const chosen = [pointed, pinned].find((detection) => detections.includes(detection)) ?? null;
  const hasFailed = element("image").classList.contains("failed");
  const hasPlace = state.image !== null && (!hasFailed || Boolean(size));
  element("shown").hidden = !hasPlace;
  element("invitation").hidden = hasPlace;
  element("stage").classList.toggle("filled", hasPlace);
  element("unshown").hidden = !hasPlace || !hasFailed;
  if (hasPlace && hasFailed) makePlace(size);
  draw(element("boxes"), size ? detections : [], size ?? { width: 1, height: 1 }, chosen);
}

/** Reserve space for an image of this size, even if the browser cannot show it; enlarge small images. */
function makePlace({ width, height }) {
  Object.assign(element("shown").style, {
    aspectRatio: `${width} / ${height}`,
    width: `min(100%, ${MAX_ENLARGEMENT * width}px, ${(MAX_HEIGHT_PERCENT * width) / height}vh)`,
  });
}

function renderCommand() {
  const image = state.image ?? new File([], "image.jpg", { type: "image/jpeg" });
  const names = countClasses(confident()).filter(({ isOn }) => isOn).map(({ id }) => id);
  const classes = state.off.size && names.length ? names : null;
  element("code").textContent = snippet(state.language, image, { ...settings(), confidence: minimum(), classes });
}

function countClasses(detections) {
  const classes = new Map();
  for (const { class_id: id, class_name: name } of state.result?.answer.detections ?? []) {
    if (state.off.has(id)) classes.set(id, { id, name, count: 0, isOn: false });
  }
  for (const { class_id: id, class_name: name } of detections) {
    const known = classes.get(id) ?? { id, name, count: 0, isOn: true };
    classes.set(id, { ...known, count: known.count + 1 });
  }
  return [...classes.values()].sort((one, other) => one.id - other.id);
}

function summary(count, { answer, total }) {
  const objects = count === 1 ? "1 object" : `${count || "No"} objects`;
  return `${objects} · ${milliseconds(total)} · ${answer.image.width} × ${answer.image.height} pixels · ${answer.model.name}`;
}

function describe(detections) {
  const names = detections.map(({ class_name: name, confidence }) => `${name} ${Math.round(confidence * 100)} %`);
  return names.length ? `Objects: ${names.join(", ")}` : "No objects";
}

function toggleClass(id) {
  if (!state.off.delete(id)) state.off.add(id);
  render();
}

function choose(change) {
  Object.assign(state.chosen, change);
  if ("pinned" in change) render();
  else renderBoxes();
}

function showProblem(error) {
  if (!(error instanceof Problem)) throw error;
  const { title, detail, status, code, requestId } = error;
  element("problem-title").textContent = title;
  element("problem-detail").textContent = detail;
  element("problem-reference").textContent = [status, code, requestId && `request ${requestId}`].filter(Boolean).join(" · ");
  element("again").hidden = status >= 400 && status < 500 && ![408, 429].includes(status); // a retry would give the same result
  element("problem").hidden = false;
  if (status === 401 || status === 403) element("key-form").hidden = false;
}

function hideProblem() {
  element("problem").hidden = true;
  if (hasKey()) element("key-form").hidden = true;
}

function reject(sentence) {
  showProblem(new Problem({ title: "No image", detail: sentence }));
  element("again").hidden = true;
}

function moveIou(value) {
  state.iou = value;
  element("iou").ariaValueText = element("iou-value").textContent = value === null ? "the model's own" : Number(value).toFixed(2);
  element("iou-reset").hidden = value === null;
  element("iou").classList.toggle("unset", value === null);
  renderCommand();
  clearTimeout(iouTimer);
  iouTimer = setTimeout(run, IOU_DELAY_MS);
}

element("confidence").addEventListener("input", () => {
  element("confidence-value").textContent = minimum().toFixed(2);
  render();
});
element("iou").addEventListener("input", ({ target }) => moveIou(target.value));
element("iou-reset").addEventListener("click", () => {
  element("iou").value = element("iou").defaultValue;
  moveIou(null);
  element("iou").focus();
});
element("model").addEventListener("change", () => {
  state.off.clear();
  renderCommand();
  run();
});
element("send").addEventListener("change", run);
element("take").hidden = navigator.maxTouchPoints === 0;
element("again").addEventListener("click", retry);
element("image").addEventListener("load", ({ target: { naturalWidth: width, naturalHeight: height } }) => {
  makePlace({ width, height }); // upright, like the boxes
  renderBoxes();
});
element("image").addEventListener("error", () => {
  element("image").classList.add("failed");
  renderBoxes();
});
element("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  useKey(element("key").value.trim());
  await retry();
});
element("languages").addEventListener("click", ({ target }) => {
  if (!target.value) return; // between the buttons
  state.language = target.value;
  for (const button of element("languages").children) button.ariaPressed = String(button === target);
  renderCommand();
});
element("copy").addEventListener("click", async () => {
  const code = element("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    element("copy").textContent = "Copied";
    setTimeout(() => (element("copy").textContent = "Copy"), 2000);
  } catch { // browsers require TLS or localhost
    getSelection().selectAllChildren(code);
    element("copy").textContent = "Press Ctrl-C";
  }
});
new ResizeObserver(renderBoxes).observe(element("shown"));

addEventListener("hashchange", showView);
watch(receive, reject);
render();
openViews();
