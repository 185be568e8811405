// The ratio dial: goodput over every ratio as the twin sees the last traffic, and where the cluster is.
import { $, h, s } from "./dom.js";
import { ago, count, percent } from "./format.js";

const W = 380, H = 196, LEFT = 8, RIGHT = 372, TOP = 24, BOTTOM = 146;

const chart = (advice, here) => {
  const points = [...advice.goodput_by_ratio].sort((a, b) => a.prefill - b.prefill);
  if (points.length < 2) return null;
  const top = Math.max(...points.map((p) => p.goodput), 1e-9) * 1.08;
  const x = (i) => LEFT + 14 + (i / (points.length - 1)) * (RIGHT - LEFT - 28);
  const y = (goodput) => BOTTOM - (goodput / top) * (BOTTOM - TOP);
  const at = (prefill) => points.findIndex((p) => p.prefill === prefill);
  const path = points.map((p, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(p.goodput).toFixed(1)}`).join("");
  const [hereAt, bestAt] = [at(here[0]), advice.recommended ? at(advice.recommended[0]) : -1];
  const half = (RIGHT - LEFT - 28) / (points.length - 1) / 2;
  const plateau = advice.plateau && at(advice.plateau[0]) >= 0 && at(advice.plateau[1]) >= 0
    ? s("rect", { class: "plateau", x: x(at(advice.plateau[0])) - half, y: TOP - 10, rx: 4,
        width: x(at(advice.plateau[1])) - x(at(advice.plateau[0])) + 2 * half, height: BOTTOM - TOP + 10 }) : null;
  const step = Math.ceil(points.length / 9);
  const label = (i) => i % step === 0 || i === hereAt || i === bestAt;
  const clear = (i) => [hereAt, bestAt].every((j) => j < 0 || j === i || Math.abs(i - j) >= step);
  return s("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": describe(points, here, advice) },
    plateau,
    s("path", { class: "area", d: `${path}L${x(points.length - 1)} ${BOTTOM}L${x(0)} ${BOTTOM}Z` }),
    s("path", { class: "curve", d: path }),
    s("line", { class: "axis", x1: LEFT, x2: RIGHT, y1: BOTTOM, y2: BOTTOM }),
    hereAt >= 0 ? s("line", { class: "herelines", x1: x(hereAt), x2: x(hereAt), y1: TOP - 4, y2: BOTTOM }) : null,
    points.map((p, i) => s("circle", {
      class: `dot${i === hereAt ? " here" : ""}${i === bestAt ? " best" : ""}`, cx: x(i), cy: y(p.goodput), r: i === hereAt || i === bestAt ? 5 : 3,
    }, s("title", {}, `${p.prefill}:${p.decode}: ${count(p.goodput)} good req/s, ${percent(p.attainment)} met`))),
    hereAt >= 0 ? s("text", { class: "here", x: Math.min(Math.max(x(hereAt), 40), W - 44), y: TOP - 10, "text-anchor": "middle" }, "you are here") : null,
    points.map((p, i) => (label(i) && (clear(i) || i === hereAt || i === bestAt)
      ? s("text", { class: i === hereAt ? "here" : "", x: x(i), y: BOTTOM + 18, "text-anchor": "middle" }, `${p.prefill}:${p.decode}`) : null)),
    s("text", { x: LEFT, y: H - 6 }, "prefill : decode"),
    s("text", { x: RIGHT, y: H - 6, "text-anchor": "end" }, `best ${count(Math.max(...points.map((p) => p.goodput)))} good req/s`));
};

const describe = (points, here, advice) =>
  `Goodput by ratio: ${points.map((p) => `${p.prefill}:${p.decode} ${count(p.goodput)}`).join(", ")}. The cluster is at ${here.join(":")}` +
  (advice.recommended ? `; ${advice.recommended.join(":")} is the best now.` : ".");

const errors = (twin) => {
  const named = { ttft: "TTFT", tpot: "TPOT", throughput: "throughput" };
  const parts = Object.keys(named).filter((k) => twin[k] !== null && twin[k] !== undefined).map((k) => `${named[k]} ${percent(Math.abs(twin[k]))}`);
  return parts.length ? `${parts.join(", ")} off; bound ${percent(twin.bound)}, ${count(twin.samples)} requests` : "nothing compared yet";
};

const standing = ({ recommended, plateau }, here) => {
  if (recommended[0] === here[0] && recommended[1] === here[1]) return "This is the best. ";
  const alike = plateau && plateau[0] <= here[0] && here[0] <= plateau[1];
  return alike ? `As good now as ${recommended.join(":")}. ` : `Best now: ${recommended.join(":")}. `;
};

const verdict = (advice, here) => {
  if (advice.withheld) return h("p", { class: "verdict withheld" }, `No advice: ${advice.withheld}`);
  if (!advice.recommended) return h("p", { class: "verdict" }, advice.reason || "No advice yet.");
  return h("p", { class: "verdict" }, h("b", {}, standing(advice, here)), advice.reason);
};

let drawn = "";

export const showDial = ({ advice, pin, pools, at }) => {
  const here = [pools.prefill.ready, pools.decode.ready];
  const key = JSON.stringify([advice, pin, here, advice && Math.floor((at - advice.at) / 10)]);
  if (key === drawn) return;
  drawn = key;
  const ratio = h("p", { class: "now" },
    h("span", { class: "ratio" }, h("span", { class: "p" }, `${here[0]}`), " : ", h("span", { class: "d" }, `${here[1]}`)),
    h("span", { class: "hint" }, "prefill : decode", pin ? `, pinned to ${pin.prefill}:${pin.decode} by ${pin.by || "an operator"}` : ""));
  if (!advice) {
    $("dial").replaceChildren(ratio, h("p", { class: "empty" }, "No advice yet: the planner has not looked at this cluster's traffic, or it is off."));
    return;
  }
  const facts = h("dl", { class: "facts" },
    h("dt", {}, "planner"), h("dd", {}, `${advice.mode}, looked ${ago(advice.at, at)}`),
    advice.interval ? [h("dt", {}, "90% interval"), h("dd", {}, `${advice.interval[0]} to ${advice.interval[1]} prefill workers`)] : null,
    advice.plateau ? [h("dt", {}, "plateau"), h("dd", {}, `${advice.plateau[0]} to ${advice.plateau[1]} prefill workers`)] : null,
    advice.pressure ? [h("dt", {}, "load"), h("dd", {}, `prefill ${percent(advice.pressure[0])}, decode ${percent(advice.pressure[1])} of what fits`)] : null,
    h("dt", {}, "twin error"), h("dd", {}, errors(advice.twin_error)));
  $("dial").replaceChildren(...[ratio, chart(advice, here), verdict(advice, here), facts].filter(Boolean));
};
