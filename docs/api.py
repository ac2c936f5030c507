"""Writes docs/api.md: signatures and docstrings of all public names, read from the source, which is not
imported. Run it after changing one: python3 docs/api.py"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
PAGE = Path(__file__).with_suffix(".md")
INTRODUCTION = """\
# API

Everything that `slipstream` exports, by what it is for. `python3 docs/api.py` writes this page from the
docstrings of the code: change them there.
"""
SECTIONS = {
    "Answer": """fetch load_target HFTarget slipstream.targets.decoder_target:DecoderTarget RecordedTarget
        generate stream GrammarLimits custom_generate Generation Interrupted Stream load_drafter Sampling""",
    "Measure": """bench BenchReport sweep Sweep reproduce ReproduceReport certify Certificate doctor
        DoctorReport tune TuneReport Question""",
    "Train": "train TrainingRun synthesize regenerate Answers inventory Inventory",
    "Convert": "import_checkpoint export Conversion parity ParityReport",
    "What all results have": "slipstream.results:Result slipstream.results:Report",
    "Write a drafter": "Drafter State Span Tree chain PAD Sampler Target Spec Method METHODS register",
    "Drafters to begin with, and for tests": "Vanilla NGram TreeOracle RandomDrafter",
}
HEADINGS = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises"}
WIDTH = 100
Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """The page's text."""
    parts, homes = [INTRODUCTION], exported()
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names.split():
            module, _, own = name.rpartition(":")
            parts += entry(own, *found(module or homes[own], own))
    return "\n".join(parts)


def exported() -> dict[str, str]:
    """The module that each public name is imported from."""
    tree = ast.parse((SOURCE / "slipstream" / "__init__.py").read_text("utf-8"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {
        name.name: str(node.module) for node in imports for name in node.names if name.name == name.asname
    }


def found(module: str, name: str) -> tuple[ast.stmt, ast.Module]:
    """The definition of a name and the module that has it. Raises LookupError."""
    path = SOURCE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text("utf-8"))
    for node in reversed(tree.body):  # of a function with overloads the last one is the function
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            return found(str(node.module), name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if getattr(node, "name", None) == name or name in [getattr(each, "id", None) for each in targets]:
            return node, tree
    raise LookupError(f"{module} has no {name}")


def entry(name: str, node: ast.stmt, module: ast.Module) -> Iterator[str]:
    """The lines of a public name."""
    yield f"### {name}\n"
    if isinstance(node, Function):
        yield code(signature(name, node, module))
        yield text(node)
    elif isinstance(node, ast.ClassDef):
        yield code(header(node))
        yield text(node)
        for each in node.body:
            if isinstance(each, Function) and not each.name.startswith("_") and ast.get_docstring(each):
                decorators = [ast.unparse(decorator) for decorator in each.decorator_list]
                yield f"#### {name}.{each.name}\n"
                if "property" in decorators:
                    yield code(f"{name}.{each.name}: {ast.unparse(each.returns) if each.returns else 'Any'}")
                else:
                    yield code(signature(f"{name}.{each.name}", each, module))
                yield text(each)
    else:
        yield code(ast.unparse(node))


def header(node: ast.ClassDef) -> str:
    """A class's first line, its public fields, and how it is made where it says so itself."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"class {node.name}({bases})" if bases else f"class {node.name}"]
    lines += [
        f"    {ast.unparse(each)}"
        for each in node.body
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_")
    ]
    made = [each for each in node.body if isinstance(each, Function) and each.name == "__init__"]
    lines += [f"\n{signature(node.name, each, None).removesuffix(' -> None')}" for each in made]
    return "\n".join(lines)


def signature(name: str, node: Function, module: ast.Module | None) -> str:
    """A function's signature, in one line where that is short."""
    given = parameters(node.args, module)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name}({', '.join(given)}){returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in given), f"){returns}"])


def parameters(given: ast.arguments, module: ast.Module | None) -> list[str]:
    """The parameters but for `self`. Options that are a TypedDict are named one by one."""
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults
    made = [
        parameter(*pair) for pair in zip(plain, defaults, strict=True) if pair[0].arg not in ("self", "cls")
    ]
    if given.vararg:
        made.append(f"*{ast.unparse(given.vararg)}")
    elif given.kwonlyargs:
        made.append("*")
    made += [parameter(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        kind = module and unpacked(given.kwarg.annotation)
        options = [f"{field} = None" for field in fields(kind, module)] if kind and module else []
        made += ["*", *options] if options else [f"**{ast.unparse(given.kwarg)}"]
    return made


def parameter(given: ast.arg, default: ast.expr | None) -> str:
    """A parameter as it stands in the source."""
    if default is None:
        return ast.unparse(given)
    return ast.unparse(given) + (" = " if given.annotation else "=") + ast.unparse(default)


def unpacked(annotation: ast.expr | None) -> str | None:
    """The name of the TypedDict in `Unpack[…]`."""
    match = re.fullmatch(r"Unpack\[(\w+)\]", ast.unparse(annotation)) if annotation else None
    return match and match[1]


def fields(kind: str, module: ast.Module) -> Iterator[str]:
    """The fields of a TypedDict, its bases' first."""
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("slipstream"):
            if kind in [alias.name for alias in node.names]:
                yield from fields(kind, found(str(node.module), kind)[1])
        elif isinstance(node, ast.ClassDef) and node.name == kind:
            for base in node.bases:
                yield from fields(ast.unparse(base), module)
            yield from (ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign))


def text(node: Function | ast.ClassDef) -> str:
    """A docstring as Markdown: its sections become lists."""
    told = inspect.cleandoc(ast.get_docstring(node) or "")
    lines, section = list[str](), False
    for line in told.splitlines():
        title = HEADINGS.get(line.removesuffix(":")) if line.endswith(":") else None
        if title:
            lines += [f"**{title}**", ""]
            section = True
        elif section and (item := re.match(r"    ([*\w][*\w, ]*): (.*)", line)):
            names = ", ".join(f"`{each.strip()}`" for each in item[1].split(","))
            lines.append(f"- {names}: {item[2]}")
        elif section and line.startswith("        "):
            lines.append(f"  {line.strip()}")
        elif section:
            lines.append(line.removeprefix("    "))
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """A block of Python, with the quotes of the source."""
    text = re.sub(r"'([^'\"\n]*)'", r'"\1"', text)
    return f"```python\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
