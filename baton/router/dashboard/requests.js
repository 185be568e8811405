// Recent requests, newest first: where the time to the first token went, and the step after it.
import { $, h, keep, say, width } from "./dom.js";
import { count, seconds } from "./format.js";

const STATIONS = ["queue", "prefill_queue", "prefill", "transfer", "first_decode"];
const NAMES = { queue: "queue (router)", prefill_queue: "queue (worker)", prefill: "prefill", transfer: "exposed transfer", first_decode: "first decode", other: "rest" };
const SHOWN = 24;

// What follows the first token (transfer, first decode) comes after it; what is unnamed before it is the rest.
export const parts = (request) => {
  const found = STATIONS.map((name) => [name, request.stations[name] ?? 0]);
  const before = found.slice(0, 3).reduce((sum, [, value]) => sum + value, 0);
  const after = request.stations.first_decode ? Math.max(0, request.stations.first_decode - (request.stations.transfer ?? 0)) : 0;
  const rest = Math.max(0, (request.ttft_s ?? 0) - before);
  return [...found.slice(0, 3), ["other", rest], ["transfer", request.stations.transfer ?? 0], ["first_decode", after]].filter(([, value]) => value > 0);
};

const total = (request) => parts(request).reduce((sum, [, value]) => sum + value, 0);

const make = (open) => (request) =>
  h("li", {}, h("button", { class: "request", type: "button", onclick: () => open(request.request_id) },
    h("span", { class: "id" }), h("span", { class: "cls" }), h("span", { class: "bar" }), h("span", { class: "time" }), h("span", { class: "end" })));

const update = (scale) => (row, request) => {
  const node = row.firstChild;
  const [id, cls, bar, time, end] = node.children;
  node.className = `request ${request.verdict}`;
  say(id, request.request_id.slice(0, 8));
  say(cls, request.adapter ? `${request.context_class} · ${request.adapter}` : request.context_class);
  const pieces = parts(request).map(([name, value]) => {
    const piece = h("i", { class: `s-${name}`, title: `${NAMES[name]} ${seconds(value)}` });
    width(piece, value / scale);
    return piece;
  });
  if (request.slo_ttft_s && request.slo_ttft_s <= scale) {
    const mark = h("span", { class: "slo", title: `TTFT SLO ${seconds(request.slo_ttft_s)}` });
    mark.style.left = `${(request.slo_ttft_s / scale) * 100}%`;
    pieces.push(mark);
  }
  bar.replaceChildren(...pieces);
  say(time, seconds(request.ttft_s));
  say(end, request.output_tokens ? `${count(request.output_tokens)} tok` : request.outcome);
  node.setAttribute("aria-label",
    `${request.context_class} request, first token after ${seconds(request.ttft_s)}: ${parts(request).map(([name, value]) => `${NAMES[name]} ${seconds(value)}`).join(", ")}. ${request.outcome}. Explain.`);
};

export const showRequests = ({ recent }, open) => {
  const shown = recent.slice(0, SHOWN);
  const list = $("waterfall");
  const paused = list.matches(":hover"); // what is under the pointer stays where it is
  $("paused").hidden = !paused;
  if (paused) return;
  if (!$("legend").firstChild) {
    const order = ["queue", "prefill_queue", "prefill", "other", "transfer", "first_decode"];
    $("legend").append(...order.map((name) => h("span", { class: `s-${name}` }, NAMES[name])));
  }
  $("no-requests").hidden = shown.length > 0;
  $("legend").hidden = shown.length === 0;
  const scale = Math.max(1e-3, ...shown.map(total)) * 1.02;
  keep(list, shown, (request) => `${request.request_id} ${request.at}`, make(open), update(scale));
};
