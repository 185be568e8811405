"""Fields of OpenAI's, vLLM's, SGLang's and Dynamo's requests that no body here declares: which of them are refused,
with what to do instead, and which change nothing that a client could miss.

Knows nothing of bodies or HTTP. docs/fields.md is written from this; the field lists are in tests/data.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec

NOTHING: tuple[object, ...] = (False, "", [], {})


class Refusal(msgspec.Struct, frozen=True):
    """Describes a refused field: ``remedy`` says what to do instead.

    ``neutral``: values that ask for nothing and are let pass, beside null.
    """

    remedy: str
    neutral: tuple[object, ...] = NOTHING

    def refuses(self, value: object) -> bool:
        """Returns whether ``value`` asks for something, so that the request is refused.

        Types count: 0 and 1 don't equal False and True.
        """
        return value is not None and not any(value == n and type(value) is type(n) for n in self.neutral)


def _each(names: str, refusal: Refusal | str) -> dict[str, Refusal]:
    made = Refusal(refusal) if isinstance(refusal, str) else refusal
    return dict.fromkeys(names.split(), made)


def _same(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


NO_CODE = "no code of a client's is run here: logit_bias, allowed_token_ids and bad_words shape the choice"
OWN_KV = "KV moves between this cluster's own workers only: leave it out"
STATELESS = "nothing is stored here: send the whole conversation as input"

REFUSED: dict[str, Refusal] = {
    "use_beam_search": Refusal("beams are not searched: best_of of /v1/completions picks the likeliest answers"),
    "watermarking": Refusal("answers are not watermarked: leave it out"),
    "logprob_token_ids": Refusal("logprobs (top_logprobs in a chat) give the likeliest tokens"),
    "prompt_embeds": Refusal("give the prompt as text or as token ids"),
    "return_tokens_as_token_ids": Refusal("return_token_ids gives the ids beside the text"),
    "return_prompt_text": Refusal("return_token_ids gives the prompt's ids, and /detokenize their text"),
    **_each("kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room", OWN_KV),
    **_each("vllm_xargs logits_processors custom_logit_processor custom_params", NO_CODE),
    "repetition_detection": Refusal("repetition_penalty and frequency_penalty discourage repeats"),
    **_each(
        "thinking_token_budget max_thinking_tokens",
        Refusal(
            "thoughts have no limit of their own: max_tokens bounds thought and answer, and the template's "
            "switches (chat_template_kwargs) may turn thinking off",
            (-1,),
        ),
    ),
    **_each(
        "guided_whitespace_pattern whitespace_pattern disable_any_whitespace",
        "a regex or a grammar can say where spaces go",
    ),
    "structural_tag": Refusal("a grammar can hold tags too: give guided_grammar"),
    "disable_additional_properties": Refusal('write "additionalProperties": false into the schema'),
    "grammar": Refusal("guided_grammar is its name here"),
    "return_hidden_states": Refusal("/v1/embeddings gives pooled hidden states"),
    "return_routed_experts": Refusal("which experts were taken is not kept: leave it out"),
    "return_cached_tokens_details": Refusal("usage.prompt_tokens_details.cached_tokens is there without it"),
    "return_prompt_token_ids": Refusal("return_token_ids gives them"),
    "return_meta_info": Refusal("usage and the header x-baton-route tell how it went"),
    "stop_regex": Refusal("give stop strings or stop_token_ids"),
    "no_stop_trim": Refusal("include_stop_str_in_output keeps the stop string"),
    "lora_path": Refusal("requests load no adapters: name the model that is to answer"),
    "session_params": Refusal("x-session-id names the conversation: send all of it with every turn"),
    "extra_key": Refusal("cache_salt keeps caches apart"),
    "task": Refusal("say it in the prompt"),
    "separate_reasoning": Refusal("router.reasoning_parser decides it for all requests", (True,)),
    "stream_reasoning": Refusal("include_reasoning: false leaves thoughts out", (True,)),
    "chat_template": Refusal(
        "no template of a client's is run: the model's own takes chat_template_kwargs, and /v1/completions takes "
        "text as you rendered it"
    ),
    "chat_template_args": Refusal("chat_template_kwargs is its name here"),
    "thinking": Refusal("chat_template_kwargs has the template's own switch for it"),
    "suffix": Refusal("leave it out, or write the model's own fill-in-the-middle marks into the prompt"),
    "audio": Refusal("answers are text: leave it out"),
    "modalities": Refusal("answers are text: leave it out", (*NOTHING, ["text"])),
    "functions": Refusal("give tools instead"),
    "function_call": Refusal("give tool_choice instead"),
    "web_search_options": Refusal("no tool runs here: give tools, and run what the answer calls"),
    "moderation": Refusal("nothing is moderated here: leave it out"),
    "verbosity": Refusal("say in the prompt how long the answer should be", ("medium",)),
    **_each("previous_response_id conversation previous_response previous_input_messages", STATELESS),
    "multi_agent": Refusal("one model answers here: ask for each part by itself"),
    **_each("background background_options", "answers are not kept for later: leave it out, or use /v1/batches"),
    "context_management": Refusal("shorten the conversation yourself"),
    "access_programs": Refusal("leave it out: it is for OpenAI's own models"),
    "enable_response_messages": Refusal("/tokenize shows the prompt that a conversation makes"),
    "truncation": Refusal("shorten the input yourself", ("disabled",)),
    "padding": Refusal("inputs are not padded: leave it out", ("do_not_pad",)),
    "embed_dtype": Refusal("vectors are float32: leave it out", ("float32",)),
    "endianness": Refusal("base64 is little-endian: leave it out", ("native", "little")),
    **_each("use_activation normalize", Refusal("vectors have length 1: leave it out", (True,))),
    **_each("additional_data embed_override_token_id embed_overrides", "give input as text or as token ids"),
    **_each("output_expires_after expires_after", "files are kept for 7 days: delete them when you are done"),
    "greed_sampling": Refusal("give temperature: 0"),
    "use_raw_prompt": Refusal("/v1/completions takes a prompt as it is"),
    "token_data": Refusal("/v1/completions takes token ids as its prompt"),
    "annotations": Refusal("the header x-baton-route tells how it went"),
    "extra_fields": Refusal("the header x-baton-route tells how it went"),
}  # fmt: skip

WHERE_IT_RUNS = "where a request runs changes no answer, and the router decides it"
NO_IMAGES = "for images and sound, which are refused"
NAMES_IT = "names the call or the caller only: x-request-id and the API key do that here"
NOT_STORED = "nothing is stored here, and the answer says so where it can"

HARMLESS: dict[str, str] = {
    **_same("user safety_identifier request_id rid custom_labels", NAMES_IT),
    **_same("metadata store", NOT_STORED),
    **_same("service_tier", "there is one tier; priority orders requests"),
    **_same(
        "prompt_cache_options prompt_cache_retention cache_control", "how long a prefix is cached changes no answer"
    ),
    **_same("prediction ngram_corpus_id", "a guess that may speed an answer up, and changes none"),
    **_same("stream_interval", "how many tokens come in one event changes no answer"),
    **_same("include_obfuscation", "padding of events against listeners: TLS is what is offered here"),
    **_same("length_penalty", "weighs beams only, and use_beam_search is refused"),
    **_same("spaces_between_special_tokens", "text never gets spaces between special tokens here"),
    **_same("routed_experts_prompt_start routed_experts_start_len", "experts' data are refused"),
    **_same("return_token_offsets return_mm_kwargs", "for vLLM's render endpoints only, as in vLLM"),
    **_same(
        "guided_decoding_backend backend disable_fallback", "there is one backend, and what matches is the same"
    ),
    **_same(
        "mm_processor_kwargs media_io_kwargs images_config max_dynamic_patch min_dynamic_patch use_audio_in_video "
        "image",
        NO_IMAGES,
    ),
    **_same(
        "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank backend_instance_id prefill_worker_id "
        "decode_worker_id dp_rank prefill_dp_rank session_control agent_hints request_timestamp_ms",
        WHERE_IT_RUNS,
    ),
    **_same("max_tool_calls", "bounds tools that OpenAI runs, and those are refused"),
}

CHAT = "/v1/chat/completions takes it"
PROMPT_AS_IS = "a completion's prompt is taken as it is: leave it out, or use /v1/chat/completions"
OF_RESPONSES = {
    "include": Refusal("give logprobs"),
    "max_output_tokens": Refusal("max_tokens is its name here"),
    "text": Refusal("response_format is its name here"),
}
NAMES_OF_MESSAGES = {
    "stop_sequences": Refusal("stop is its name here"),
    "output_config": Refusal("response_format and reasoning_effort are its names here"),
}
OF_MESSAGES: dict[str, Refusal] = {
    "max_output_tokens": Refusal("max_tokens is its name here"),
    **_each("input prompt instructions", "give messages, and what the system says in system"),
    "output_format": Refusal("output_config.format is its name here"),
    **_each("reasoning reasoning_effort", "output_config.effort and thinking are its names here"),
    **_each("container mcp_servers", "no tool runs here: give tools, and run what the answer calls"),
    "thread": Refusal("nothing is stored here: send the whole conversation as messages"),
    "compaction": Refusal("nothing is summarized here: ask for a summary yourself"),
    "inference_geo": Refusal("requests run where this cluster is: leave it out", (*NOTHING, "global")),
    "speed": Refusal("there is one speed: leave it out", (*NOTHING, "standard")),
}
REFUSED_AT: dict[str, dict[str, Refusal]] = {
    "completions": {
        **OF_RESPONSES,
        **NAMES_OF_MESSAGES,
        "system": Refusal("write it into prompt"),
        **_each("input instructions", "give prompt"),
        "reasoning": Refusal(PROMPT_AS_IS),
        **_each("messages tools tool_choice", CHAT),
        **_each("continue_final_message chat_template_kwargs documents reasoning_effort", PROMPT_AS_IS),
        **_each("chat_template chat_template_args thinking", PROMPT_AS_IS),
        "add_generation_prompt": Refusal(PROMPT_AS_IS),
        "include_reasoning": Refusal("a completion's text is not taken apart: leave it out", (True,)),
        "max_completion_tokens": Refusal("max_tokens is its name here"),
        "top_logprobs": Refusal("logprobs takes their number", (0,)),
    },
    "chat": {
        **OF_RESPONSES,
        **NAMES_OF_MESSAGES,
        "system": Refusal("give it as a message of role system"),
        **_each("input instructions", "give messages"),
        "prompt": Refusal("give messages, or use /v1/completions"),
        "input_ids": Refusal("/v1/completions takes token ids as its prompt"),
        "echo": Refusal("put the last message before the answer yourself"),
        "best_of": Refusal("give n, or use /v1/completions", (1,)),
        "reasoning": Refusal("give reasoning_effort"),
    },
    "responses": {
        "stop_sequences": Refusal("stop is its name here"),
        "output_config": Refusal("text.format and reasoning.effort are its names here"),
        "system": Refusal("instructions is its name here"),
        "prompt": Refusal("prompt templates are stored at OpenAI: give input"),
        "messages": Refusal("give input"),
        "n": Refusal("a response is one answer: ask again, or use /v1/chat/completions", (1,)),
        "best_of": Refusal("use /v1/completions", (1,)),
        **_each("max_tokens max_completion_tokens", "max_output_tokens is its name here"),
        "response_format": Refusal("text.format is its name here"),
        "logprobs": Refusal('give include: ["message.output_text.logprobs"]'),
        "reasoning_effort": Refusal("reasoning.effort is its name here"),
        "add_generation_prompt": Refusal(CHAT, (True,)),
        "include_reasoning": Refusal(CHAT, (True,)),
        **_each("echo return_token_ids continue_final_message documents add_special_tokens", CHAT),
        **_each("prompt_logprobs truncate_prompt_tokens", CHAT),
    },
    "messages": {
        **OF_MESSAGES,
        "stream_options": Refusal("a stream's events tell the usage here: leave it out"),
        "n": Refusal("a message is one answer: ask again, or use /v1/chat/completions", (1,)),
        "best_of": Refusal("use /v1/completions", (1,)),
        "max_completion_tokens": Refusal("max_tokens is its name here"),
        **_each("response_format text", "output_config.format is its name here"),
        **_each("parallel_tool_calls", Refusal("tool_choice.disable_parallel_tool_use is its name here", (True,))),
        **_each("logprobs top_logprobs prompt_logprobs return_token_ids echo documents", CHAT),
        **_each("truncate_prompt_tokens add_special_tokens", CHAT),
        "include_reasoning": Refusal("thinking.display is its name here", (True,)),
        "add_generation_prompt": Refusal(CHAT, (True,)),
        "continue_final_message": Refusal("end with the assistant's message: it is continued", (False,)),
    },
    "count_tokens": dict(OF_MESSAGES),
    "output_config": {"task_budget": Refusal("max_tokens bounds the answer: say in the prompt what is left")},
    "reasoning": {
        **_each("summary generate_summary", Refusal("the thought itself comes, whole: leave it out", ("auto",))),
        "context": Refusal("thoughts of earlier turns are not shown to the model again", ("auto", "current_turn")),
        "mode": Refusal("leave it out: it is for OpenAI's own models", ("standard",)),
    },
    "embeddings": {"messages": Refusal("give input: /tokenize renders a conversation to token ids")},
    "tokenize": {
        "truncate_prompt_tokens": Refusal("all tokens are given: cut them yourself"),
    },
}
GOES_WITH_CUT = "goes with truncate_prompt_tokens, which is refused"
OF_ANTHROPIC = {
    **_same("user_profile_id workspace_id", NAMES_IT),
    **_same("billing_policy fallback_credit_token", "nothing is billed here"),
    "fallbacks": "for models that decline by a policy, and there is none here",
    "diagnostics": "the header x-baton-route tells how it went",
}
HARMLESS_AT: dict[str, dict[str, str]] = {
    "messages": {**OF_ANTHROPIC, "truncation_side": GOES_WITH_CUT, "include": "of logprobs, which are refused"},
    "count_tokens": {**OF_ANTHROPIC, "compaction": "counts nothing in Anthropic's API either"},
    "thinking": {"budget_tokens": "a target in Anthropic's API: max_tokens bounds thought and answer"},
    "completions": {"parallel_tool_calls": "goes with tools, which are refused"},
    "responses": {"truncation_side": GOES_WITH_CUT, "stream_options": "has only include_obfuscation here"},
    "tokenize": {"truncation_side": GOES_WITH_CUT, "parallel_tool_calls": "goes with an answer"},
    "embeddings": {
        **_same(
            "add_generation_prompt continue_final_message chat_template chat_template_kwargs",
            "goes with messages, which are refused",
        ),
        "nvext": "what of it concerns embeddings is where they run",
    },
}


def refusal(surface: str, name: str) -> Refusal | None:
    """Returns why field ``name`` is refused at ``surface`` (the name of a kind of body); None if it isn't
    refused.
    """
    if reason(surface, name):
        return None
    return REFUSED_AT.get(surface, {}).get(name) or REFUSED.get(name)


@functools.cache
def refusable(surface: str) -> tuple[str, ...]:
    """Returns the names of fields refused at ``surface``, in the order in which they are reported."""
    names = (*REFUSED_AT.get(surface, {}), *REFUSED)
    return tuple(name for name in dict.fromkeys(names) if refusal(surface, name) is not None)


def reason(surface: str, name: str) -> str:
    """Returns why field ``name`` may be ignored at ``surface``; "" if it is refused or unknown."""
    found: Mapping[str, str] = HARMLESS_AT.get(surface, {})
    if name in found:
        return found[name]
    return "" if name in REFUSED_AT.get(surface, {}) else HARMLESS.get(name, "")
