// Painting a mask over the start picture, by mouse, pen, touch or keys.
//
// What was painted is a list of strokes that can be drawn again; that makes
// undo simple and needs little memory even on large pictures.

// Stripes, because any one colour would be lost on a picture of that colour.
const STRIPES = ["#e5202b", "#ffffff"];

export class Mask {
  constructor(canvas, ring) {
    this.canvas = canvas;
    this.ring = ring;
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.strokes = [];
    this.stroke = null; // the stroke in work
    this.brush = 14; // diameter, as a percentage of the shorter side
    this.erasing = false;
    this.cursor = null; // where the keyboard's brush stands
    this.listen();
  }

  load(width, height) {
    this.canvas.width = width;
    this.canvas.height = height;
    this.cursor = { x: width / 2, y: height / 2 };
    this.stroke = null;
    this.strokes = [];
    this.paper = this.stripes(Math.max(1, Math.round(Math.max(width, height) / 64)));
  }

  // A pattern of diagonal stripes, `wide` pixels each.
  stripes(wide) {
    const tile = document.createElement("canvas");
    const side = tile.width = tile.height = wide * 4;
    const context = tile.getContext("2d");
    for (let x = 0; x < side; x += 1) {
      for (let y = 0; y < side; y += 1) {
        context.fillStyle = STRIPES[(x + y) % side < side / 2 ? 0 : 1];
        context.fillRect(x, y, 1, 1);
      }
    }
    return this.context.createPattern(tile, "repeat");
  }

  add(stroke) {
    this.strokes.push(stroke);
    this.paint(stroke);
  }

  undo() {
    this.strokes.pop();
    this.repaint();
  }

  // Clearing is a stroke too, so that it can be undone.
  clear() { this.add({ clear: true }); }
  invert() { this.add({ invert: true }); }

  repaint() {
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.strokes.forEach((stroke) => this.paint(stroke));
  }

  paint(stroke) {
    const { width, height } = this.canvas;
    const context = this.context;
    context.save();
    context.fillStyle = this.paper;
    if (stroke.clear) {
      context.clearRect(0, 0, width, height);
    } else if (stroke.invert) {
      context.globalCompositeOperation = "xor";
      context.fillRect(0, 0, width, height);
    } else if (stroke.image) {
      context.drawImage(stroke.image, 0, 0);
    } else {
      this.paintLine(stroke, 0);
    }
    context.restore();
  }

  // Paints a stroke's line from its point number `from` on.
  paintLine({ points, size, erase }, from) {
    const context = this.context;
    context.globalCompositeOperation = erase ? "destination-out" : "source-over";
    context.strokeStyle = this.paper;
    context.lineWidth = size;
    context.lineCap = context.lineJoin = "round";
    context.beginPath();
    const first = points[from];
    context.moveTo(first.x, first.y);
    // A line to the point itself draws a dot.
    points.slice(from).forEach(({ x, y }) => context.lineTo(x, y));
    context.stroke();
    context.globalCompositeOperation = "source-over";
  }

  // The mask as a PNG data URL, white where to draw anew, or null when
  // nothing is painted.
  toDataUrl() {
    const { width, height } = this.canvas;
    if (!this.strokes.length || !this.isPainted()) return null;
    const copy = Object.assign(document.createElement("canvas"), { width, height });
    const context = copy.getContext("2d");
    context.drawImage(this.canvas, 0, 0);
    context.globalCompositeOperation = "source-in";
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, height);
    context.globalCompositeOperation = "destination-over";
    context.fillStyle = "#000";
    context.fillRect(0, 0, width, height);
    return copy.toDataURL("image/png");
  }

  isPainted() {
    const { data } = this.context.getImageData(0, 0, this.canvas.width, this.canvas.height);
    for (let i = 3; i < data.length; i += 4) if (data[i] > 127) return true;
    return false;
  }

  // Takes a mask picture (white on black) that was sent before.
  fromImage(image) {
    const { width, height } = this.canvas;
    const copy = Object.assign(document.createElement("canvas"), { width, height });
    const context = copy.getContext("2d");
    context.drawImage(image, 0, 0, width, height);
    const pixels = context.getImageData(0, 0, width, height);
    for (let i = 0; i < pixels.data.length; i += 4) pixels.data[i + 3] = pixels.data[i];
    context.putImageData(pixels, 0, 0);
    context.globalCompositeOperation = "source-in";
    context.fillStyle = this.paper;
    context.fillRect(0, 0, width, height);
    this.add({ image: copy });
  }

  // ---- The hand ----

  get size() {
    return Math.max(1, (this.brush / 100) * Math.min(this.canvas.width, this.canvas.height));
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => this.lift());
    canvas.addEventListener("pointerleave", () => { this.ring.hidden = true; });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("keyup", (event) => { if (event.key === " ") this.lift(); });
    canvas.addEventListener("focus", () => { if (canvas.matches(":focus-visible")) this.showRing(this.cursor); });
    canvas.addEventListener("blur", () => { this.lift(); this.ring.hidden = true; });
  }

  // Where an event lies, in the picture's own pixels.
  point(event) {
    const box = this.canvas.getBoundingClientRect();
    return {
      x: ((event.clientX - box.left) / box.width) * this.canvas.width,
      y: ((event.clientY - box.top) / box.height) * this.canvas.height,
    };
  }

  down(event) {
    if (!event.isPrimary || event.button > 0 && event.button !== 5) return;
    // A made-up event (as in a test) has no pointer to capture.
    try { this.canvas.setPointerCapture(event.pointerId); } catch { /* paints all the same */ }
    const penEraser = (event.buttons & 32) !== 0;
    this.begin(this.point(event), this.erasing || penEraser);
    this.showRing(this.point(event));
  }

  move(event) {
    if (!event.isPrimary) return;
    this.showRing(this.point(event));
    if (!this.stroke) return;
    const events = event.getCoalescedEvents?.() ?? [];
    (events.length ? events : [event]).forEach((each) => this.extend(this.point(each)));
  }

  begin(point, erase) {
    this.stroke = { points: [point], size: this.size, erase };
    this.strokes.push(this.stroke);
    this.paintLine(this.stroke, 0);
  }

  extend(point) {
    this.stroke.points.push(point);
    this.paintLine(this.stroke, this.stroke.points.length - 2);
  }

  lift() { this.stroke = null; }

  // Arrows move the brush (faster with Shift); it paints while Space is held.
  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === " ") {
      event.preventDefault();
      if (!this.stroke) this.begin({ ...this.cursor }, this.erasing);
    } else if (moves[event.key]) {
      event.preventDefault();
      const far = this.size * (event.shiftKey ? 1 : 0.25);
      const [x, y] = moves[event.key];
      this.cursor.x = Math.min(this.canvas.width, Math.max(0, this.cursor.x + x * far));
      this.cursor.y = Math.min(this.canvas.height, Math.max(0, this.cursor.y + y * far));
      if (this.stroke) this.extend({ ...this.cursor });
    } else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") {
      event.preventDefault();
      this.undo();
    } else {
      return;
    }
    this.showRing(this.cursor);
  }

  // The ring shows the brush's place and size.
  showRing({ x, y }) {
    const scale = this.canvas.clientWidth / this.canvas.width;
    const { style } = this.ring;
    this.ring.hidden = false;
    style.width = style.height = `${Math.max(4, this.size * scale)}px`;
    style.left = `${x * scale}px`;
    style.top = `${y * scale}px`;
  }
}
