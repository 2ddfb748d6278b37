// The start picture of the form, with its mask and settings.

import { $, fileZone, fitSmall, hush, readAsDataUrl, say } from "./dom.js";
import { Mask } from "./mask.js";

// Larger pictures are made smaller here: no model draws larger than this, and
// the order stays light.
const LARGEST = 2048;

let picture = null; // data URL
const mask = new Mask($("mask-canvas"), $("mask-ring"));

export function setUpStart() {
  fileZone($("start-file"), $("start-group"), takeStart);
  $("start-remove").onclick = () => {
    removeStart();
    $("start-file").focus();
  };
  $("mask-undo").onclick = () => mask.undo();
  $("mask-clear").onclick = () => mask.clear();
  $("mask-invert").onclick = () => mask.invert();
  $("mask-erase").onclick = () => {
    mask.erasing = !mask.erasing;
    $("mask-erase").setAttribute("aria-pressed", mask.erasing);
  };
  $("brush").addEventListener("input", () => { mask.brush = Number($("brush").value); });
  $("only-masked").addEventListener("change", showPadding);
  showPadding();
}

function showPadding() {
  $("padding-row").hidden = !$("only-masked").checked;
}

// Takes a picture file or blob as the start picture.
export async function takeStart(file) {
  try {
    await showStart(await plainPicture(file));
    hush("start");
  } catch {
    say("start", "error", ["The browser cannot read this file as a picture.", "Choose a PNG, JPEG or WebP file."]);
  }
}

// The picture as a data URL that the server sees just as the page does: JPEGs
// may carry a turn that only browsers honour, so they are drawn anew.
async function plainPicture(file) {
  const url = await readAsDataUrl(file);
  const image = await loadImage(url);
  const side = Math.max(image.naturalWidth, image.naturalHeight);
  if (side <= LARGEST && ["image/png", "image/webp"].includes(file.type)) return url;
  const scale = Math.min(1, LARGEST / side);
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(image.naturalWidth * scale);
  canvas.height = Math.round(image.naturalHeight * scale);
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.type === "image/jpeg" ? "image/jpeg" : "image/png", 0.95);
}

async function loadImage(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return image;
}

async function showStart(url) {
  const image = $("start-picture");
  image.src = url;
  await image.decode();
  picture = url;
  fitSmall(image, 320);
  $("mask-canvas").className = image.className;
  mask.load(image.naturalWidth, image.naturalHeight);
  $("start-box").hidden = false;
  $("start-group").open = true;
  $("start-count").textContent = `${image.naturalWidth} × ${image.naturalHeight}`;
}

export function removeStart() {
  picture = null;
  $("start-picture").removeAttribute("src");
  $("start-box").hidden = true;
  $("start-count").textContent = "";
}

// The order's `start`, or null when there is no start picture.
export function readStart() {
  if (!picture) return null;
  const { strength, fit, ...forMask } = readStartNumbers();
  const painted = mask.toDataUrl();
  return { picture, strength, fit, ...(painted ? { mask: painted, ...forMask } : {}) };
}

export function readStartNumbers() {
  const number = (id) => Number($(id).value);
  const numbers = { strength: number("strength"), fit: $("fit").value, mask_blur: number("mask-blur"), fill: $("fill").value };
  if ($("only-masked").checked) numbers.only_masked = number("padding");
  return numbers;
}

// Shows an order's `start` again. One without its picture (from a file's
// metadata) sets the numbers only.
export async function applyStart(start) {
  setSlider("strength", start.strength);
  setSlider("mask-blur", start.mask_blur);
  if (start.fill) $("fill").value = start.fill;
  if (start.fit) $("fit").value = start.fit;
  $("only-masked").checked = start.only_masked != null;
  if (start.only_masked != null) $("padding").value = start.only_masked;
  showPadding();
  if (!start.picture) return;
  await showStart(start.picture);
  if (start.mask) mask.fromImage(await loadImage(start.mask));
}

function setSlider(id, value) {
  if (value == null) return;
  $(id).value = value;
  $(id).dispatchEvent(new Event("input", { bubbles: true }));
}
