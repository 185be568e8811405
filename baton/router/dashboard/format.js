// Numbers as people read them. A figure that isn't known is a dash.
export const NONE = "–";

export const seconds = (value) => {
  if (value === null || value === undefined) return NONE;
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 99.5 ? `${value.toFixed(value < 9.995 ? 2 : 1)} s` : `${Math.round(value)} s`;
};

export const count = (value) => {
  if (value === null || value === undefined) return NONE;
  if (value >= 999500) return `${(value / 1e6).toFixed(value < 9.95e6 ? 2 : 1)}M`;
  if (value >= 9995) return `${(value / 1e3).toFixed(value < 99950 ? 1 : 0)}k`;
  if (value >= 100 || value === Math.round(value)) return `${Math.round(value)}`;
  return value.toFixed(value < 9.95 ? 2 : 1);
};

export const percent = (value) => {
  if (value === null || value === undefined) return NONE;
  return `${(value * 100).toFixed(value > 0.9949 && value < 1 ? 2 : value < 0.0995 && value > 0 ? 1 : 0)}%`;
};

export const bytes = (value) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${value.toFixed(value < 9.95 && at ? 1 : 0)} ${units[at]}`;
};

export const dollars = (value) =>
  value === null || value === undefined ? NONE : `$${value < 0.995 ? value.toFixed(3) : value.toFixed(2)}`;

export const ago = (at, now) => {
  const past = Math.max(0, now - at);
  if (past < 60) return `${Math.round(past)} s ago`;
  if (past < 3600) return `${Math.round(past / 60)} min ago`;
  return new Date(at * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
};

export const duration = (value) => {
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${Math.round(value / 86400)} days`;
};
