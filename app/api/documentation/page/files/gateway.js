// Requests to the gateway, and its responses.

const MAX_DETECTIONS = "300";
const MAX_HITS = "30";
/** The route of each task that the page can show. */
export const ROUTES = { detection: "detect", segmentation: "segment", pose: "pose", obb: "obb" };

/** A request that failed, as application/problem+json describes it. */
export class Problem extends Error {
  constructor({ title, detail, status, code, request_id: requestId }) {
    super(detail);
    Object.assign(this, { title, detail, status, code, requestId });
  }
}

let key = "";

/** Set the API key; it is kept in memory only. */
export function useKey(value) {
  key = value;
}

export function hasKey() {
  return key !== "";
}

/** Return the models that are ready and find objects, and the name of the default one. */
export async function listModels() {
  const response = await ask("models", {});
  const { models, default: name } = await response.json();
  return { usable: models.filter((model) => model.state === "ready" && model.task in ROUTES), defaultModel: name };
}

/**
 * Detect the objects in an image, down to the lowest confidence, so that a higher one needs no other request.
 *
 * Resolves to {answer, stages, total, roundTrip}; times are milliseconds.
 */
export async function detect(image, { task, model, iou }, signal) {
  const query = new URLSearchParams({ boxes: "pixel", ...parameters({ model, iou, confidence: "0.05" }) });
  const started = performance.now();
  const response = await ask(`${ROUTES[task]}?${query}`, {
    method: "POST",
    body: image,
    headers: { "Content-Type": mediaType(image) },
    signal,
  });
  const answer = await response.json();
  const roundTrip = performance.now() - started;
  const stages = readServerTiming(response.headers.get("Server-Timing") ?? "");
  const total = stages.find(({ name }) => name === "total")?.duration ?? answer.total_time_ms;
  return { answer, stages: stages.filter(({ name }) => name !== "total"), total, roundTrip };
}

/** Return whether the gateway detects, whether it searches, and whether it keeps thumbnails. */
export async function listServices() {
  const { endpoints } = await (await ask("./", {})).json();
  return { detection: "detection" in endpoints, search: "search" in endpoints, thumbnails: "thumbnails" in endpoints };
}

/** Find the images like one. Resolves to {hits, time}; the time is milliseconds. */
export function searchImage(image, signal) {
  const options = { method: "POST", body: image, headers: { "Content-Type": mediaType(image) }, signal };
  return search(`search/image?top_k=${MAX_HITS}&min_score=0`, options);
}

/** Find the images with these words, or similar ones. */
export function searchWords(words, signal) {
  return search(`search/ocr?${new URLSearchParams({ text: words, top_k: MAX_HITS })}`, { method: "POST", signal });
}

async function search(path, options) {
  const { results, total_time_ms: time } = await (await ask(path, options)).json();
  return { hits: results, time };
}

/** Resolve to the address of the thumbnail of an image; to null if there is none. */
export async function loadThumbnail(image) {
  try {
    return URL.createObjectURL(await (await ask(`query/image/${encodeURIComponent(image)}/thumbnail`, {})).blob());
  } catch {
    return null; // it was added before thumbnails were kept
  }
}

/** Return the parameters of a request for detections; `classes` are ids, or null for all. */
export function parameters({ model, iou, confidence, classes = null }) {
  return {
    confidence: String(confidence),
    max_detections: MAX_DETECTIONS,
    ...(model && { model }),
    ...(iou !== null && { iou }),
    ...(classes !== null && { classes: classes.join(",") }),
  };
}

async function ask(path, options) {
  const headers = { Accept: "application/json", ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ title: "The gateway cannot be reached", detail: "There is no answer. Does it run, and is there a network?" });
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new Problem({ title: `Status ${response.status}`, detail: "The answer does not say why.", ...problem, status: response.status });
}

export function mediaType(image) {
  return image.type.startsWith("image/") ? image.type : "application/octet-stream";
}

function readServerTiming(header) {
  return header.split(",").flatMap((entry) => {
    const [name, ...parameters] = entry.trim().split(";");
    const values = Object.fromEntries(parameters.map((parameter) => parameter.trim().split("=")));
    return values.dur === undefined ? [] : [{ name, duration: Number(values.dur), description: values.desc?.replaceAll('"', "") }];
  });
}
