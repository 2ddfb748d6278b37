// The form: turns its fields into an order and an order into its fields.

import { getModel } from "./api.js";
import { $, make, say, sayError, hush } from "./dom.js";
import { applyStart, readStart, readStartNumbers, removeStart } from "./start.js";

const STORE = "sdrun.settings.1";

// [order's field, element's id, how to read it]
const FIELDS = [
  ["prompt", "prompt", String],
  ["negative_prompt", "negative", String],
  ["model", "model", String],
  ["vae", "vae", String],
  ["width", "width", Number],
  ["height", "height", Number],
  ["steps", "steps", Number],
  ["cfg_scale", "cfg", Number],
  ["guidance", "guidance", Number],
  ["sampler", "sampler", String],
  ["schedule", "schedule", String],
  ["seed", "seed", Number],
  ["count", "count", Number],
  ["clip_skip", "clip-skip", Number],
  ["upscaler", "upscaler", String],
];

// Settings of a restored order that the form has no field for. They go with
// the next orders until the user removes them.
const EXTRAS = {
  variation: "A variation of the seed",
  hires: "A second, larger pass",
  upscale_repeats: "Enlarging more than once",
  format: "Another file format",
  controls: "Control pictures",
  references: "Reference pictures",
};
let extras = {};

let library = null;
let model = null; // the chosen model's usual values

export function setUpForm() {
  $("model").addEventListener("change", showModel);
  $("lora-add").onclick = () => {
    addLora($("lora-choice").value, 1).focus();
    save();
  };
  $("seed-random").onclick = () => setSeed("");
  $("seed").addEventListener("input", showSeed);
  for (const button of document.querySelectorAll("[data-shape]")) {
    button.onclick = () => setShape(Number(button.dataset.shape));
  }
  $("order").addEventListener("input", (event) => {
    showSlider(event.target);
    fieldChanged(event.target);
    saveSoon();
  });
  document.querySelectorAll("input[type=range]").forEach(showSlider);
}

// What was wrong with a field is no longer so.
function fieldChanged(field) {
  if (!field.classList.contains("wrong")) return;
  field.classList.remove("wrong");
  hush("form");
}

// ---- What the server has ----

export async function showLibrary(news) {
  const chosen = $("model").value;
  library = news;
  $("version").textContent = news.version ?? "";
  fillSelect($("model"), news.models.map(({ name, title }) => [name, title || name]));
  $("model").value = [chosen, news.default_model].find((name) => news.models.some((each) => each.name === name)) ?? "";
  fillSelect($("sampler"), named(news.samplers), "The usual one");
  fillSelect($("schedule"), named(news.schedules), "The usual one");
  fillSelect($("vae"), named(news.vaes), "The model's own");
  fillSelect($("upscaler"), named(news.upscalers), "No");
  $("vae-row").hidden = !news.vaes?.length;
  $("upscaler-row").hidden = !news.upscalers?.length;
  showLoraChoice();
  await showModel();
}

const named = (list) => (list ?? []).map(({ name, label }) => [name, label || name]);

// Fills a select and keeps its choice where that still exists.
function fillSelect(select, pairs, none = null) {
  const old = select.value;
  const all = none === null ? pairs : [["", none], ...pairs];
  select.replaceChildren(...all.map(([value, text]) => new Option(text, value)));
  select.value = all.some(([value]) => value === old) ? old : all[0]?.[0] ?? "";
}

// Shows the chosen model's usual values as what empty fields stand for.
async function showModel() {
  const name = $("model").value;
  model = null;
  if (!name) {
    say("model", "warning", ["There is no model yet.", "Put a model file into the models folder, then press Refresh."]);
    return;
  }
  let news;
  try {
    news = await getModel(name);
    hush("model");
  } catch (error) {
    if ($("model").value === name) sayError("model", error);
    return;
  }
  if ($("model").value !== name) return; // another was chosen meanwhile
  model = news;
  for (const id of ["width", "height"]) {
    Object.assign($(id), { placeholder: model[id], step: model.multiple || 1, min: model.multiple || 1 });
  }
  $("steps").placeholder = model.steps ?? "";
  $("cfg").placeholder = model.cfg_scale ?? "";
  $("guidance-row").hidden = model.guidance == null;
  $("guidance").placeholder = model.guidance ?? "";
  nameUsual($("sampler"), model.sampler);
  nameUsual($("schedule"), model.schedule);
  $("model-about").textContent = model.title || model.family || "";
}

function nameUsual(select, usual) {
  const option = [...select.options].find(({ value }) => value === usual);
  select.options[0].textContent = option ? `${option.textContent} (usual)` : "The usual one";
}

// ---- Fields ----

// Keeps about the model's usual area and changes the shape.
function setShape(shape) {
  const multiple = model?.multiple || 8;
  const area = (model?.width || 512) * (model?.height || 512);
  const round = (number) => Math.max(multiple, Math.round(number / multiple) * multiple);
  $("width").value = round(Math.sqrt(area * shape));
  $("height").value = round(Math.sqrt(area / shape));
  save();
}

export function setSeed(seed) {
  $("seed").value = seed;
  fieldChanged($("seed"));
  showSeed();
  save();
}

function showSeed() {
  $("seed-random").setAttribute("aria-pressed", $("seed").value.trim() === "");
}

// Shows a slider's number beside it.
function showSlider(input) {
  if (input.type !== "range") return;
  const places = (input.step.split(".")[1] ?? "").length;
  const text = Number(input.value).toFixed(places) + (input.id === "brush" ? " %" : "");
  const output = input.parentElement.querySelector("output");
  if (output) output.textContent = text;
}

// ---- LoRAs ----

