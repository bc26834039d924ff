// The arithmetic of curves; nothing here draws.

/** A curve that grows: x ascending, y finite. */
export class Series {
  xs = [];
  ys = [];
  #smooth = { weight: 0, length: 0, ys: this.ys };

  /** Rows are [step, time, value]. What is no number is left out; a script may log a step that was before others. */
  append(rows) {
    for (const [step, , value] of rows) {
      if (!Number.isFinite(value)) continue;
      const at = step >= (this.xs.at(-1) ?? step) ? this.length : firstAtLeast(this.xs, step);
      this.xs.splice(at, 0, step);
      this.ys.splice(at, 0, value);
    }
  }

  /** Forget the oldest, so that no more than `most` points are left. */
  keepLast(most) {
    const many = Math.max(0, this.length - most);
    this.xs.splice(0, many);
    this.ys.splice(0, many);
    if (many) this.#smooth = { weight: 0, length: 0, ys: this.ys };
  }

  get length() {
    return this.xs.length;
  }

  smoothed(weight) {
    if (weight === 0) return this.ys;
    if (this.#smooth.weight !== weight || this.#smooth.length !== this.length) {
      this.#smooth = { weight, length: this.length, ys: smooth(this.ys, weight) };
    }
    return this.#smooth.ys;
  }

  /** The place of the point nearest to `x`. */
  nearest(x) {
    const after = Math.min(firstAtLeast(this.xs, x), this.length - 1);
    const before = Math.max(0, after - 1);
    return Math.abs(this.xs[before] - x) <= Math.abs(this.xs[after] - x) ? before : after;
  }
}

/** Exponential moving average. Divided by the weight it has gathered, so that it does not start at zero. */
export function smooth(ys, weight) {
  const result = new Array(ys.length);
  let sum = 0;
  let gathered = 0;
  for (let i = 0; i < ys.length; i++) {
    sum = weight * sum + (1 - weight) * ys[i];
    gathered = weight * gathered + (1 - weight);
    result[i] = sum / gathered;
  }
  return result;
}

/** The place of the first x that is not below `bound`. */
export function firstAtLeast(xs, bound) {
  let low = 0;
  let high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < bound) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * The places of the points that a line from `from` to `to`, `columns` pixels wide, has to go through to look the same:
 * of each column the first, the lowest, the highest and the last, and one neighbour on either side.
 */
export function decimate(xs, ys, from, to, columns) {
  const start = Math.max(0, firstAtLeast(xs, from) - 1);
  const places = [];
  const perColumn = columns / (to - from || 1);
  let i = start;
  while (i < xs.length) {
    const column = Math.floor((xs[i] - from) * perColumn);
    const first = i;
    let lowest = i;
    let highest = i;
    while (i < xs.length && Math.floor((xs[i] - from) * perColumn) === column) {
      if (ys[i] < ys[lowest]) lowest = i;
      if (ys[i] > ys[highest]) highest = i;
      i++;
    }
    for (const place of [first, Math.min(lowest, highest), Math.max(lowest, highest), i - 1]) {
      if (places.at(-1) !== place) places.push(place);
    }
    if (xs[i - 1] > to) break;
  }
  return places;
}

/**
 * The values of a line between `from` and `to`: those of its points, and those that it has where it comes in and goes
 * out. `points` are [x, y], x ascending, with one on either side if there is any.
 */
export function valuesBetween(points, from, to) {
  const values = points.filter(([x]) => x >= from && x <= to).map(([, y]) => y);
  for (const edge of [from, to]) {
    const after = points.findIndex(([x]) => x > edge);
    if (after > 0) values.push(interpolated(points[after - 1], points[after], edge));
  }
  return values;
}

function interpolated([x, y], [nextX, nextY], at) {
  return y + ((at - x) / (nextX - x)) * (nextY - y);
}

/** About `wanted` round numbers from low to high, no nearer to each other than `least`. */
export function ticks(low, high, wanted, least = 0) {
  const rough = Math.max(least, (high - low) / Math.max(1, wanted));
  const power = 10 ** Math.floor(Math.log10(rough));
  return multiples(low, high, power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10));
}

/** The same of steps, which are whole. */
export function stepTicks(low, high, wanted) {
  return ticks(low, high, wanted, 1);
}

/** The same of seconds since 1970, round as clocks are. */
export function clockTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800].find((seconds) => seconds >= rough);
  return step === undefined ? ticks(low, high, wanted) : multiples(low, high, step);
}

function multiples(low, high, step) {
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) result.push(i * step || 0); // not -0
  return result;
}

/** Powers of ten from low to high, with 2 and 5 between them if there is room; positive bounds. */
export function logTicks(low, high, wanted) {
  const decades = Math.log10(high / low);
  if (decades < 1) return ticks(low, high, wanted);
  const every = Math.max(1, Math.ceil(decades / wanted));
  const result = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
    if (power % every) continue;
    for (const factor of decades * 3 <= wanted ? [1, 2, 5] : [1]) result.push(factor * 10 ** power);
  }
  return result.filter((tick) => tick >= low && tick <= high);
}
