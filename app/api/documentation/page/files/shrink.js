// Makes images smaller before they are sent.

const QUALITY = 0.85;

/**
 * Resolve to an upright copy of an image whose longest side has at most so many pixels, as JPEG; or to the image itself, if it is
 * smaller, or if the browser cannot read it.
 */
export async function shrink(image, longestSide) {
  const bitmap = await createImageBitmap(image).catch(() => null);
  const scale = bitmap ? longestSide / Math.max(bitmap.width, bitmap.height) : 1;
  if (scale >= 1) return image;
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return new Promise((resolve) => canvas.toBlob((copy) => resolve(copy ?? image), "image/jpeg", QUALITY));
}
