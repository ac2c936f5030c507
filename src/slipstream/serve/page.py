"""The playground: one page, which needs nothing but this server."""

from importlib.resources import files

from slipstream.html import assembled


def page(model: str, drafter: str, traces: bool, chat: bool = True) -> str:
    """The page for a server's model and drafter, as HTML; `traces`: it may ask for the trees of rounds;
    `chat`: the model has a chat template. Without one the text so far is gone on with."""
    report, own = files("slipstream.measure.report") / "page", files("slipstream.serve") / "page"
    scripts = [report / "dom.js", report / "tree.js", own / "playground.js"]  # both draw the same trees
    styles = [report / "page.css", own / "playground.css"]
    data = {"model": model, "drafter": drafter, "trace": traces, "chat": chat}
    return assembled(own / "playground.html", model, styles, scripts, data)
