"""Request bodies whose every field is accounted for: obeyed, refused by name, harmless, or reported as ignored.

Knows nothing of what any field means (``foreign_fields`` does).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import ClassVar

from pydantic import ConfigDict, model_validator

from baton.protos.errors import InvalidRequest
from baton.protos.json import Json
from baton.router.api.body import Body
from baton.router.api.foreign_fields import reason, refusable, refusal

IGNORED_HEADER = "x-baton-ignored"
MOST_NAMED = 16  # ignored fields that the answer's header names
MOST_LOOKED_AT = 256  # unknown fields that are looked at, because a body may have a million
_STRICT = re.compile(r"tools\.\d+\.(function\.)?strict")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class RequestBody(Body):
    """Base of bodies that account for every field: undeclared ones are refused, known to be harmless, or reported
    as ignored.

    ``surface`` is the body's name in ``foreign_fields``; ``inside`` prefixes field names of a nested body in
    errors.
    """

    model_config = ConfigDict(extra="allow")
    surface: ClassVar[str] = ""
    inside: ClassVar[str] = ""

    @model_validator(mode="after")
    def _refuse_what_cannot_be_obeyed(self) -> RequestBody:
        given = self.extra
        for name in refusable(self.surface) if given else ():  # few, where a client may send a million
            if name in given:
                refuse(self.surface, name, given[name], self.inside)
        return self

    @property
    def extra(self) -> Json:
        """Returns the fields that were given but that the body doesn't declare."""
        return self.__pydantic_extra__ or {}

    def ignored(self) -> Iterator[str]:
        """Yields the names of unknown fields, in this body and in nested ones; at most MOST_LOOKED_AT fields of
        each are examined.
        """
        for name in islice(self.extra, MOST_LOOKED_AT):
            if not reason(self.surface, name) and refusal(self.surface, name) is None:
                yield self.inside + name
        for name in self.model_fields_set:
            value = getattr(self, name)
            if isinstance(value, RequestBody):
                yield from value.ignored()


def refuse(surface: str, name: str, value: object, inside: str = "") -> None:
    """Raises InvalidRequest if field ``name`` is refused at ``surface`` and ``value`` asks for something.

    ``inside`` is prefixed to the name in the error.
    """
    found = refusal(surface, name)
    if found is not None and found.refuses(value):
        shown = inside + name
        raise InvalidRequest(f"{shown} is not supported: {found.remedy}", shown)


def ignored_header(body: RequestBody, binds_calls: bool = False) -> dict[str, str]:
    """Returns the response header, as a dict, that names unknown fields which had no effect; {} if there are
    none. ``binds_calls`` says that ``strict`` of tools has one.
    """
    told = (name for name in body.ignored() if not (binds_calls and _STRICT.fullmatch(name)))
    names = list(islice(filter(_NAME.fullmatch, told), MOST_NAMED))
    return {IGNORED_HEADER: ", ".join(names)} if names else {}
