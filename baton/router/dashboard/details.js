// What opens on a click: a worker with its buttons, or why a request went where it went.
import { get, post } from "./api.js";
import { $, h, keep, say } from "./dom.js";
import { NONE, ago, bytes, count, percent, seconds } from "./format.js";

let snapshot = null;
let refresh = null; // what brings the open dialog up to date

export const remember = (latest) => {
  snapshot = latest;
  if ($("details").open && refresh) refresh();
};

const open = (title, ...body) => {
  refresh = null;
  $("details-title").textContent = title;
  $("details-body").replaceChildren(...body.flat(Infinity).filter(Boolean));
  if (!$("details").open) $("details").showModal();
};

const showFacts = (list, rows) =>
  keep(list, rows.filter(([, value]) => value !== null), ([name]) => name,
    ([name]) => h("div", {}, h("dt", {}, name), h("dd")),
    (row, [, value]) => say(row.lastChild, value));

const facts = (rows) => {
  const list = h("dl", { class: "facts" });
  showFacts(list, rows);
  return list;
};

// ---- a worker ------------------------------------------------------------------------------------

const act = (button, outcome, path, body, done) => async () => {
  for (const one of button.parentElement.children) one.disabled = true;
  outcome.textContent = "asking …";
  try {
    await post(path, body);
    outcome.textContent = done;
  } catch (error) {
    outcome.textContent = error.message;
  }
  for (const one of button.parentElement.children) one.disabled = false;
};

const ACTIONS = {
  drain: ["Drain", "hold", { hold: "drain" }, "Nothing new goes there; what runs ends there.", "Drained. Put it back when you like."],
  eject: ["Eject", "hold", { hold: "eject" }, "What runs there goes on elsewhere at once.", "Ejected: its requests go on elsewhere."],
  back: ["Put back", "hold", { hold: "none" }, "", "Back in the rotation."],
};

const choices = (worker) => {
  const offered = snapshot.actions;
  const found = [];
  if (worker.hold) found.push(ACTIONS.back);
  if (worker.hold?.how !== "drain" && offered.includes("drain")) found.push(ACTIONS.drain);
  if (worker.hold?.how !== "eject" && offered.includes("eject")) found.push(ACTIONS.eject);
  if (offered.includes("rerole")) {
    const role = worker.role === "prefill" ? "decode" : "prefill";
    found.push([`Make it a ${role} worker`, "role", { role }, "It moves its requests away and comes back in the other role; the new ratio is pinned.", `It is a ${role} worker now.`]);
  }
  return found;
};

const fillButtons = (row, outcome, worker) => {
  row.replaceChildren();
  for (const [name, path, body, warning, done] of choices(worker)) {
    const button = h("button", { type: "button", class: name === "Eject" ? "danger" : "" }, name);
    const go = act(button, outcome, `/v1/workers/${encodeURIComponent(worker.id)}/${path}`, body, done);
    let armed = !warning; // the first press says what will happen, the second does it
    button.addEventListener("click", () => {
      if (armed) {
        armed = !warning;
        button.textContent = name;
        return go();
      }
      armed = true;
      button.textContent = `${name}: sure?`;
      outcome.textContent = warning;
      return null;
    });
    row.append(button);
  }
};

const drafts = (found) => found && [
  `${found.tokens_per_step.toFixed(2)} tokens a step`,
  found.gain === null ? null : `${found.gain.toFixed(2)} times as fast as without drafts`,
  `accepted by position: ${found.acceptance.filter((share) => share !== null).map(percent).join(", ") || "none judged"}`,
].filter(Boolean).join("; ");

const added = ({ row_s, adapter_s, rank }) =>
  `${(1e6 * row_s * rank).toPrecision(3)} µs a row, ${(1e6 * adapter_s * rank).toPrecision(3)} µs an adapter of a step`;

const factsOf = (worker) => [
  ["role", `${worker.role}, ${worker.up ? worker.state : "unreachable"}`],
  ["held", worker.hold ? `${worker.hold.how} by ${worker.hold.by || "an operator"}, ${ago(worker.hold.at, snapshot.at)}` : null],
  ["model", `${worker.model} on ${worker.device}`],
  ["adapters", worker.adapters.length ? worker.adapters.join(", ") : null],
  ["adapters add", worker.adapter_cost ? added(worker.adapter_cost) : null],
  ["batch", `${worker.running} of ${worker.max_batch} (${percent(worker.batch_fill)}), ${worker.waiting} waiting (${count(worker.waiting_tokens)} tokens)`],
  ["KV pages", `${count(worker.pages.leased)} leased, ${count(worker.pages.cached)} cached, ${count(worker.pages.free)} free, ${worker.pages.quarantined} in quarantine; of ${count(worker.pages.total)}`],
  ["tokens", `${count(worker.prefill_tokens_per_s)}/s read, ${count(worker.decode_tokens_per_s)}/s written`],
  ["prefix hits", percent(worker.hit_rate)],
  ["full", percent(worker.full)],
  ["time in steps", percent(worker.in_steps)],
  ["MFU, MBU", worker.mfu === null ? null : `${percent(worker.mfu)}, ${percent(worker.mbu)}`],
  ["preemptions", count(worker.preemptions)],
  ["speculation", drafts(worker.speculation)],
  ["power of its host", worker.watts === null ? null : `${Math.round(worker.watts)} W`],
  ["last heard of", `${worker.age_s.toFixed(1)} s ago, ${worker.address}`],
];

