"""Fields by which a client shapes how its conversation becomes a prompt, and the rendering of that prompt.

Knows nothing of sampling or answers: ``/v1/chat/completions`` and ``/tokenize`` share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import model_validator

from baton.protos.errors import InvalidRequest
from baton.protos.json import Json
from baton.router.api.large import require_light_together
from baton.router.api.openai.messages import ConversationMessage
from baton.router.api.openai.tools import ToolsBody
from baton.router.text.model import TextModel

# What the request has fields for: a template's switch of that name would be overruled without a word.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
# What templates call the switch between thinking and not.
THINKING = ("enable_thinking", "thinking")
# The effort that OpenAI takes where none is given: many clients always send it, and ask for nothing by it.
USUAL = "medium"
LONG_SWITCH = 1024  # characters of a template's switch that are more than a word


class ConversationBody(ToolsBody):
    """Declares the fields that decide how a conversation becomes a prompt.

    ``continue_final_message``: the last message is left open, and the answer continues it.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: Json | None = None
    documents: list[Json] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> ConversationBody:
        if self.continue_final_message and self.add_generation_prompt:
            text = "continue_final_message and add_generation_prompt can't both be true: give one of them"
            raise InvalidRequest(text, "continue_final_message")
        for name in sorted(RESERVED & (self.chat_template_kwargs or {}).keys()):
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{param} is not a switch of the template: give {name} beside it", param)
        return self

    @property
    def heavy_field(self) -> str:
        """Returns the name of a field beside the messages that may take long to render; "" if there is none."""
        switches = (self.chat_template_kwargs or {}).values()
        found = {
            "tools": self.tools,
            "documents": self.documents,
            "chat_template_kwargs": any(map(_long, switches)),
        }
        return next((name for name, given in found.items() if given), "")

    def render(
        self, text: TextModel, messages: Sequence[ConversationMessage], effort_param: str = "reasoning_effort"
    ) -> str:
        """Returns the conversation as prompt text, by the model's chat template.

        Raises InvalidRequest for what the template doesn't support; ``effort_param`` names the effort field in
        errors.
        """
        continues = bool(self.continue_final_message)
        if continues and messages[-1].content is None:
            why = "the final message has no content: there is nothing to continue"
            raise InvalidRequest(why, "continue_final_message")
        if self.documents and "documents" not in text.template_names:
            why = "this model's chat template takes no documents: write them into a message"
            raise InvalidRequest(why, "documents")
        calls = [call for message in messages for call in message.tool_calls or ()]
        require_light_together([call.function.arguments for call in calls], "messages")
        return text.render_chat(
            [message.plain() for message in messages],
            self.add_generation_prompt is not False,
            self._switches(text.template_names, effort_param),
            self.offered_tools,
            self.documents,
            continues,
        )

    def _switches(self, names: frozenset[str], effort_param: str) -> Json:
        """The template's switches, the effort among them. The client's own word goes first."""
        effort, given = self.reasoning_effort, self.chat_template_kwargs or {}
        if effort is None:
            return given
        thinks = {name: effort != "none" for name in THINKING if name in names}
        if "reasoning_effort" in names:
            return {"reasoning_effort": effort} | thinks | given
        if effort == "none" and thinks:
            return thinks | given
        if effort == USUAL:
            return given
        how = "knows thinking on and off only: give none, or leave it out" if thinks else "has none: leave it out"
        raise InvalidRequest(f"{effort_param} is {effort!r}: this model's chat template {how}", effort_param)


def _long(switch: object) -> bool:
    return isinstance(switch, dict | list) or (isinstance(switch, str) and len(switch) > LONG_SWITCH)
