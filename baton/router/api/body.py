"""Request bodies as JSON with strict types; errors name the first field at fault as OpenAI does.

Knows nothing of what any body means.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails

from baton.protos.errors import InvalidRequest
from baton.protos.json import Json

SCHEMA_REF = "#/components/schemas/{model}"
B = TypeVar("B", bound="Body")
_UNION_ARMS = {"str", "int", "bool", "float", "dict", "[key]"}  # and the names of bodies, as they are declared
_WORDS = "literal["  # how pydantic calls the arm of a union that is some words


def _fail_fast(schema: object) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "set", "tuple"):
            schema["fail_fast"] = True
        for key, part in schema.items():
            if key != "metadata":
                _fail_fast(part)
    elif isinstance(schema, list):
        for part in schema:
            _fail_fast(part)


class FailFastModel(BaseModel):
    """Stops validating a list at its first wrong item, because an error is reported for that item only (10^5 errors
    take half a second to format).
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns pydantic's own schema, its lists failing fast."""
        schema = handler(source)
        _fail_fast(schema)
        return schema


class Body(FailFastModel):
    """Base of request bodies, with strict types: "16" is no number, 1 is no boolean; NaN and infinities are
    refused; unknown fields are ignored.

    ``id_lists``: names of fields that hold token ids, possibly very many.
    """

    id_lists: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    def __init_subclass__(cls) -> None:
        """Notes the body's name, by which pydantic calls the arm of a union that is this body."""
        super().__init_subclass__()
        _UNION_ARMS.add(cls.__name__)


def body_docs(kind: type[Body]) -> Json:
    """Returns the part of an OpenAPI operation that says its body is a ``kind``; ``app.py`` adds the schema
    referred to.
    """
    schema = {"$ref": SCHEMA_REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def parse_body(kind: type[B], raw: bytes) -> B:
    """Parses ``raw`` as JSON of ``kind``. Raises InvalidRequest naming the first field at fault."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(error) from None


def read_body_of(kind: type[B], fields: Json) -> B:
    """Validates the decoded JSON object ``fields`` as a ``kind``.

    Raises InvalidRequest naming the first field at fault.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> InvalidRequest:
    found = error.errors(include_url=False, include_context=False)
    first = next((one for one in found if not _is_of_words(one)), found[0])
    param = _path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {message}" if param else message, param)


def _is_of_words(error: ErrorDetails) -> bool:
    """Returns whether the error is that an object is none of the words that might be given in its place."""
    arm = error["loc"][-1] if error["loc"] else ""
    return str(arm).startswith(_WORDS) and isinstance(error["input"], dict)


def _path(loc: tuple[int | str, ...]) -> str:
    """A field's path as OpenAI writes it: messages[0].content."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _UNION_ARMS and not part.startswith(("list[", "dict[", _WORDS)):
            path += f".{part}" if path else part
    return path
