// The pictures drawn so far, and the dialog that shows one of them.

import { $, fitSmall, make } from "./dom.js";

const entries = []; // newest first: { job, picture, button }
const known = new Set();
let shown = -1; // which entry the dialog shows

// `actions`: again(job, picture) and start(job, picture).
export function setUpGallery(actions) {
  const viewer = $("viewer");
  const act = (action) => () => {
    const { job, picture } = entries[shown];
    viewer.close();
    action(job, picture);
  };
  $("viewer-again").onclick = act(actions.again);
  $("viewer-start").onclick = act(actions.start);
  $("viewer-newer").onclick = () => show(shown - 1);
  $("viewer-older").onclick = () => show(shown + 1);
  $("viewer-close").onclick = () => viewer.close();
  viewer.addEventListener("click", (event) => {
    if (event.target === viewer) viewer.close(); // beside the dialog
  });
  viewer.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") show(shown - 1);
    if (event.key === "ArrowRight") show(shown + 1);
  });
  $("viewer-image").onload = (event) => fitSmall(event.target, 512);
  $("result").onload = (event) => fitSmall(event.target, 400);
  $("result-open").onclick = () => open(entries.find(({ picture }) => picture.url === $("result-open").dataset.url));
}

// Adds the job's pictures that are not there yet; true when there were some.
export function addPictures(job) {
  const news = job.pictures.filter(({ number }) => !known.has(`${job.id}/${number}`));
  for (const picture of news) {
    known.add(`${job.id}/${picture.number}`);
    addPicture(job, picture);
  }
  $("gallery-box").hidden = !entries.length;
  return news.length > 0;
}

function addPicture(job, picture) {
  const image = make("img", { src: picture.url, alt: promptOf(picture), loading: "lazy", width: picture.width, height: picture.height });
  image.onload = () => image.classList.toggle("pixels", Math.max(image.naturalWidth, image.naturalHeight) < 200);
  const button = make("button", { type: "button", title: promptOf(picture) }, image);
  const entry = { job, picture, button };
  button.onclick = () => open(entry);
  $("gallery").prepend(make("li", {}, button));
  entries.unshift(entry);
  if (shown >= 0) show(shown + 1); // the dialog goes on showing the same
  showResult(job, picture);
}

// What the settings text says before its technical part: the prompt.
function promptOf({ parameters }) {
  return (parameters ?? "").split(/\n(?:Negative prompt|Steps):/)[0].trim() || "Picture";
}

export const latestSeed = () => entries[0]?.picture.seed;

function showResult(job, picture) {
  $("empty").hidden = true;
  $("shown").hidden = false;
  $("result").src = picture.url;
  $("result").alt = promptOf(picture);
  $("result-open").dataset.url = picture.url;
  $("caption").textContent = promptOf(picture);
  showNetworks(job);
}

// How the networks came, for the picture on show.
export function showNetworks(job) {
  if (entries[0] && entries[0].job.id !== job.id) return;
  const sentences = (job.networks ?? []).map(({ part, provider, origin, seconds }) => {
    const time = origin === "kept" || seconds == null ? "" : ` in ${seconds.toFixed(1)} s`;
    return `${part} ${origin}${time} on ${provider}`;
  });
  const drawn = job.seconds == null ? null : `drawn in ${job.seconds.toFixed(1)} s`;
  $("networks").textContent = [drawn, ...sentences].filter(Boolean).join(", ");
  $("networks").title = (job.networks ?? []).map(({ part, device, precision }) => `${part}: ${device}, ${precision}`).join("\n");
}

// ---- The dialog ----

function open(entry) {
  if (!entry) return;
  $("viewer").showModal();
  show(entries.indexOf(entry));
}

function show(index) {
  if (index < 0 || index >= entries.length) return;
  shown = index;
  const { picture } = entries[index];
  $("viewer-image").src = picture.url;
  $("viewer-image").alt = promptOf(picture);
  $("viewer-title").textContent = `${picture.width} × ${picture.height}, seed ${picture.seed}`;
  $("viewer-parameters").textContent = picture.parameters ?? "";
  $("viewer-save").href = picture.url;
  // The browser adds the ending that fits the file.
  $("viewer-save").download = `sdrun-${picture.seed}`;
  $("viewer-newer").disabled = index === 0;
  $("viewer-older").disabled = index === entries.length - 1;
}
