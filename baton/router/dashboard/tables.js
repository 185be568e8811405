// Goodput per context class, and what was decided when and why.
import { $, h, keep, say, width } from "./dom.js";
import { ago, count, percent, seconds } from "./format.js";

const COLUMNS = ["class", "req/s", "good/s", "SLO met", "TTFT p50", "TTFT p95", "TTFT p99", "TPOT p50", "TPOT p99", "waiting", "refused"];

const limit = (slo) => {
  const parts = [slo.ttft_s ? `TTFT ${seconds(slo.ttft_s)}` : "", slo.tpot_s ? `TPOT ${seconds(slo.tpot_s)}` : ""].filter(Boolean);
  return parts.length ? parts.join(", ") : "no SLO";
};

const makeClass = () =>
  h("tr", {}, COLUMNS.map((name, at) => h("td", { "data-name": name },
    at === 0 ? [h("span"), h("small")] : at === 3 ? h("span", { class: "met" }, h("span", { class: "track" }, h("i")), h("span")) : null)));

const updateClass = (row, one) => {
  const cells = row.children;
  const time = (name, which) => one.seconds[name]?.[which] ?? null;
  say(cells[0].children[0], one.name);
  say(cells[0].children[1], `${one.max_tokens ? `to ${count(one.max_tokens)} tokens` : "longer"} · ${limit(one.slo)}`);
  const [bar, share] = cells[3].firstChild.children;
  width(bar.firstChild, one.attainment ?? 0);
  bar.firstChild.className = one.attainment === null ? "" : one.attainment < 0.9 ? "fill-bad" : one.attainment < 0.99 ? "fill-warn" : "";
  say(share, percent(one.attainment));
  const set = (at, text, over = false) => {
    say(cells[at], text);
    cells[at].classList.toggle("over", over);
  };
  set(1, count(one.requests_per_s));
  set(2, count(one.goodput_per_s));
  [["ttft", "p50", 4], ["ttft", "p95", 5], ["ttft", "p99", 6], ["tpot", "p50", 7], ["tpot", "p99", 8]].forEach(([name, which, at]) => {
    const slo = one.slo[`${name}_s`];
    set(at, seconds(time(name, which)), Boolean(slo) && time(name, which) > slo);
  });
  set(9, count(one.waiting));
  set(10, count(one.refused), one.refused > 0);
};

export const showClasses = ({ classes }) => keep($("class-rows"), classes, (one) => one.name, makeClass, updateClass);

const ADAPTER_COLUMNS = ["adapter", "content", "tenant", "pinned", "on"];

export const showAdapters = ({ adapters = [], workers }) => {
  $("adapters").hidden = adapters.length === 0;
  keep($("adapter-rows"), adapters, (one) => one.name,
    () => h("tr", {}, ADAPTER_COLUMNS.map((name) => h("td", { "data-name": name }))),
    (row, one) => {
      const on = one.workers.length && one.workers.length === workers.length ? "every worker" : one.workers.join(", ") || "no worker";
      [one.name, one.adapter_id.split("@")[1] ?? "not read yet", one.tenant || "all", one.pinned ? "yes" : "", on]
        .forEach((text, at) => say(row.children[at], text));
    });
};

const VERBS = { hold: "Hold", advise: "Advice", rerole: "Role change", add: "Added", remove: "Removed", pin: "Pinned", unpin: "Unpinned", failed: "Failed" };

const LEFT = { drained: "drained and left", engine: "lost its engine", signal: "was killed", oom: "ran out of memory", exit: "ended", slot_lost: "lost its slot", lease_lost: "fell silent", replaced: "was replaced" };

const left = ({ worker_id, incarnation, cause, detail, at }) =>
  ({ at, kind: cause === "drained" ? "left" : "failed", headline: `${worker_id} ${LEFT[cause] ?? cause}`, reason: detail, seconds: 0, workers: [incarnation], by: "controller" });

const headline = (change) => {
  if (change.headline) return change.headline;
  const [before, after] = [change.before.join(":"), change.after.join(":")];
  const move = before === after ? ` at ${after}` : ` ${before} → ${after}`;
  return `${VERBS[change.kind] ?? change.kind}${move}`;
};

export const showTimeline = ({ decisions, departed = [], at }) => {
  const news = [...decisions, ...departed.map(left)].sort((a, b) => b.at - a.at);
  $("no-changes").hidden = news.length > 0;
  keep($("changes"), news, (change) => `${change.at} ${change.kind} ${change.seconds}`,
    (change) => h("li", { class: change.kind },
      h("p", { class: "what" }, headline(change)),
      h("p", { class: "why" }, change.reason),
      h("p", { class: "when" })),
    (row, change) => say(row.lastChild,
      [ago(change.at, at), change.seconds ? `took ${seconds(change.seconds)}` : "", change.workers.join(", "), change.by === "controller" ? "" : `by ${change.by}`].filter(Boolean).join(" · ")));
};
