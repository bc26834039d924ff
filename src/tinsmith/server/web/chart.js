// Curves on a canvas: several lines, zoom by dragging, values under the cursor.

import { h } from "./dom.js";
import { count, exact, number, tick } from "./format.js";
import { decimate, logTicks, stepTicks, ticks, valuesBetween } from "./series.js";

const LEFT = 52;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 20;
const GAP = 8;
const COLOURS = 8;
const LEAST_DRAG = 4;

/** What charts that belong together share: smoothing, scale, the part that is zoomed into, and the cursor. */
export class Group extends EventTarget {
  smoothing = 0;
  isLog = false;
  zoom = null;
  cursor = null;

  set(changes) {
    Object.assign(this, changes);
    this.dispatchEvent(new Event("change"));
  }
}

/** The colour of the line at this place, as CSS and as what tells it from the lines that have the same. */
export function colour(place) {
  return { css: `var(--line-${place % COLOURS})`, dash: place < COLOURS ? [] : [6, 3] };
}

/** `element` is to be put into the page; `lines` are {label, place, series}, and may change before each `draw`. */
export class Chart {
  lines = [];
  #drag = null;
  #isScheduled = false;
  #area = null;

  /** `least` and `most` are values that the chart always has room for. */
  constructor(title, group, signal, { height = 190, ...options } = {}) {
    this.title = title;
    this.group = group;
    this.options = { formatX: step, ticksX: stepTicks, formatY: number, formatTick: tick, ...options };
    this.canvas = h("canvas", { role: "img", tabindex: "0" });
    this.canvas.style.height = `${height}px`;
    this.readout = h("p", { class: "readout" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("h3", {}, title), this.readout), this.canvas);
    this.#listen(signal);
  }

