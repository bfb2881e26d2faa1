// The search tab: images like one, images with words, and persons.

import { listFaces, listPersons, loadThumbnail, namePerson, searchImage, searchWords } from "./gateway.js";
import { keepFocus, make, milliseconds } from "./panels.js";

const element = (id) => document.getElementById(id);
const state = {
  hasThumbnails: false,
  show: null, // repeats the request that is shown
  persons: [],
  total: 0, // persons
  nextPage: 0, // of persons
  person: null, // id of the chosen one
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

/** Load the persons, and repeat the request that is shown. */
export async function refresh() {
  await loadPersons(0);
  await state.show?.();
}

/** Show what a request finds, which may be the faces of a person; abort a previous one. */
async function show(title, ask, person = null) {
  running?.abort();
  const own = (running = new AbortController());
  Object.assign(state, { person, show: () => show(title, ask, person) });
  renderPersons();
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
  const lines = [[name, "name"], [hit.person_name, ""], [hit.matched_text && `“${hit.matched_text}”`, ""], [hit.score?.toFixed(3), "score"]];
  const shown = lines.filter(([text]) => text).map(([text, className]) => make("span", { className, title: text }, ...breakable(text)));
  const figure = make("figure", {}, make("figcaption", {}, ...shown));
  if (state.hasThumbnails) addThumbnail(figure, hit);
  return make("li", {}, figure);
}

/** Let a path break after its folders. */
function breakable(text) {
  return text.split(/(?<=\/)/).flatMap((part) => [make("wbr", {}), part]);
}

async function addThumbnail(container, { image_id: image, face_id: face }) {
  const url = await loadThumbnail(image, face);
  if (url) container.prepend(make("img", { src: url, alt: "" }));
}

async function loadPersons(page) {
  try {
    const { persons, total } = await listPersons(page);
    if (!page) for (const { picture } of state.persons) URL.revokeObjectURL(picture);
    state.persons = [...(page ? state.persons : []), ...persons];
    Object.assign(state, { total, nextPage: page + 1 });
    report(null);
  } catch (error) {
    report(error);
  }
  renderPersons();
}

function renderPersons() {
  keepFocus(element("person-list"), state.persons.map(({ person_id: id, person_name: name, face_count: count, picture }) => {
    const faces = make("span", { className: "score" }, `${count} ${count === 1 ? "face" : "faces"}`);
    const button = make("button", { type: "button", ariaPressed: String(id === state.person) }, make("span", {}, name ?? "Unnamed"), faces);
    if (picture) button.prepend(make("img", { src: picture, alt: "" }));
    button.dataset.key = id;
    button.addEventListener("click", () => choosePerson(id, name));
    return make("li", {}, button);
  }));
  element("no-persons").hidden = state.persons.length > 0;
  element("more-persons").hidden = state.persons.length >= state.total;
  element("name-form").hidden = state.person === null;
}

function choosePerson(id, name) {
  element("name").value = name ?? "";
  return show(name ? `Faces of ${name}` : "Faces of somebody", (signal) => listFaces(id, signal), id);
}

element("words-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = element("words").value;
  show(`Images with “${words}”`, (signal) => searchWords(words, signal));
});
element("name-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [id, name] = [state.person, element("name").value.trim()];
  try {
    await namePerson(id, name);
  } catch (error) {
    report(error);
    return;
  }
  await loadPersons(0);
  await choosePerson(id, name);
});
element("more-persons").addEventListener("click", () => loadPersons(state.nextPage));
element("search-choose").addEventListener("click", () => element("file").click());
