// Small helpers that all parts of the page share.

export const $ = (id) => document.getElementById(id);

// Makes an element. Text always goes in as text, never as HTML, because
// prompts and file names come from outside.
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Shows a picture at a sensible size: one smaller than 200 pixels grows by a
// whole factor, so that its pixels stay square.
export function fitSmall(image, room, crisp = true) {
  const side = Math.max(image.naturalWidth, image.naturalHeight);
  const small = side > 0 && side < 200;
  image.classList.toggle("pixels", small && crisp);
  image.style.width = small ? `${image.naturalWidth * Math.max(1, Math.floor(room / side))}px` : "";
}

// ---- Messages near the Draw button ----

const messages = new Map();

// Each matter (the job, the server, ...) has one message; saying the same
// again changes nothing, so that a screen reader does not repeat it.
export function say(matter, kind, sentences, action = null) {
  const text = sentences.filter(Boolean).join("\n");
  if (!text) return hush(matter);
  const old = messages.get(matter);
  if (old && old.text === text && old.kind === kind) return;
  messages.set(matter, { kind, text, action });
  showMessages();
}

export function hush(matter) {
  if (messages.delete(matter)) showMessages();
}

// An error from the API, as sentences.
export function sayError(matter, error, action = null) {
  if (!error.code) console.error(error);
  say(matter, "error", [error.message, error.hint], action);
}

function showMessages() {
  $("message").replaceChildren(...[...messages].map(([matter, { kind, text, action }]) => {
    const lines = make("div", { className: "text" }, ...text.split("\n").map((line) => make("p", { textContent: line })));
    const button = action
      ? make("button", { type: "button", textContent: action.label, onclick: action.run })
      : make("button", { type: "button", textContent: "Dismiss", onclick: () => hush(matter) });
    return make("div", { className: kind }, lines, button);
  }));
}

// Tells a screen reader, without a visible change and without interrupting.
export function announce(text) {
  $("announcer").textContent = text;
}

// ---- Files ----

export function readAsDataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The browser cannot read this file."));
    reader.readAsDataURL(blob);
  });
}

// A file input with a drop zone around it; `take` gets the file.
export function fileZone(input, zone, take) {
  input.addEventListener("change", () => {
    if (input.files[0]) take(input.files[0]);
    input.value = ""; // so that the same file can be chosen again
  });
  zone.addEventListener("dragover", (event) => {
    event.preventDefault();
    zone.classList.add("over");
  });
  zone.addEventListener("dragleave", (event) => {
    if (!zone.contains(event.relatedTarget)) zone.classList.remove("over");
  });
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    const file = event.dataTransfer.files[0];
    if (file) take(file);
  });
}
