// Sources of images: file field, camera, drag and drop, clipboard, samples.

/** Call `receive` with each image, and `reject` with a message for anything else. */
export function watch(receive, reject) {
  for (const [button, input] of [["choose", "file"], ["take", "camera"]]) {
    const field = document.getElementById(input);
    document.getElementById(button).addEventListener("click", () => field.click());
    field.addEventListener("change", () => {
      if (field.files.length) receive(field.files[0]);
      field.value = ""; // so that the same file can be chosen again
    });
  }
  for (const button of document.querySelectorAll("[data-sample]")) {
    button.addEventListener("click", async () => {
      const name = button.dataset.sample;
      try {
        const response = await fetch(`page-assets/${name}`);
        receive(new File([await response.blob()], name, { type: "image/jpeg" }));
      } catch {
        reject("The sample could not be loaded.");
      }
    });
  }
  watchDrops(receive, reject);
  document.addEventListener("paste", (event) => {
    const [file] = event.clipboardData?.files ?? [];
    if (file) {
      event.preventDefault();
      receive(file);
    } else if (!event.target.closest?.("input")) {
      reject("The clipboard has no image.");
    }
  });
}

function watchDrops(receive, reject) {
  let depth = 0; // `dragenter` of an inner element precedes `dragleave` of the outer one
  const note = (change) => {
    depth = Math.max(0, depth + change);
    document.body.classList.toggle("dragging", depth > 0);
  };
  document.addEventListener("dragenter", () => note(1));
  document.addEventListener("dragleave", () => note(-1));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    note(-depth);
    const [file] = event.dataTransfer.files;
    if (file) receive(file);
    else reject("Drop an image file; a picture of another page may have to be saved first.");
  });
}
