"""Tool calls in an answer's text, in the form that most chat templates teach: <tool_call>{…}</tool_call>."""

import json
import re
from collections.abc import Collection
from typing import Any
from uuid import uuid4

OPENS = "<tool_call>"
CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


class Calls:
    """Splits an answer's text, as it comes, into text and tool calls.

    Args:
        names: of the tools that may be called. A call of another tool is text.
        several: an answer may call more than once; otherwise the first call counts.
    """

    def __init__(self, names: Collection[str] = (), several: bool = True) -> None:
        self._names, self._several = names, several
        self._held = ""  # from the first call on, or what may become one

    def part(self, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """What the answer certainly says with this piece, and at its end what it calls. What is no call is
        text, between and after calls, too."""
        if not self._names:
            return text, []
        self._held += text
        at = self._held.find(OPENS)
        if at < 0:
            partial = (n for n in range(len(OPENS) - 1, 0, -1) if self._held.endswith(OPENS[:n]))
            at = len(self._held) - next(partial, 0)
        text, self._held = self._held[:at], self._held[at:]
        if not ended:
            return text, []
        calls = [_call(match[1]) for match in CALL.finditer(self._held)]
        known = [call for call in calls if call is not None and call["function"]["name"] in self._names]
        if known and len(known) == len(calls):
            rest = CALL.sub("", self._held).strip()
            return text + rest, known if self._several else known[:1]
        return text + self._held, []


def _call(text: str) -> dict[str, Any] | None:
    """A call as OpenAI has it, from JSON with a name and arguments by name, which may be text once more."""
    try:
        called = json.loads(text)
        arguments = called.get("arguments", called.get("parameters", {}))
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError, AttributeError):
        return None
    if not isinstance(arguments, dict) or not isinstance(called.get("name"), str):
        return None
    function = {"name": called["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
