// The figures on top: what an operator looks at first.
import { $, h, keep, s, say } from "./dom.js";
import { NONE, count, dollars, percent, seconds } from "./format.js";

const KEPT = 90;
const past = new Map();

const split = (text) => {
  const [value, unit = ""] = text.split(" ");
  return [value, unit];
};

const attained = (share) => (share === null ? "" : share < 0.9 ? "bad" : share < 0.99 ? "warn" : "");

const figuresOf = ({ totals: t, classes, queues, window_s }) => {
  const time = (name, which) => t.seconds[name]?.[which] ?? null;
  const waiting = queues.reduce((sum, queue) => sum + queue.waiting, 0);
  const named = classes.some((one) => one.slo.ttft_s || one.slo.tpot_s);
  const found = [
    {
      name: "Goodput", value: t.goodput_per_s ?? (named ? 0 : null), unit: "req/s",
      more: t.attainment === null ? (named ? "nothing judged yet" : "no SLO is set") : `${percent(t.attainment)} met every SLO`,
      tone: attained(t.attainment),
    },
    {
      name: "Requests", value: t.requests_per_s, unit: "req/s",
      more: `${waiting} waiting, ${count(t.refused_per_s)}/s refused`, tone: t.refused_per_s > 0 ? "warn" : "",
    },
    { name: "Time to first token", time: time("ttft", "p50"), more: `p99 ${seconds(time("ttft", "p99"))}` },
    { name: "Time per token", time: time("tpot", "p50"), more: `p99 ${seconds(time("tpot", "p99"))}` },
    { name: "Tokens out", value: t.output_tokens_per_s, unit: "/s", more: `${count(t.input_tokens_per_s)}/s in` },
    { name: "Prefix hits", share: t.hit_rate, more: `best possible ${percent(t.hit_rate_best)}` },
  ];
  if (t.cost) {
    found.push({
      name: "Cost per 1M tokens", money: t.cost.per_million,
      more: t.cost.per_million_input === null ? `${dollars(t.cost.dollars_per_hour)} an hour`
        : `in ${dollars(t.cost.per_million_input)} · out ${dollars(t.cost.per_million_output)}`,
    });
  }
  $("figures").setAttribute("aria-label", `Figures of the last ${Math.round(window_s)} seconds`);
  return found;
};

const shown = (figure) => {
  if ("time" in figure) return [figure.time, ...split(seconds(figure.time))];
  if ("share" in figure) return [figure.share, percent(figure.share), ""];
  if ("money" in figure) return [figure.money, dollars(figure.money), ""];
  return [figure.value, count(figure.value), figure.value === null ? "" : figure.unit];
};

const line = (name, value) => {
  const values = past.get(name) ?? [];
  values.push(value ?? null);
  if (values.length > KEPT) values.shift();
  past.set(name, values);
  const span = Math.max(24, values.length) - 1;
  if (values.length < 4) return "";
  const top = Math.max(...values.map((v) => v ?? 0), 1e-9);
  let path = "";
  values.forEach((v, i) => {
    if (v === null) return;
    const started = path && values[i - 1] !== null;
    path += `${started ? "L" : "M"}${((i + span + 1 - values.length) / span) * 100} ${21 - (v / top) * 19}`;
  });
  return path;
};

const make = () =>
  h("div", { class: "figure" },
    h("p", { class: "name" }),
    h("p", { class: "value" }, h("span"), h("span", { class: "unit" })),
    h("p", { class: "more" }),
    s("svg", { viewBox: "0 0 100 22", preserveAspectRatio: "none", "aria-hidden": "true" }, s("path", { class: "spark" })));

const update = (node, figure) => {
  const [name, value, more, chart] = node.children;
  const [number, text, unit] = shown(figure);
  say(name, figure.name);
  say(value.children[0], text || NONE);
  say(value.children[1], unit);
  say(more, figure.more);
  node.dataset.tone = figure.tone ?? "";
  chart.firstChild.setAttribute("d", line(figure.name, number));
};

export const showFigures = (snapshot) => keep($("figures"), figuresOf(snapshot), (f) => f.name, make, update);