export const openWorker = (id) => {
  const find = () => snapshot?.workers.find((one) => one.id === id);
  if (!find()) return;
  const list = h("dl", { class: "facts" });
  const title = h("h3", {}, "KV");
  const table = h("div", { class: "scroll" }, flowTable());
  const row = h("p", { class: "actions" });
  const outcome = h("p", { class: "outcome", role: "status" });
  open(id, list, title, table, row, outcome);
  let offered = "";
  refresh = () => {
    const worker = find();
    if (!worker) {
      row.replaceChildren();
      offered = "";
      say(outcome, `${id} isn't there any more: what is shown was so when it was last heard of.`);
      return;
    }
    showFacts(list, factsOf(worker));
    const flows = snapshot.flows.filter((flow) => flow.from === id || flow.to === id);
    title.hidden = table.hidden = flows.length === 0;
    showFlows(table.querySelector("tbody"), flows);
    const names = choices(worker).map(([name]) => name).join();
    if (names === offered || row.querySelector(":disabled")) return;
    const focused = row.contains(document.activeElement);
    fillButtons(row, outcome, worker);
    if (focused) row.querySelector("button")?.focus();
    offered = names;
  };
  refresh();
};

const FLOW_COLUMNS = ["pair", "by", "now", "handoffs", "failed", "shipped"];

const flowTable = () =>
  h("table", {},
    h("thead", {}, h("tr", {}, FLOW_COLUMNS.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody"));

const showFlows = (body, flows) =>
  keep(body, flows, (flow) => `${flow.from} → ${flow.to}`, () => h("tr", {}, FLOW_COLUMNS.map(() => h("td"))),
    (row, flow) =>
      [`${flow.from} → ${flow.to}`, flow.transport || NONE, `${bytes(flow.bytes_per_s)}/s`, count(flow.transfers), count(flow.failures), bytes(flow.bytes)]
        .forEach((text, at) => say(row.children[at], text)));

// ---- a request -----------------------------------------------------------------------------------

export const openRequest = async (id) => {
  open(`Request ${id}`, h("p", { class: "empty" }, "asking …"));
  try {
    explained(await get(`/v1/requests/${encodeURIComponent(id)}/explain`));
  } catch (error) {
    open(`Request ${id}`, h("p", { class: "error" }, error.message));
  }
};

const explained = (record) => {
  const named = [record.slo.ttft_s ? `TTFT ${seconds(record.slo.ttft_s)}` : "", record.slo.tpot_s ? `TPOT ${seconds(record.slo.tpot_s)}` : ""].filter(Boolean);
  open(`Request ${record.request_id}`,
    facts([
      ["model", record.model],
      ["adapter", record.adapter || null],
      ["class", `${record.context_class}, ${count(record.prompt_tokens)} prompt tokens`],
      ["tenant", record.tenant || null],
      ["SLO", named.join(", ") || "none"],
    ]),
    record.choices.map(choice));
};

const choice = (one) => [
  h("h3", {}, `Choice ${one.choice}: ${one.error || one.finish_reason || "running"}, ${count(one.completion_tokens)} tokens, ${count(one.cached_tokens)} cached, attempt ${one.attempts}`),
  one.placements.map(placement),
  compared(one.predicted_against_observed),
];

const headed = (name) => (name ? h("th", { scope: "col" }, name) : h("td"));

const TERMS = {
  queue: "the prompts that wait there", read: "reading this prompt", ship: "KV that is still on its way then", write: "the first 64 tokens out",
  harm: "what others in the batch wait longer", late: "four times what is over the SLO", session: "credit of the conversation's worker",
  adapter: "loading the adapter",
};

// What the columns of a table of ways are, as far as it has them. Only the policy "cost" predicts seconds.
const meanings = (policy, terms) => {
  const known = terms.filter((term) => TERMS[term]);
  if (policy !== "cost" || !known.length) return null;
  const told = known.map((term) => `${term}: ${TERMS[term]}`).join("; ");
  return h("p", { class: "empty" }, `Predicted seconds, the least sum is taken. ${told}. Way: “local” is a decode worker that reads the prompt itself.`);
};

const placement = (one) => {
  const options = [one.taken, ...one.not_taken];
  const terms = [...new Set(options.flatMap((option) => Object.keys(option.terms)))];
  const head = ["", "way", "prefill", "decode", "cached", ...terms, "cost"];
  const number = (value) => (value === undefined ? "" : value.toFixed(4));
  return [
    h("p", { class: "empty" }, `Placed after ${seconds(one.at_s)} (${seconds(one.waited_s)} queued) by the policy ${one.policy}${one.left_for ? `; left for ${one.left_for}` : ""}`),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, head.map(headed))),
      h("tbody", {}, options.map((option, at) => h("tr", { class: at ? "" : "taken" },
        [at ? "" : "taken", option.way, option.prefill || NONE, option.decode, count(option.cached_tokens), ...terms.map((term) => number(option.terms[term])), number(option.cost)]
          .map((text) => h("td", {}, text))))))),
    meanings(one.policy, terms),
    one.not_listed ? h("p", { class: "empty" }, `and ${one.not_listed} more`) : null,
  ];
};

const compared = (rows) =>
  Object.keys(rows).length === 0 ? null
    : [h("h3", {}, "Predicted against seen"), h("table", {},
        h("thead", {}, h("tr", {}, ["", "predicted", "seen"].map(headed))),
        h("tbody", {}, Object.entries(rows).map(([name, row]) =>
          h("tr", {}, h("td", {}, name), h("td", {}, seconds(row.predicted_s)), h("td", {}, seconds(row.observed_s))))))];
