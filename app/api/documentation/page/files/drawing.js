// Draws boxes on a canvas over the image.

const LINE = 2;
const NARROW = 480; // CSS pixels; on a canvas narrower than this, labels are smaller
const PADDING = 5;

/** Return the colour of a class: hues far apart for neighbouring ids, all of them light enough for dark text. */
export function colourOf(classId) {
  return `oklch(0.8 0.155 ${((classId * 137.508 + 25) % 360).toFixed(1)})`;
}

/**
 * Draw detections, whose corners are in pixels of the image, `size`.
 *
 * The canvas gets as many pixels as the screen has for it. One detection may be `chosen`: the others step back.
 */
export function draw(canvas, detections, size, chosen) {
  const { width, height } = canvas.getBoundingClientRect();
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const fontSize = width < NARROW ? 10.5 : 12.5;
  context.font = `600 ${fontSize}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
  const snap = (pixels) => Math.round(pixels * ratio) / ratio; // lines between device pixels are blurred
  const boxes = detections.map((detection) => ({
    detection,
    colour: colourOf(detection.class_id),
    left: snap((detection.x1 * width) / size.width),
    top: snap((detection.y1 * height) / size.height),
    right: snap((detection.x2 * width) / size.width),
    bottom: snap((detection.y2 * height) / size.height),
    isFaint: chosen !== null && detection !== chosen,
  }));
  boxes.sort((one, other) => one.isFaint - other.isFaint || other.detection.confidence - one.detection.confidence);
  for (const box of boxes.toReversed()) drawBox(context, box); // the most important one on top
  const taken = [];
  for (const box of boxes) drawLabel(context, box, fontSize + 7, width, height, taken);
}

function drawBox(context, { left, top, right, bottom, colour, isFaint }) {
  const inside = [left + LINE / 2, top + LINE / 2, Math.max(1, right - left - LINE), Math.max(1, bottom - top - LINE)];
  context.globalAlpha = isFaint ? 0.3 : 1;
  context.lineJoin = "round";
  context.strokeStyle = "rgb(0 0 0 / 45%)";
  context.lineWidth = LINE + 2;
  context.strokeRect(...inside);
  context.strokeStyle = colour;
  context.lineWidth = LINE;
  context.strokeRect(...inside);
}

/** Draw a label above, inside or below its box, avoiding the areas in `taken`; omit it if there is no room. */
function drawLabel(context, { detection, left, top, bottom, colour, isFaint }, labelHeight, width, height, taken) {
  if (isFaint) return;
  const text = `${detection.class_name} ${Math.round(detection.confidence * 100)}%`;
  const labelWidth = context.measureText(text).width + 2 * PADDING;
  const x = Math.max(0, Math.min(left, width - labelWidth));
  const isFree = (y) =>
    y >= 0 && y + labelHeight <= height && !taken.some((other) => Math.abs(other.y - y) < labelHeight && other.x < x + labelWidth && x < other.end);
  const y = [top - labelHeight, top, bottom - labelHeight, bottom].find(isFree);
  if (y === undefined) return;
  taken.push({ x, y, end: x + labelWidth });
  context.globalAlpha = 1;
  context.fillStyle = colour;
  context.beginPath();
  context.roundRect(x, y, labelWidth, labelHeight, 3);
  context.fill();
  context.fillStyle = "#101418";
  context.textBaseline = "middle";
  context.fillText(text, x + PADDING, y + labelHeight / 2 + 0.5);
}
