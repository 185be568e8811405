// The cluster as a picture: router and queues, the two pools, and KV on its way from one to the other.
import { $, h, keep, s, say, width } from "./dom.js";
import { bytes, count, percent } from "./format.js";

const AWAY = { standby: "drained", draining: "draining", starting: "starting", stalled: "stalled" };

const gauge = (name) =>
  h("span", { class: "gauge" }, h("span", {}, name), h("span", { class: "track" }, h("i"), h("i")), h("span"));

const makeWorker = (worker, open) =>
  h("button", { class: `node ${worker.role}`, type: "button", onclick: () => open(worker.id) },
    h("span", { class: "top" }, h("span", { class: "id" }), h("span", { class: "rate" })),
    gauge("KV"), gauge("full"), h("p", { class: "say" }));

const tone = (share) => (share > 0.97 ? " fill-bad" : share > 0.9 ? " fill-warn" : "");

const updateWorker = (node, worker) => {
  const [top, kv, full, text] = node.children;
  const away = !worker.up ? "unreachable" : worker.hold?.how === "eject" ? "ejected" : AWAY[worker.state] ?? "";
  node.className = `node ${worker.role}${away ? " away" : ""}`;
  say(top.children[0], worker.id);
  const rate = worker.role === "prefill" ? worker.prefill_tokens_per_s : worker.decode_tokens_per_s + worker.prefill_tokens_per_s;
  const right = top.children[1];
  right.className = away ? `tag${worker.up ? "" : " bad"}` : "rate";
  say(right, away || `${count(Math.round(rate))} tok/s`);
  const [used, cached] = kv.children[1].children;
  width(used, worker.kv_usage);
  used.className = `fill-kv${tone(worker.kv_usage)}`;
  width(cached, worker.pages.cached / Math.max(1, worker.pages.total));
  cached.className = "fill-cached";
  say(kv.children[2], percent(worker.kv_usage));
  width(full.children[1].children[0], worker.full || 0);
  full.children[1].children[0].className = "fill-full";
  say(full.children[2], percent(worker.full));
  say(text, `${worker.running} run · ${worker.waiting} wait`);
  node.setAttribute("aria-label",
    `${worker.id}, ${away || "ready"}, KV ${percent(worker.kv_usage)}, full ${percent(worker.full)}, ${worker.running} running, ${worker.waiting} waiting`);
};

const poolName = (column, title, pool) => {
  if (!column._first) {
    column._first = h("p", { class: "pool-name" }, h("b"), h("span"));
    column.prepend(column._first);
  }
  const [name, more] = column._first.children;
  say(name, `${title} ${pool.ready}${pool.ready === pool.workers ? "" : ` of ${pool.workers}`}`);
  say(more, pool.workers ? `KV ${percent(pool.kv_usage)} · ${percent(pool.full)} full` : "none");
};

const showRouter = ({ router, queues, totals }) => {
  const column = $("router");
  if (!column.firstChild) {
    column.append(h("div", { class: "node router" },
      h("p", { class: "top" }, h("span", { class: "id" }, "router"), h("span", { class: "rate" })),
      h("div", { class: "queues" }), h("p", { class: "say" })));
  }
  const [top, list, text] = column.firstChild.children;
  say(top.children[1], `${count(totals.requests_per_s)} req/s`);
  const most = Math.max(8, ...queues.map((queue) => queue.waiting));
  keep(list, queues, (queue) => queue.class,
    () => h("p", { class: "queue" }, h("span"), h("span", { class: "track" }, h("i")), h("b")),
    (row, queue) => {
      say(row.children[0], queue.class);
      width(row.children[1].firstChild, queue.waiting / most);
      say(row.children[2], `${queue.waiting}`);
    });
  const many = router.processes > 1 ? ` · ${router.processes} processes` : "";
  say(text, `${router.policy} policy${many}`);
};

const middle = (node, side, frame) => {
  const box = node.getBoundingClientRect();
  return [(side === "right" ? box.right : box.left) - frame.left, box.top + box.height / 2 - frame.top];
};

const curve = ([x1, y1], [x2, y2]) => {
  const bend = (x2 - x1) / 2;
  return `M${x1.toFixed(1)} ${y1.toFixed(1)}C${(x1 + bend).toFixed(1)} ${y1.toFixed(1)} ${(x2 - bend).toFixed(1)} ${y2.toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}`;
};

const drawFlows = ({ flows, pools, workers }) => {
  const layer = document.querySelector(".flows");
  const frame = layer.getBoundingClientRect();
  if (!frame.width) return;
  const nodes = new Map([...($("prefill")._kept ?? []), ...($("decode")._kept ?? [])]);
  const from = middle($("router").firstChild, "right", frame);
  const first = pools.prefill.workers ? "prefill" : "decode";
  const paths = workers.filter((w) => w.role === first && w.up && w.state === "ready")
    .map((w) => ({ key: `r-${w.id}`, d: curve(from, middle(nodes.get(w.id), "left", frame)), class: "", size: 1.5 }));
  const most = Math.max(1, ...flows.map((flow) => flow.bytes_per_s));
  for (const flow of flows) {
    const [a, b] = [nodes.get(flow.from), nodes.get(flow.to)];
    if (!a || !b || !$("prefill").contains(a) || !$("decode").contains(b)) continue;
    const live = flow.bytes_per_s > 0;
    paths.push({
      key: `${flow.from} ${flow.to}`, d: curve(middle(a, "right", frame), middle(b, "left", frame)),
      class: `kv ${live ? "live" : "idle"}${flow.failures && live ? " failing" : ""}`,
      size: live ? 1.2 + 2.6 * Math.sqrt(flow.bytes_per_s / most) : 1.5,
    });
  }
  keep(layer, paths, (path) => path.key, () => s("path"), (node, path) => {
    node.setAttribute("d", path.d);
    node.setAttribute("class", path.class);
    node.style.strokeWidth = path.size.toFixed(1);
  });
};

const flowNote = ({ flows }) => {
  if (!flows.length) return "";
  const sum = (name) => flows.reduce((total, flow) => total + flow[name], 0);
  const failures = sum("failures");
  const ways = [...new Set(flows.map((flow) => flow.transport).filter(Boolean))].join(", ");
  const fallback = flows.filter((flow) => flow.fallback).length;
  return `KV: ${bytes(sum("bytes_per_s"))}/s over ${flows.length} ${flows.length === 1 ? "pair" : "pairs"}${ways ? ` by ${ways}` : ""}; ` +
    `${count(sum("transfers"))} handoffs, ${failures ? `${count(failures)} failed` : "none failed"}` +
    (fallback ? `; ${fallback} by a fallback` : "") + ".";
};

let last = null;

export const showPicture = (snapshot, open) => {
  last = snapshot;
  showRouter(snapshot);
  for (const role of ["prefill", "decode"]) {
    const column = $(role);
    poolName(column, role === "prefill" ? "Prefill" : "Decode", snapshot.pools[role]);
    keep(column, snapshot.workers.filter((worker) => worker.role === role), (worker) => worker.id,
      (worker) => makeWorker(worker, open), updateWorker);
  }
  drawFlows(snapshot);
  say($("flow-note"), flowNote(snapshot));
};

addEventListener("resize", () => last && drawFlows(last));
