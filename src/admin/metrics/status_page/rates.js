// Rates from totals, and numbers as text.

/** Points of a line of the gateway: 90 of 2 s are 3 minutes. */
const HISTORY = 90;

/** The last two readings of every counter. */
class Rates {
  constructor() {
    this.counters = new Map();
    this.round = 0;
  }

  /** Forgets everything: another gateway answers, or this one began again. */
  clear() {
    this.counters.clear();
  }

  /** What was not asked for in a minute is forgotten, so that a long search does not fill memory. */
  next() {
    this.round += 1;
    for (const [key, entry] of this.counters) if (this.round - entry.round > 30) this.counters.delete(key);
  }

  /** Units a second of a total read at `ms`; null if unknown: the first time, or after the counter began again. */
  of(key, total, ms) {
    let entry = this.counters.get(key);
    if (!entry) {
      entry = { total, ms, rate: null };
      this.counters.set(key, entry);
    } else if (ms > entry.ms) {
      const rate = (total - entry.total) * 1000 / (ms - entry.ms);
      Object.assign(entry, { total, ms, rate: rate >= 0 ? rate : null });
    }
    entry.round = this.round;
    return entry.rate;
  }
}

const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** Three digits and a unit with prefix, as two texts. */
function scaled(value, unit) {
  if (value === null) return ["–", unit];
  const [size, prefix] = PREFIXES.find(([size]) => value >= size * 0.9995) || [1, ""];
  const shown = value / size;
  const digits = prefix === "" ? (shown < 10 && shown % 1 >= 0.05 ? 1 : 0) : shown < 9.995 ? 2 : shown < 99.95 ? 1 : 0;
  return [shown.toFixed(digits), prefix + unit];
}

const joined = ([number, unit]) => `${number} ${unit}`;
const packets = (rate) => joined(scaled(rate, "pps"));
const bits = (rate) => joined(scaled(rate === null ? null : rate * 8, "bit/s"));
const perSecond = (rate) => rate === null ? "–" : scaled(rate, "").join(" ").trim() + "/s";
const whole = (number) => number.toLocaleString("en");
const count = (number, one, many) => `${whole(number)} ${number === 1 ? one : many}`;
const percent = (share) => share === null ? "–" : `${(share * 100).toFixed(share < 0.0995 ? 1 : 0)} %`;
const sum = (a, b) => a === null || b === null ? null : a + b;

function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds % 86400 / 3600)} h`;
}
