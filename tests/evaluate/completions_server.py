"""A small OpenAI-compatible server over a subject: completions as vLLM answers them, or as OpenAI's own servers do.

It really computes: every answer and likelihood is its subject's.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from baton.evaluate.local import LocalSubject

Json = dict[str, Any]
MOST = 5  # alternatives that the plain form gives


class CompletionsServer:
    """``with CompletionsServer(local) as server: server.url``. ``says_ids``: whether it knows vLLM's fields."""

    def __init__(self, local: LocalSubject) -> None:
        self.local, self.says_ids, self.asked = local, True, []  # type: ignore[var-annotated]
        self.busy = 0  # completions that are refused before the next is answered
        self._lock = threading.Lock()  # one thread at a time calls a runner
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: Json) -> tuple[int, Json]:
        with self._lock:
            self.asked.append((path, body))
            if self.busy and path == "/v1/completions":
                self.busy -= 1
                return 429, {"error": {"message": "the queue is full"}}
            if path == "/v1/models":
                return 200, {"data": [{"id": "tiny", "max_model_len": self.local.context}]}
            if path == "/tokenize" and self.says_ids:
                return 200, {"tokens": self.local.encode(body["prompt"])}
            if path == "/v1/completions":
                return self._complete(body)
            return 404, {"error": {"message": f"no such path: {path}"}}

    def _complete(self, body: Json) -> tuple[int, Json]:
        if not self.says_ids and body.get("logprobs", 0) > MOST:
            return 400, {"error": {"message": f"logprobs must be at most {MOST}"}}
        stop, to_the_end = body.get("stop", ()), bool(body.get("ignore_eos"))
        answer = self.local.answers([body["prompt"]], body["max_tokens"], stop, to_the_end)[0]
        tokens = [self.local.token_text(token) for token in answer.ids or ()]
        choice: Json = {"text": answer.text, "logprobs": {"tokens": tokens, "token_logprobs": answer.logprobs}}
        if self.says_ids:
            choice["token_ids"] = answer.tokens if body.get("return_token_ids") else None
            choice |= self._prompt_logprobs(body) if "prompt_logprobs" in body else {}
        if body.get("echo"):
            choice["logprobs"] = self._echoed(body)
        return 200, {"choices": [choice]}

    def _prompt_logprobs(self, body: Json) -> Json:
        scored = next(self.local.scores([body["prompt"]], body["prompt_logprobs"]))
        entries = [s.top | {t: s.logprob} for s, t in zip(scored, body["prompt"][1:], strict=True)]
        return {"prompt_logprobs": [None, *({str(t): {"logprob": p} for t, p in e.items()} for e in entries)]}

    def _echoed(self, body: Json) -> Json:
        scored = next(self.local.scores([body["prompt"]], body["logprobs"]))
        # Of tokens with the same text the likeliest is named: the last one that a dict is given.
        tops = [{self.local.token_text(int(t)): p for t, p in reversed(s.top.items())} for s in scored]
        return {
            "token_logprobs": [None, *(s.logprob for s in scored), -1.0],
            "top_logprobs": [None, *tops, {}],
        }


class _Handler(BaseHTTPRequestHandler):
    owner: CompletionsServer

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _reply(self, body: Json) -> None:
        status, found = self.owner.answer(self.path, body)
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Drops what the server would log of each request."""
