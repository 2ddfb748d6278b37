// sdrun's page: ties the form, the jobs and the gallery together.

import * as api from "./api.js";
import { $, announce, fileZone, fitSmall, hush, say, sayError } from "./dom.js";
import { applyOrder, applySaved, readOrder, setSeed, setUpForm, showLibrary } from "./form.js";
import { addPictures, latestSeed, setUpGallery, showNetworks } from "./gallery.js";
import { setUpStart, takeStart } from "./start.js";

// ---- Jobs ----

const active = []; // ids of this tab's unfinished jobs, oldest first; the page follows the first
const starts = new Map(); // job id -> its start picture and mask, which no file keeps
let current = null; // the followed job's latest state
let previewShown = 0;
let told = ""; // what was announced last
let stopWatching = () => {};

async function draw() {
  const order = readOrder();
  if (!order) return;
  try {
    const job = await api.postOrder(order);
    hush("job");
    hush("note");
    starts.set(job.id, order.start ?? null);
    active.push(job.id);
    remember();
    if (active.length === 1) follow();
    else showProgress();
    showStageOnPhone();
  } catch (error) {
    sayError("job", error);
  }
}

const STORE = "sdrun.jobs"; // of this tab

function remember() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(active));
  } catch {
    // Without storage, a reload only forgets what this tab waits for.
  }
}

function remembered() {
  try {
    return JSON.parse(sessionStorage.getItem(STORE)) ?? [];
  } catch {
    return [];
  }
}

// Follows the oldest unfinished job.
function follow() {
  stopWatching();
  current = null;
  previewShown = 0;
  told = "";
  const id = active[0];
  if (!id) return showIdle();
  stopWatching = api.watchJob(id, takeJob, takeTrouble);
  showProgress();
}

function takeJob(job) {
  if (job.id !== active[0]) return; // an answer that came late
  current = job;
  if (addPictures(job)) {
    hidePreview();
    $("seed-reuse").disabled = false;
  }
  showNetworks(job);
  if (job.warnings?.length) say("job", "warning", job.warnings);
  if (api.ended(job)) {
    tellEnd(job);
    active.shift();
    remember();
    hidePreview();
    follow();
  } else {
    showPreview(job);
    showProgress();
  }
}

function tellEnd(job) {
  if (job.state === "failed") {
    sayError("job", job.error ?? { code: "failed", message: "The job failed." });
  } else if (job.state === "cancelled") {
    say("job", "note", ["The job is cancelled.", ...(job.warnings ?? [])]);
  } else {
    announce(job.pictures.length === 1 ? "The picture is finished." : `${job.pictures.length} pictures are finished.`);
  }
}

function takeTrouble(error, hopeless = false) {
  if (!error) return hush("server");
  if (!hopeless) return say("server", "error", [error.message, "The page asks again and again."]);
  hush("server");
  sayError("job", error);
  active.shift();
  follow();
}

async function cancel() {
  const id = active[0];
  if (!id) return;
  try {
    takeJob(await api.cancelJob(id));
  } catch (error) {
    sayError("job", error);
  }
}

// ---- Progress ----

function showProgress() {
  $("progress-box").hidden = false;
  $("cancel").disabled = false;
  const { phase, share, time } = progressOf(current);
  const more = active.length - 1;
  $("phase").textContent = more > 0 ? `${phase} (${more} more waiting)` : phase;
  $("time").textContent = time;
  if (share === null) $("progress").removeAttribute("value");
  else $("progress").value = share;
  document.title = share === null ? "… sdrun" : `${Math.floor(share * 100)} % sdrun`;
  tellProgress(phase, share);
  measureBar();
}

function progressOf(job) {
  if (!job) return { phase: "Waiting", share: null, time: "" };
  if (job.state === "queued") {
    const before = job.position ?? 0;
    const phase = before === 0 ? "Next in line" : before === 1 ? "1 job goes first" : `${before} jobs go first`;
    return { phase, share: null, time: "" };
  }
  const phase = job.phase ? job.phase[0].toUpperCase() + job.phase.slice(1) : "Working";
  const steps = job.total ? `${job.done} of ${job.total} steps` : "";
  return { phase, share: job.total ? job.done / job.total : null, time: [steps, timeLeft(job.seconds_left)].filter(Boolean).join(", ") };
}

function timeLeft(seconds) {
  if (seconds == null) return "";
  return seconds < 90 ? `${Math.ceil(seconds)} s left` : `${Math.round(seconds / 60)} min left`;
}

// A screen reader hears each phase and each quarter, not each step.
function tellProgress(phase, share) {
  const quarter = share === null ? "" : `, ${Math.floor(share * 4) * 25} percent`;
  if (told === phase + quarter) return;
  told = phase + quarter;
  announce(told);
}

function showIdle() {
  if (document.activeElement === $("cancel")) $("draw").focus();
  $("progress-box").hidden = true;
  $("cancel").disabled = true;
  document.title = "sdrun";
  measureBar();
}

