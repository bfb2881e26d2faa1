// The search tab: images like one, and images with words.

import { loadThumbnail, searchImage, searchWords } from "./gateway.js";
import { make, milliseconds } from "./panels.js";

const element = (id) => document.getElementById(id);
const state = {
  hasThumbnails: false,
  show: null, // repeats the request that is shown
};
let running = null; // AbortController of the request in progress
let report = null;

/** Set what is called with an error, or with null after a success, and whether there are thumbnails. */
export function prepare(onResult, hasThumbnails) {
  report = onResult;
  state.hasThumbnails = hasThumbnails;
}

/** Search for images like this one. */
export function receiveExample(file) {
  const image = element("example-image");
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  image.hidden = false;
  element("example-invitation").hidden = true;
  return show("Images like this one", (signal) => searchImage(file, signal));
}

/** Repeat the request that is shown. */
export async function refresh() {
  await state.show?.();
}

/** Show what a request finds; abort a previous one. */
async function show(title, ask) {
  running?.abort();
  const own = (running = new AbortController());
  state.show = () => show(title, ask);
  element("results").ariaBusy = "true";
  try {
    const { hits, time } = await ask(own.signal);
    if (own !== running) return;
    report(null);
    render(title, hits, time);
  } catch (error) {
    if (own !== running) return;
    render(title, [], null);
    report(error);
  }
  element("results").ariaBusy = "false";
}

function render(title, hits, time) {
  const count = `${hits.length || "No"} ${hits.length === 1 ? "result" : "results"}`;
  element("results-title").textContent = title;
  element("search-summary").textContent = [count, time === null ? "" : milliseconds(time)].filter(Boolean).join(" · ");
  element("no-hits").hidden = hits.length > 0;
  element("no-hits").textContent = "Nothing was found.";
  for (const image of element("hits").querySelectorAll("img")) URL.revokeObjectURL(image.src);
  element("hits").replaceChildren(...hits.map(makeHit));
}

function makeHit(hit) {
  const name = hit.image_path ?? hit.image_id;
  const lines = [[name, "name"], [hit.matched_text && `“${hit.matched_text}”`, ""], [hit.score.toFixed(3), "score"]];
  const shown = lines.filter(([text]) => text).map(([text, className]) => make("span", { className, title: text }, ...breakable(text)));
  const figure = make("figure", {}, make("figcaption", {}, ...shown));
  if (state.hasThumbnails) addThumbnail(figure, hit);
  return make("li", {}, figure);
}

/** Let a path break after its folders. */
function breakable(text) {
  return text.split(/(?<=\/)/).flatMap((part) => [make("wbr", {}), part]);
}

async function addThumbnail(container, { image_id: image }) {
  const url = await loadThumbnail(image);
  if (url) container.prepend(make("img", { src: url, alt: "" }));
}

element("words-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = element("words").value;
  show(`Images with “${words}”`, (signal) => searchWords(words, signal));
});
element("search-choose").addEventListener("click", () => element("file").click());