function addLora(name, strength) {
  const slider = make("input", { type: "range", min: -2, max: 2, step: 0.05, value: strength });
  slider.id = `lora-${name}`;
  slider.dataset.lora = name;
  const remove = make("button", { type: "button", textContent: "Remove", ariaLabel: `Remove ${name}` });
  const item = make("li", {},
    make("label", { htmlFor: slider.id, textContent: name }), slider, make("output"), remove);
  remove.onclick = () => {
    item.remove();
    showLoraChoice();
    save();
    $("lora-choice").focus();
  };
  $("loras").append(item);
  showSlider(slider);
  showLoraChoice();
  return slider;
}

const loraSliders = () => [...$("loras").querySelectorAll("[data-lora]")];
const readLoras = () => loraSliders().map((each) => ({ name: each.dataset.lora, strength: Number(each.value) }));

// Offers the LoRAs that are not in use yet.
function showLoraChoice() {
  const used = readLoras().map(({ name }) => name);
  const free = (library?.loras ?? []).filter(({ name }) => !used.includes(name));
  fillSelect($("lora-choice"), free.map(({ name }) => [name, name]));
  $("lora-choice").disabled = $("lora-add").disabled = !free.length;
  if (!free.length) $("lora-choice").append(new Option(used.length ? "All are in use" : "There are none", ""));
  $("loras-count").textContent = used.length || "";
}

// ---- Extras ----

function showExtras() {
  $("extras").replaceChildren(...Object.keys(extras).map((key) => {
    const remove = make("button", { type: "button", textContent: "Remove", ariaLabel: `Remove: ${EXTRAS[key]}` });
    remove.onclick = () => {
      delete extras[key];
      showExtras();
      save();
      $("seed").focus();
    };
    return make("li", {}, make("span", { textContent: `Also: ${EXTRAS[key].toLowerCase()}` }), remove);
  }));
}

// ---- Orders ----

// The form's settings, without the start picture. Empty fields stay out: the
// model's usual values stand for them.
function readSettings() {
  const order = { ...extras };
  for (const [key, id, read] of FIELDS) {
    const field = $(id);
    const text = field.value.trim();
    if (text !== "" && !field.closest("[hidden]")) order[key] = read(text);
  }
  const loras = readLoras();
  if (loras.length) order.loras = loras;
  return order;
}

// The whole order, or null after pointing at the field that is wrong.
export function readOrder() {
  const field = firstWrong();
  if (field) {
    for (let box = field.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    field.classList.add("wrong");
    field.focus();
    say("form", "error", [wrongSentence(field)]);
    return null;
  }
  hush("form");
  const order = readSettings();
  order.prompt ??= "";
  const start = readStart();
  if (start) order.start = start;
  return order;
}

function firstWrong() {
  const shown = [...$("order").elements].filter((field) => !field.closest("[hidden]"));
  return shown.find((field) => field.willValidate && !field.checkValidity())
    ?? (Number($("seed").value) > Number.MAX_SAFE_INTEGER ? $("seed") : null)
    ?? (!$("prompt").value.trim() && !readStart() ? $("prompt") : null);
}

function wrongSentence(field) {
  if (field.id === "prompt") return "Write what you want to see first.";
  if (field.id === "seed") return `A seed is a whole number from 0 to ${Number.MAX_SAFE_INTEGER}. Leave it empty for a new one.`;
  const label = field.labels[0]?.firstChild.textContent.trim();
  return `${label}: ${field.validationMessage}`;
}

// Fills the form with an order. Fields that the order does not name become
// empty. Returns sentences about what this page or server cannot take.
export async function applyOrder(order) {
  const notes = [];
  const modelBefore = $("model").value;
  for (const [key, id] of FIELDS) {
    const field = $(id);
    const value = order[key] ?? "";
    const missing = field.tagName === "SELECT" && value !== "" && ![...field.options].some((option) => option.value === value);
    if (missing) notes.push(`This server does not have the ${key} "${value}".`);
    if (key === "model" && (missing || value === "")) continue; // keep the chosen one
    field.value = missing ? "" : value;
    field.classList.remove("wrong");
  }
  showSeed();
  $("loras").replaceChildren();
  for (const { name, strength } of order.loras ?? []) {
    if (library?.loras?.some((each) => each.name === name)) addLora(name, strength ?? 1);
    else notes.push(`This server does not have the LoRA "${name}".`);
  }
  showLoraChoice();
  $("loras-group").open = Boolean(order.loras?.length);
  extras = Object.fromEntries(Object.entries(order).filter(([key, value]) => EXTRAS[key] && hasContent(value)));
  showExtras();
  removeStart();
  if (order.start) {
    await applyStart(order.start);
    if (!order.start.picture) notes.push("This picture began with another picture. Choose that one as the start picture.");
  }
  if ($("model").value !== modelBefore) await showModel();
  save();
  return notes;
}

const hasContent = (value) => value != null && !(Array.isArray(value) && !value.length);

// ---- Keeping the settings over a reload ----

let saveTimer = null;
function saveSoon() {
  clearTimeout(saveTimer);
  saveTimer = setTimeout(save, 300);
}

function save() {
  if (!library) return; // the selects are still empty
  try {
    const { controls, references, ...settings } = readSettings(); // pictures do not fit
    settings.start = readStartNumbers();
    localStorage.setItem(STORE, JSON.stringify(settings));
  } catch { /* a private window has no store; the page works without */ }
}

let savedTaken = false;

// Takes the kept settings once, unless the user already writes.
export async function applySaved() {
  if (savedTaken) return;
  savedTaken = true;
  if ($("prompt").value) return;
  try {
    const saved = JSON.parse(localStorage.getItem(STORE));
    if (saved) await applyOrder(saved);
  } catch { /* the same, or a store of another version */ }
}
