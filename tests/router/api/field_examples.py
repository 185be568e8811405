"""Fields of requests, with a value of each that is sent, and what else the request needs for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from openai.types import batch_create_params, completion_create_params, embedding_create_params, file_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.responses import response_create_params
from openai.types.responses.response_text_config_param import ResponseTextConfigParam
from openai.types.shared_params.reasoning import Reasoning as OpenAIReasoning

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("fields", ROOT / "docs" / "fields.py")
fields = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fields)

OPENAI = {
    "completions": completion_create_params.CompletionCreateParamsBase,
    "chat": chat_create_params.CompletionCreateParamsBase,
    "responses": response_create_params.ResponseCreateParamsBase,
    "embeddings": embedding_create_params.EmbeddingCreateParams,
    "files": file_create_params.FileCreateParams,
    "batches": batch_create_params.BatchCreateParams,
    "reasoning": OpenAIReasoning,
    "text": ResponseTextConfigParam,
    "stream_options": ChatCompletionStreamOptionsParam,
}
LISTED = fields.listed()
SURFACES = (
    "completions",
    "chat",
    "responses",
    "messages",
    "count_tokens",
    "embeddings",
    "tokenize",
    "detokenize",
)
GENERATING = ("completions", "chat", "responses", "messages")
PATHS = {
    "chat": "/v1/chat/completions",
    "count_tokens": "/v1/messages/count_tokens",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
TURN = [{"role": "user", "content": "Hello there"}]
SURE = {"temperature": 0, "seed": 1}
BASE: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hello there", "max_tokens": 30, **SURE},
    "chat": {"messages": TURN, "max_tokens": 30, **SURE},
    "responses": {"input": "Hello there", "max_output_tokens": 30, **SURE},
    "messages": {"messages": TURN, "max_tokens": 30, **SURE},
    "count_tokens": {"messages": TURN},
    "embeddings": {"input": "Hello there"},
    "tokenize": {"messages": TURN},
    "detokenize": {"tokens": [3, 70, 71]},
    "batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
}
# Fields inside a field: the surface on which they are sent, and what they need beside them.
INSIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "structured_outputs": ("completions", {}),
    "response_format": ("chat", {}),
    "nvext": ("completions", {}),
    "reasoning": ("responses", {}),
    "text": ("responses", {}),
    "thinking": ("messages", {}),
    "output_config": ("messages", {}),
    "stream_options": ("chat", {"stream": True, "max_tokens": 1}),  # more could come in chunks of any size
}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL, FLAT = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
PLAIN = {"name": "f", "input_schema": {"type": "object"}}
# What is sent to see a field obeyed: a value, and the fields that it needs beside it.
SENT: dict[str, Any] = {
    "model": "another", "prompt": "Bye", "messages": [{"role": "user", "content": "Bye"}], "input": "Bye",
    "prompt_name": "query",
    "best_of": 2, "echo": True, "frequency_penalty": 0.5, "logit_bias": {"5": 1.0}, "logprobs": 1, "max_tokens": 2,
    "max_completion_tokens": 2, "max_output_tokens": 2, "n": 2, "presence_penalty": 0.5, "seed": 2, "stop": "quick",
    "stream": True, "temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "repetition_penalty": 1.5,
    "stop_token_ids": [7], "ignore_eos": True, "min_tokens": 2, "skip_special_tokens": False,
    "truncate_prompt_tokens": 2, "allowed_token_ids": [5], "prompt_logprobs": 1, "bad_words": ["x"],
    "prediction": {"type": "content", "content": "x"}, "speculative.n_max": 2,
    "add_special_tokens": False, "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
    "guided_json": {"type": "object"}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": 'start: "a"',
    "json_schema": '{"type": "object"}', "regex": "a", "ebnf": 'root ::= "a"', "nvext": {"top_k": 3}, "priority": 5,
    "cache_salt": "s", "session_id": "s", "prompt_cache_key": "s", "prompt_cache_retention": "24h",
    "return_token_ids": True, "tools": [TOOL],
    "add_generation_prompt": False, "continue_final_message": True, "documents": [{"text": "d"}],
    "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "include_reasoning": False,
    "system": "Be brief.", "stop_sequences": ["quick"], "thinking": {"type": "disabled"},
    "output_config": {"effort": "low"}, "cache_control": {"type": "ephemeral"},
    "instructions": "Be brief.", "metadata": {"a": "b"}, "include": ["message.output_text.logprobs"],
    "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}}, "encoding_format": "base64",
    "dimensions": 2, "pooling": "last", "return_token_strs": True, "tokens": [70],
}  # fmt: skip
WITH: dict[str, tuple[Any, dict[str, Any]]] = {
    "stream_options": ({"include_usage": True}, {"stream": True, "max_tokens": 1}),
    "include_stop_str_in_output": (True, {"stop": "quick"}),
    "truncation_side": ("right", {"truncate_prompt_tokens": 2}),
    "tool_choice": ("required", {"tools": [TOOL]}),
    "parallel_tool_calls": (False, {"tools": [TOOL], "tool_choice": "required"}),
    "top_logprobs": (2, {"logprobs": True}),
}
OTHERWISE: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {
    ("chat", "logprobs"): (True, {}),
    ("chat", "add_special_tokens"): (True, {}),
    ("responses", "tools"): ([FLAT], {}),
    ("responses", "tool_choice"): ("required", {"tools": [FLAT]}),
    ("responses", "parallel_tool_calls"): (False, {"tools": [FLAT], "tool_choice": "required"}),
    ("responses", "top_logprobs"): (2, {"include": ["message.output_text.logprobs"]}),
    ("responses", "stream_options"): ({}, {"stream": True, "max_output_tokens": 1}),
    ("messages", "tools"): ([PLAIN], {}),
    ("messages", "tool_choice"): ({"type": "any"}, {"tools": [PLAIN]}),
    ("count_tokens", "tools"): ([PLAIN], {}),
    ("count_tokens", "tool_choice"): ({"type": "none"}, {"tools": [PLAIN]}),
    ("thinking", "type"): ("disabled", {}),
    ("thinking", "display"): ("omitted", {"type": "enabled"}),
    ("output_config", "effort"): ("low", {}),
    ("output_config", "format"): ({"type": "json_schema", "schema": {"type": "object"}}, {}),
    ("tokenize", "prompt"): ("Bye", {"messages": None}),
    ("tokenize", "add_special_tokens"): (True, {}),
    ("tokenize", "tool_choice"): ("none", {"tools": [TOOL]}),
    ("tokenize", "parallel_tool_calls"): (False, {"tools": [TOOL]}),
    ("detokenize", "skip_special_tokens"): (True, {}),
    ("structured_outputs", "json"): ({"type": "object"}, {}),
    ("structured_outputs", "json_object"): (True, {}),
    ("structured_outputs", "choice"): (["a"], {}),
    ("structured_outputs", "grammar"): ('start: "a"', {}),
    ("response_format", "type"): ("json_object", {}),
    ("response_format", "json_schema"): ({"name": "x", "schema": {"type": "object"}}, {"type": "json_schema"}),
    ("response_format", "schema"): ({"type": "object", "maxProperties": 1}, {"type": "json_object"}),
    ("stream_options", "include_usage"): (True, {}),
    ("stream_options", "continuous_usage_stats"): (True, {"include_usage": True}),
    ("reasoning", "effort"): ("low", {}),
    ("text", "format"): ({"type": "json_object"}, {}),
}  # fmt: skip
NEEDS = {"response_format": {"type": "text"}, "thinking": {"type": "enabled"}}  # what the body can't lack
# What can't be seen from here is held by tests that can: of the batch store, with a real Redis.
HELD = {
    "batches": "tests/router/api/batch/test_batches.py::test_a_batch_is_answered_line_by_line_good_and_bad_apart",
    "files": "tests/router/api/batch/test_files.py::test_bad_uploads_and_pages_are_refused_by_name",
}