  draw() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    requestAnimationFrame(() => {
      this.#isScheduled = false;
      this.#paint();
      this.#tell();
    });
  }

  #listen(signal) {
    const { canvas, group } = this;
    const on = (name, does) => canvas.addEventListener(name, does, { signal });
    on("pointermove", (event) => this.#moved(event));
    on("pointerleave", () => this.#drag ?? group.set({ cursor: null }));
    on("pointerdown", (event) => {
      if (event.button !== 0 || !this.#area) return;
      canvas.setPointerCapture(event.pointerId);
      this.#drag = { from: event.offsetX, to: event.offsetX };
    });
    on("pointerup", () => this.#dropped());
    on("pointercancel", () => { this.#drag = null; this.draw(); });
    on("dblclick", () => group.set({ zoom: null }));
    on("keydown", (event) => this.#key(event));
    on("blur", () => group.set({ cursor: null }));
    group.addEventListener("change", () => this.draw(), { signal });
    addEventListener("repaint", () => this.draw(), { signal });
    const observer = new ResizeObserver(() => this.draw());
    observer.observe(canvas);
    signal.addEventListener("abort", () => observer.disconnect());
  }

  #moved(event) {
    if (!this.#area) return;
    if (this.#drag) this.#drag.to = event.offsetX;
    this.group.set({ cursor: this.#area.toX(event.offsetX) });
  }

  #dropped() {
    const drag = this.#drag;
    this.#drag = null;
    if (!drag || Math.abs(drag.to - drag.from) < LEAST_DRAG) return;
    const zoom = [drag.from, drag.to].map(this.#area.toX).sort((a, b) => a - b);
    this.group.set({ zoom });
  }

  /** Arrows walk along the first line, Escape shows everything again. */
  #key(event) {
    const series = this.lines.find((line) => line.series.length)?.series;
    if (!series) return;
    if (event.key === "Escape") return this.group.set({ zoom: null, cursor: null });
    const last = series.length - 1;
    const now = this.group.cursor === null ? last : series.nearest(this.group.cursor);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.group.set({ cursor: series.xs[Math.min(last, Math.max(0, next))] });
  }

  /** In words: for the line above the chart, and for those who cannot see it. */
  #tell() {
    const { cursor } = this.group;
    const parts = [];
    const said = [];
    for (const { label, place, series } of this.lines) {
      if (!series.length) continue;
      const at = cursor === null ? series.length - 1 : series.nearest(cursor);
      const value = cursor === null ? this.options.formatY(series.ys[at]) : this.#exactly(series, at);
      const swatch = h("i", { class: "swatch" });
      swatch.style.background = colour(place).css;
      parts.push(h("span", {}, this.lines.length > 1 ? swatch : null, value));
      said.push(`${label} ${value} at ${this.options.formatX(series.xs[at])}`);
    }
    const where = cursor === null ? null : h("span", { class: "where" }, this.options.formatX(this.#nearestX(cursor)));
    this.readout.replaceChildren(...[where, ...parts].filter(Boolean));
    this.canvas.setAttribute("aria-label", `${this.title}: ${said.join(", ") || "no values yet"}`);
  }

  #exactly(series, at) {
    const { smoothing } = this.group;
    const value = exact(series.ys[at]);
    return smoothing === 0 ? value : `${value} (${number(series.smoothed(smoothing)[at])})`;
  }

  #nearestX(cursor) {
    const series = this.lines.find((line) => line.series.length)?.series;
    return series ? series.xs[series.nearest(cursor)] : cursor;
  }

  // --- painting ------------------------------------------------------------------------------------------------------

  #paint() {
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const ratio = devicePixelRatio || 1;
    if (!width || !canvas.isConnected) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = `11px ${getComputedStyle(canvas).fontFamily}`;
    const drawn = this.#visible(width - LEFT - RIGHT);
    this.#area = drawn.length ? this.#measure(drawn, width, height) : null;
    if (!this.#area) return;
    this.#grid(pen, width, height);
    this.#curves(pen, drawn, width, height);
    this.#cursor(pen, height);
  }

  /** The first and the last x that any line has. */
  #extent() {
    const full = this.lines.filter((line) => line.series.length);
    const from = Math.min(...full.map(({ series }) => series.xs[0]));
    const to = Math.max(...full.map(({ series }) => series.xs.at(-1)));
    return [from, to];
  }

  #range() {
    if (this.group.zoom) return this.group.zoom;
    const [from, to] = this.#extent();
    return from === to ? [from - 0.5, to + 0.5] : [from, to];
  }

  /** What is to be drawn of each line, as it is and smoothed: few of its points for each pixel. */
  #visible(columns) {
    const [from, to] = this.#range();
    const { smoothing, isLog } = this.group;
    const drawn = [];
    for (const line of this.lines) {
      const { xs, ys } = line.series;
      const points = (values) => decimate(xs, values, from, to, columns)
        .map((place) => [xs[place], values[place]])
        .filter(([, y]) => !isLog || y > 0);
      const raw = points(ys);
      const smooth = smoothing === 0 ? [] : points(line.series.smoothed(smoothing));
      if (raw.length || smooth.length) drawn.push({ ...line, raw, smooth });
    }
    return drawn;
  }

  /** The lowest and the highest of all that is seen, and of what there is always room for; on the scale. */
  #bounds(drawn, from, to, scale) {
    const scaled = (points) => points.map(([x, y]) => [x, scale(y)]);
    const lines = drawn.flatMap(({ raw, smooth }) => [scaled(raw), scaled(smooth)]);
    const seen = lines.flatMap((points) => valuesBetween(points, from, to));
    const near = lines.flat().map(([, y]) => y); // for a part that has no line in it
    const always = [this.options.least, this.options.most].filter((y) => y !== undefined).map(scale);
    const values = [...(seen.length ? seen : near), ...always];
    return [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  }

  #measure(drawn, width, height) {
    const [from, to] = this.#range();
    const { isLog } = this.group;
    const scale = isLog ? Math.log : (y) => y;
    const [low, high] = this.#bounds(drawn, from, to, scale);
    const spare = (high - low) * 0.05 || (isLog ? 0.1 : Math.abs(high) * 0.05 || 0.5);
    const bottom = low === this.options.least && !isLog ? low : low - spare; // nothing is below the least
    const top = high + spare;
    const [plotWidth, plotHeight] = [width - LEFT - RIGHT, height - TOP - BOTTOM];
    return {
      from, to,
      low: isLog ? Math.exp(bottom) : bottom,
      high: isLog ? Math.exp(top) : top,
      x: (value) => LEFT + ((value - from) / (to - from)) * plotWidth,
      y: (value) => TOP + (1 - (scale(value) - bottom) / (top - bottom)) * plotHeight,
      toX: (pixel) => from + (Math.min(plotWidth, Math.max(0, pixel - LEFT)) / plotWidth) * (to - from),
    };
  }

  #grid(pen, width, height) {
    const { low, high, x, y } = this.#area;
    const [text, line] = ["--muted", "--hairline"].map((name) => this.#ink(`var(${name})`));
    pen.strokeStyle = line;
    pen.fillStyle = text;
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const rows = Math.max(3, Math.round((height - TOP - BOTTOM) / 40));
    for (const mark of this.group.isLog ? logTicks(low, high, rows) : ticks(low, high, rows)) {
      const at = Math.round(y(mark)) + 0.5;
      stroke(pen, [[LEFT, at], [width - RIGHT, at]]);
      pen.fillText(this.options.formatTick(mark), LEFT - 6, at);
    }
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    let [last, end] = ["", -Infinity];
    for (const mark of this.#marksX(width)) {
      const text = this.options.formatX(mark);
      const half = pen.measureText(text).width / 2;
      const at = Math.min(width - half - 2, x(mark));
      if (text === last || at - half < end) continue; // finer than what it is rounded to, or no room
      [last, end] = [text, at + half + GAP];
      pen.fillText(text, at, height - 5);
    }
  }

  /** Where the x axis has labels. A point that is alone has its own: round numbers may all be far from it. */
  #marksX(width) {
    const [first, last] = this.#extent();
    if (first === last && !this.group.zoom) return [first];
    const { from, to } = this.#area;
    return this.options.ticksX(from, to, Math.max(2, Math.round((width - LEFT) / 90)));
  }

  #curves(pen, drawn, width, height) {
    const { x, y } = this.#area;
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT - RIGHT, height - BOTTOM + 1);
    pen.clip();
    pen.lineJoin = "round";
    const isSmooth = this.group.smoothing !== 0;
    const trace = (points) => stroke(pen, points.map(([at, value]) => [x(at), y(value)]));
    for (const { series, place, raw, smooth } of drawn) {
      const { css, dash } = colour(place);
      pen.strokeStyle = pen.fillStyle = this.#ink(css);
      pen.setLineDash(dash);
      pen.globalAlpha = isSmooth ? 0.25 : 1;
      pen.lineWidth = isSmooth ? 1 : 1.25;
      trace(raw);
      pen.globalAlpha = 1;
      pen.lineWidth = 1.75;
      if (isSmooth) trace(smooth);
      if (series.length === 1) dot(pen, x(series.xs[0]), y(series.ys[0]));
    }
    pen.restore();
  }

  #cursor(pen, height) {
    const { from, to, x, y } = this.#area;
    if (this.#drag) {
      const [left, right] = [this.#drag.from, this.#drag.to].map((at) => x(this.#area.toX(at))).sort((a, b) => a - b);
      pen.fillStyle = this.#ink("var(--selection)");
      pen.fillRect(left, TOP, right - left, height - TOP - BOTTOM);
    }
    const { cursor } = this.group;
    if (cursor === null || cursor < from || cursor > to) return;
    const at = this.#nearestX(cursor);
    pen.strokeStyle = this.#ink("var(--muted)");
    stroke(pen, [[x(at), TOP], [x(at), height - BOTTOM]]);
    for (const { series, place } of this.lines) {
      if (!series.length) continue;
      const near = series.nearest(cursor);
      if (this.group.isLog && series.ys[near] <= 0) continue;
      pen.fillStyle = this.#ink(colour(place).css);
      dot(pen, x(series.xs[near]), y(series.ys[near]));
    }
  }

  /** A colour of the stylesheet as the canvas understands it, in the theme of this moment. */
  #ink(css) {
    this.canvas.style.color = css;
    return getComputedStyle(this.canvas).color;
  }
}

function step(x) {
  return count(Math.round(x));
}

function stroke(pen, points) {
  pen.beginPath();
  for (const [x, y] of points) pen.lineTo(x, y);
  pen.stroke();
}

function dot(pen, x, y) {
  pen.beginPath();
  pen.arc(x, y, 3, 0, 7);
  pen.fill();
}
