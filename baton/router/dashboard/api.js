// The router's own API, with the key that was given; nothing else is ever asked.
const KEPT = "baton-key";
const SILENT_MS = 15000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => Boolean(sessionStorage.getItem(KEPT));

export const setKey = (key) => sessionStorage.setItem(KEPT, key.trim());

const headers = (more = {}) => {
  const key = sessionStorage.getItem(KEPT);
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
};

const checked = async (response) => {
  if (response.ok) return response;
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not ours: the status says enough
  }
  throw new Refused(response.status, message);
};

export const get = async (path) => (await checked(await fetch(path, { headers: headers() }))).json();

export const post = async (path, body) => {
  const asked = { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body) };
  return (await checked(await fetch(path, asked))).json();
};

// Each event of the stream, until it ends or is aborted. EventSource can't carry a key, so this reads the body itself.
export const follow = async (path, take, abort) => {
  let timer = setTimeout(() => abort.abort(), SILENT_MS);
  const response = await checked(await fetch(path, { headers: headers(), signal: abort.signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENT_MS);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) take(JSON.parse(part.slice(6)));
    }
  } finally {
    clearTimeout(timer);
  }
};