// The preview comes into place only once it is loaded, so nothing flickers.
function showPreview(job) {
  if (!job.preview || job.preview <= previewShown) return;
  previewShown = job.preview;
  const picturesThen = job.pictures.length;
  const next = new Image();
  next.onload = () => {
    // By now the picture may be finished, or another job on.
    if (current?.id !== job.id || current.pictures.length !== picturesThen || api.ended(current)) return;
    const image = $("preview");
    image.src = next.src;
    // A small preview of a large picture looks better soft.
    image.onload = () => fitSmall(image, 400, false);
    image.hidden = false;
    $("empty").hidden = true;
    $("shown").hidden = true;
  };
  next.src = api.previewUrl(job.id, job.preview);
}

function hidePreview() {
  $("preview").hidden = true;
  const any = latestSeed() !== undefined;
  $("shown").hidden = !any;
  $("empty").hidden = any;
}

// On a phone the picture lies below the form.
function showStageOnPhone() {
  if (matchMedia("(min-width: 60rem)").matches) return;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  $("stage").scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "center" });
}

// On a phone the bar covers the page's end; the page leaves that much room.
function measureBar() {
  document.documentElement.style.setProperty("--bar", `${$("bar").offsetHeight}px`);
}

// ---- Settings from pictures ----

async function restore(blob, start = undefined) {
  try {
    const { order, unread = [], model_found: found } = await api.readMetadata(blob);
    if (start !== undefined) order.start = start;
    const notes = await applyOrder(order);
    if (found === false && !notes.some((note) => note.includes("the model"))) {
      notes.push("This server does not have the picture's model.");
    }
    say("note", "note", ["The form has the picture's settings.", ...unread, ...notes]);
  } catch (error) {
    sayError("note", error);
  }
}

// The same settings and seed, into the form. The picture's own metadata tell
// them, so this works after a reload too.
async function again(job, picture) {
  try {
    const blob = await api.getBlob(picture.url);
    await restore(blob, starts.get(job.id));
    focusPrompt();
  } catch (error) {
    sayError("note", error);
  }
}

async function startFrom(job, picture) {
  try {
    await takeStart(await api.getBlob(picture.url));
    $("start-group").scrollIntoView({ block: "nearest" });
    $("mask-canvas").focus();
  } catch (error) {
    sayError("start", error);
  }
}

function focusPrompt() {
  $("prompt").focus();
  $("prompt").scrollIntoView({ block: "center" });
}

// A pasted picture is a start picture, unless the restore zone has the focus.
function paste(event) {
  const file = [...(event.clipboardData?.files ?? [])].find(({ type }) => type.startsWith("image/"));
  // A word processor puts a picture of the text beside the text.
  const text = event.target.matches("input, textarea") && event.clipboardData.types.includes("text/plain");
  if (!file || text) return;
  event.preventDefault();
  if ($("restore-group").contains(document.activeElement)) restore(file);
  else takeStart(file);
}

// ---- Keys ----

function key(event) {
  if (event.isComposing || event.defaultPrevented || $("viewer").open) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    draw();
  } else if (event.key === "Escape" && event.target.tagName !== "SELECT") {
    cancel();
  }
}

// ---- Beginning ----

// Asks for all that the page shows first; keeps trying while the server is away.
async function load(tries = 0) {
  try {
    await showLibrary(await api.getLibrary());
    await applySaved();
    const jobs = await api.getJobs();
    hush("server");
    takeOldJobs(jobs);
  } catch (error) {
    const retry = { label: "Try again", run: () => { clearTimeout(timer); load(tries + 1); } };
    const timer = api.unreachable(error) ? setTimeout(load, Math.min(15000, 2000 * (tries + 1)), tries + 1) : null;
    sayError("server", error, retry);
  }
}

// Follows this tab's jobs again after a reload. Those of others are not its to cancel.
function takeOldJobs(jobs) {
  const own = remembered();
  for (const job of [...jobs].reverse()) {
    addPictures(job);
    if (!api.ended(job) && own.includes(job.id) && !active.includes(job.id)) active.push(job.id);
  }
  const newest = jobs.find((job) => job.pictures.length);
  if (newest) showNetworks(newest);
  $("seed-reuse").disabled = !newest;
  if (active.length && !current) follow();
}

async function refresh() {
  try {
    await showLibrary(await api.refreshLibrary());
    announce("The models are read again.");
    hush("server");
  } catch (error) {
    sayError("server", error);
  }
}

setUpForm();
setUpStart();
setUpGallery({ again, start: startFrom });
fileZone($("restore-file"), $("restore-group"), (file) => restore(file));
$("order").addEventListener("submit", (event) => { event.preventDefault(); draw(); });
$("cancel").onclick = cancel;
$("refresh").onclick = refresh;
$("seed-reuse").onclick = () => setSeed(latestSeed());
document.addEventListener("keydown", key);
document.addEventListener("paste", paste);
// A file that misses its zone must not replace the page.
for (const name of ["dragover", "drop"]) {
  addEventListener(name, (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
}
new ResizeObserver(measureBar).observe($("bar"));
load();
