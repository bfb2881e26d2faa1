// The request for the detections of an image as code, without the key.

import { hasKey, mediaType, parameters, ROUTES } from "./gateway.js";

const MAKERS = { curl, python, javascript };

/** Return the code for an image in a language of `MAKERS`, with these settings. */
export function snippet(language, image, settings) {
  const url = new URL(ROUTES[settings.task], document.baseURI).href;
  const request = { url, query: parameters(settings), type: mediaType(image), file: image.name ?? "image.jpg" };
  return MAKERS[language](request);
}

/** A command for a POSIX shell. */
function curl({ url, query, type, file }) {
  const parts = ["curl -s"];
  if (hasKey()) parts.push('-H "Authorization: Bearer $NEREID_KEY"');
  parts.push(`-H ${quote(`Content-Type: ${type}`)}`);
  parts.push(`--data-binary ${quote(`@${file}`)}`);
  parts.push(quote(`${url}?${new URLSearchParams(query)}`));
  return parts.join(" \\\n  ");
}

// JSON's strings are strings of Python and JavaScript, too.
const literal = JSON.stringify;

function python({ url, query, type, file }) {
  const fields = Object.entries(query).map(([name, value]) => `${literal(name)}: ${literal(value)}`);
  const key = hasKey() ? `, "Authorization": "Bearer " + os.environ["NEREID_KEY"]` : "";
  return `${hasKey() ? "import os\n" : ""}from pathlib import Path

import httpx

response = httpx.post(
    ${literal(url)},
    params={${fields.join(", ")}},
    headers={"Content-Type": ${literal(type)}${key}},
    content=Path(${literal(file)}).read_bytes(),
    timeout=30,
)
response.raise_for_status()
for detection in response.json()["detections"]:
    print(detection)
`;
}

function javascript({ url, query, type }) {
  const key = hasKey() ? ", Authorization: `Bearer ${key}`" : "";
  return `// Pages of other origins need the gateway's setting NEREID_CORS_ORIGINS.
async function detect(image${hasKey() ? ", key" : ""}) { // a File or Blob
  const query = new URLSearchParams(${literal(query)});
  const response = await fetch(\`${url}?\${query}\`, {
    method: "POST",
    headers: { "Content-Type": ${literal(type)}${key} },
    body: image,
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.detail);
  return answer.detections;
}
`;
}

function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
