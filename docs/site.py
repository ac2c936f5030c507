"""What `make docs` does beyond mkdocs: the README is the first page, files that pages link are part of the
site, and a site that asks a network for anything is no site."""

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?(\))")
ASKED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=["']?((?:https?:)?//[^\s"'>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon|modulepreload|dns-prefetch))"""
    r"""[^>]*?\bhref=["']?((?:https?:)?//[^\s"'>]+)"""
    r"""|url\(["']?((?:https?:)?//[^\s"')]+)|@import\s+["']((?:https?:)?//[^\s"']+)""",
    re.I,
)


def asked(text: str) -> list[str]:
    """Addresses that a browser fetches by itself when it shows a page or reads a style."""
    return [next(filter(None, found)) for found in ASKED.findall(text)]


def linked(text: str, home: str) -> tuple[str, list[str]]:
    """A page of the folder `home` with its links as the site has them, and the project's files that it links:
    those of other folders stand under `files/`."""
    files = []

    def moved(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        if re.match(r"\w+:", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(home, target))
        if path == "README.md":
            place = "index.md"
        elif path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif (ROOT / path).is_file():
            files.append(path)
            place, anchor = f"files/{path}.txt" if path.endswith((".py", ".md")) else f"files/{path}", ""
        else:
            return link[0]
        return f"{before}{place}{anchor or ''}{after}"

    return LINK.sub(moved, text), files


def pages() -> dict[str, str]:
    """The text of each page, by its name in the site."""
    homes = {"index.md": ROOT / "README.md", **{path.name: path for path in (ROOT / "docs").glob("*.md")}}
    return {name: path.read_text("utf-8") for name, path in homes.items()}


def sources(texts: Iterable[tuple[str, str]]) -> set[str]:
    """The project's files that pages link."""
    return {file for name, text in texts for file in linked(text, home_of(name))[1]}


def home_of(page: str) -> str:
    return "" if page == "index.md" else "docs"


def on_files(files: Any, config: Any) -> Any:
    """Add the README, and what pages link outside docs/."""
    from mkdocs.structure.files import File

    texts = pages()
    files.append(File.generated(config, "index.md", content=texts["index.md"]))
    for path in sorted(sources(texts.items())):
        place = linked(f"[x]({path})", "")[0][4:-1]
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links as they stand in the repository into the site's."""
    return linked(markdown, home_of(page.file.src_uri))[0]


def on_post_build(config: Any) -> None:
    """Raise where a built page, style or picture would ask a network."""
    from mkdocs.exceptions import PluginError

    for path in Path(config["site_dir"]).rglob("*"):
        if path.suffix in (".html", ".css", ".svg") and (found := asked(path.read_text("utf-8"))):
            raise PluginError(f"{path.name} asks a network: {', '.join(found)}")
