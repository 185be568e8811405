// Follows the router's live stream and shows each snapshot; asks for a key where one is wanted.
import { Refused, follow, hasKey, setKey } from "./api.js";
import { openRequest, openWorker, remember } from "./details.js";
import { showDial } from "./dial.js";
import { $, say } from "./dom.js";
import { showFigures } from "./figures.js";
import { showPicture } from "./picture.js";
import { showRequests } from "./requests.js";
import { standing } from "./standing.js";
import { showAdapters, showClasses, showTimeline } from "./tables.js";

const AGAIN_MS = [500, 1000, 2000, 5000];
const HIDDEN_MS = 10000; // a page that nobody has seen for so long gives its connection back: a browser has six to a router
let failures = 0;
let names = "";

const status = (state, text) => {
  $("status").dataset.state = state;
  say($("status"), text);
  document.title = `${state === "lost" ? "⚠ " : ""}${names ? `${names} · ` : ""}Baton`;
};

const show = (snapshot) => {
  failures = 0;
  const { router } = snapshot;
  names = router.model.split(", ").map((name) => name.split("/").pop()).join(", ");
  status(...standing(snapshot));
  say($("where"), `${names} · ${router.version}`);
  remember(snapshot);
  showFigures(snapshot);
  showPicture(snapshot, openWorker);
  showDial(snapshot);
  showClasses(snapshot);
  showAdapters(snapshot);
  showRequests(snapshot, openRequest);
  showTimeline(snapshot);
};

const pause = (ms) => new Promise((go) => setTimeout(go, ms));

const seen = () =>
  new Promise((go) => {
    if (!document.hidden) return go();
    document.addEventListener("visibilitychange", () => go(seen()), { once: true });
    return null;
  });

// Follows the stream while the page is seen; false if it was given up because it isn't.
const followSeen = async () => {
  const abort = new AbortController();
  let timer = 0;
  let unseen = false;
  const look = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(() => { unseen = true; abort.abort(); }, HIDDEN_MS);
  };
  document.addEventListener("visibilitychange", look);
  look();
  try {
    await follow("/v1/cluster/stream", show, abort);
    return true;
  } catch (error) {
    if (unseen) return false;
    throw error;
  } finally {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
  }
};

const askForKey = (why) =>
  new Promise((go) => {
    let given = false;
    const ask = () => {
      $("login").showModal();
      $("key").focus();
    };
    say($("login-error"), why);
    ask();
    $("login-form").onsubmit = (event) => {
      event.preventDefault();
      if (!$("key").value.trim()) return;
      setKey($("key").value);
      $("key").value = "";
      given = true;
      $("login").close();
      go();
    };
    $("login").onclose = () => given || ask(); // nothing is shown without a key, and a second Escape always closes it
  });

for (;;) {
  try {
    if (document.hidden) {
      status("wait", "paused while nobody looks");
      await seen();
    }
    if (!(await followSeen())) continue;
    status("lost", "the stream ended; connecting again");
  } catch (error) {
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
      status("wait", "waiting for a key");
      await askForKey(hasKey() ? error.message : "");
      continue;
    }
    status("lost", error instanceof Refused ? error.message : "no answer from the router; trying again");
  }
  await pause(AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)]);
  failures += 1;
}
