"""The playground: one page, which needs nothing but this server."""

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from string import Template

SHARED = ("dom", "tree")  # scripts of the report's page, which draws the same trees


def page(model: str, drafter: str, traces: bool) -> str:
    """The page for a server's model and drafter, as HTML; `traces`: it may ask for the trees of rounds."""
    report, own = files("slipstream.measure") / "page", files("slipstream.serve") / "page"
    scripts = [*(report / f"{part}.js" for part in SHARED), own / "playground.js"]
    script = "".join(each.read_text("utf-8") for each in scripts)
    style = "".join(each.read_text("utf-8") for each in (report / "page.css", own / "playground.css"))
    data = json.dumps({"model": model, "drafter": drafter, "trace": traces}, ensure_ascii=False)
    return Template((own / "playground.html").read_text("utf-8")).substitute(
        title=escape(model),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=data.replace("<", "\\u003c"),  # so that no name can end the element that holds it
    )


def _hash(text: str) -> str:
    """What a Content-Security-Policy calls a script or a style that may stand in the page."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
