// Draws boxes, masks and keypoints on a canvas over the image.

const LINE = 2;
const NARROW = 480; // CSS pixels; on a canvas narrower than this, labels are smaller
const PADDING = 5;
const MASK_OPACITY = 0.4;
const FAINT = 0.3;
const DOT_RADIUS = 4;
const MIN_KEYPOINT_CONFIDENCE = 0.5;

/** Return the colour of a class: hues far apart for neighbouring ids, all of them light enough for dark text. */
export function colourOf(classId) {
  return `oklch(0.8 0.155 ${((classId * 137.508 + 25) % 360).toFixed(1)})`;
}

/**
 * Draw detections, whose coordinates are in pixels of the image, `size`.
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
  const place = ([x, y]) => [(x * width) / size.width, (y * height) / size.height];
  const boxes = detections.map((detection) => {
    const { x1, y1, x2, y2, mask, keypoints = [] } = detection;
    const polygons = mask?.map((part) => pairs(part).map(place)) ?? (detection.corners && [detection.corners.map(place)]);
    const vertices = polygons?.flat() ?? [];
    const [left, top, right, bottom] = [...place([x1, y1]), ...place([x2, y2])].map(snap);
    return {
      detection,
      colour: colourOf(detection.class_id),
      path: polygons ? pathOf(polygons) : frame(left, top, right, bottom),
      isMask: Boolean(mask),
      dots: keypoints.map(({ x, y, confidence = 1 }, index) => ({ centre: place([x, y]), confidence, colour: colourOf(index) })),
      anchor: vertices.length ? upperLeft(vertices) : { x: left, above: top, below: bottom },
      isFaint: chosen !== null && detection !== chosen,
    };
  });
  boxes.sort((one, other) => one.isFaint - other.isFaint || other.detection.confidence - one.detection.confidence);
  for (const box of boxes.toReversed()) drawBox(context, box); // the most important one on top
  const taken = [];
  for (const box of boxes) drawLabel(context, box, fontSize + 7, width, height, taken);
}

/** Return a closed path of polygons, each a list of points [x, y]. */
function pathOf(polygons) {
  const path = new Path2D();
  for (const [start, ...others] of polygons) {
    path.moveTo(...start);
    for (const point of others) path.lineTo(...point);
    path.closePath();
  }
  return path;
}

function pairs(numbers) {
  return Array.from({ length: numbers.length / 2 }, (_, index) => [numbers[2 * index], numbers[2 * index + 1]]);
}

/** Return where the label of a mask or an oriented box is: at its vertex near the top left. */
function upperLeft(vertices) {
  const [x, y] = vertices.reduce((one, other) => (other[0] + 2 * other[1] < one[0] + 2 * one[1] ? other : one));
  return { x, above: y, below: y };
}

/** Return a path along the inside of a box. */
function frame(left, top, right, bottom) {
  const path = new Path2D();
  path.rect(left + LINE / 2, top + LINE / 2, Math.max(1, right - left - LINE), Math.max(1, bottom - top - LINE));
  return path;
}

function drawBox(context, { path, isMask, dots, colour, isFaint }) {
  const opacity = isFaint ? FAINT : 1;
  if (isMask) {
    context.globalAlpha = opacity * MASK_OPACITY;
    context.fillStyle = colour;
    context.fill(path);
  }
  context.globalAlpha = opacity;
  context.lineJoin = "round";
  context.strokeStyle = "rgb(0 0 0 / 45%)";
  context.lineWidth = LINE + 2;
  context.stroke(path);
  context.strokeStyle = colour;
  context.lineWidth = LINE;
  context.stroke(path);
  for (const dot of dots) if (dot.confidence >= MIN_KEYPOINT_CONFIDENCE) drawDot(context, dot);
}

function drawDot(context, { centre, colour }) {
  context.beginPath();
  context.arc(...centre, DOT_RADIUS, 0, 2 * Math.PI);
  context.strokeStyle = "rgb(0 0 0 / 75%)";
  context.stroke();
  context.fillStyle = colour;
  context.fill();
}

/** Draw a label above, inside or below its anchor, avoiding the areas in `taken`; omit it if there is no room. */
function drawLabel(context, { detection, anchor, colour, isFaint }, labelHeight, width, height, taken) {
  if (isFaint) return;
  const text = `${detection.class_name} ${Math.round(detection.confidence * 100)}%`;
  const labelWidth = context.measureText(text).width + 2 * PADDING;
  const x = Math.max(0, Math.min(anchor.x, width - labelWidth));
  const isFree = (y) =>
    y >= 0 && y + labelHeight <= height && !taken.some((other) => Math.abs(other.y - y) < labelHeight && other.x < x + labelWidth && x < other.end);
  const y = [anchor.above - labelHeight, anchor.above, anchor.below - labelHeight, anchor.below].find(isFree);
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
