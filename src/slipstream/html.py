"""Pages in one file each, which may run their own script and nothing else."""

import base64
import hashlib
import json
from collections.abc import Iterable
from html import escape
from importlib.resources.abc import Traversable
from string import Template
from typing import Any


def assembled(
    html: Traversable, title: str, styles: Iterable[Traversable], scripts: Iterable[Traversable], data: Any
) -> str:
    """The page `html` with its title, styles and scripts, and with data, which are JSON."""
    style, script = ("".join(file.read_text("utf-8") for file in files) for files in (styles, scripts))
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Template(html.read_text("utf-8")).substitute(
        title=escape(title),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=text.replace("<", "\\u003c"),  # so that no text can end the element that holds it
    )


def _hash(text: str) -> str:
    """The name of an allowed script or style in a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
