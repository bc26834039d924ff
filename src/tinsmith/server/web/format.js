// Numbers and times as people read them, always of the same width where they stand in columns.

const MINUS = "\u2212";

/** Four significant digits; very large and very small numbers as powers of ten. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  let text;
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) text = power(size, 3);
  else if (Number.isInteger(value)) text = count(size);
  else text = size >= 1000 ? count(Math.round(size)) : size.toPrecision(4);
  return value < 0 ? MINUS + text : text;
}

/** All digits that mean something: what hovering is for. */
export function exact(value) {
  return digits(value, 9);
}

/** As short as it can be: what stands beside an axis is round. */
export function tick(value) {
  return digits(value, 6);
}

function digits(value, most) {
  const size = Math.abs(value);
  const isFar = size !== 0 && (size < 1e-3 || size >= 1e6);
  const short = Number(value.toPrecision(most));
  const text = isFar ? power(short) : short.toLocaleString("en-US", { maximumSignificantDigits: most });
  return text.replaceAll("-", MINUS);
}

function power(value, decimals) {
  return value.toExponential(decimals).replace("e+", "e").replace("e-", `e${MINUS}`);
}

export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US");
}

/** How many there are of a thing whose plural ends in s. */
export function counted(amount, thing) {
  return `${count(amount)} ${thing}${amount === 1 ? "" : "s"}`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

/** In the units of the command line. */
export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (size >= 1024 && power < units.length - 1) [size, power] = [size / 1024, power + 1];
  return `${power ? size.toFixed(1) : size} ${units[power]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 100) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** Seconds since 1970 as a local date and time. */
export function moment(seconds) {
  const date = new Date(seconds * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export function clock(seconds) {
  const date = new Date(seconds * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

/** The short beginning of a session's id, and which of its runs this is. */
export function runName(runId) {
  const [session, , place] = runId.split(":");
  return place === undefined ? runId : `${session.slice(0, 8)}:${place}`;
}
