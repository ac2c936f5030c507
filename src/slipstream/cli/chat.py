"""chat: a conversation in the terminal."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from rich.tree import Tree

from slipstream.cli.common import (
    Compile,
    Device,
    DrafterName,
    Dtype,
    MaxNewTokens,
    OwnTemperature,
    Quantize,
    Seed,
    TargetName,
    command,
    drafters,
    err,
    inputs,
    load,
    on_questions,
    out,
)
from slipstream.command import suggested

if TYPE_CHECKING:
    from slipstream.decode.talk import Talk
    from slipstream.decode.trace import Round

ACCEPTED, ASKS = "green", "› "
HELP = """\
/retry         answer once more, with another seed
/edit          change what you said last, and have it answered
/plain         decode without guesses, or with them again
/drafter NAME  take another drafter
/tree [N]      the guesses of round N of the last answer (default: the largest accepted)
/new           begin another conversation
/help, /quit   this list; the end (Ctrl-D, too)
Ctrl-C stops an answer. What was drafted and accepted is green."""


@command(
    "chat", "chat --target ./my-model --compile", "chat --drafter eagle --temperature 0.7", lists=drafters
)
def chat(
    target: TargetName = "smollm2",
    drafter: DrafterName = "auto",
    system: Annotated[str | None, on_questions("what the system says first", "TEXT")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: OwnTemperature = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    quantize: Quantize = None,
) -> None:
    """Talk with a model. /help lists what there is beside talking.

    Figures stand below each answer. An answer reads what was said before only once.
    """
    inputs(target, [drafter])
    from slipstream.decode.talk import Talk

    loaded = load(target, dtype, device, compile, quantize)
    if loaded.text is None or not loaded.text.has_chat:
        raise ValueError(
            f"target {target} has no chat template: it cannot chat: {suggested('generate')} "
            "goes on with a text"
        )
    with err.status("measuring rounds: a few seconds, once"):
        talk = Talk(loaded, drafter, max_new_tokens=max_new_tokens, temperature=temperature)
    Chat(talk, drafter, system, seed).run()


class Chat:
    """A conversation: what is said, and the commands between."""

    def __init__(self, talk: "Talk", drafter: str, system: str | None, seed: int) -> None:
        self.talk, self.drafter, self.seed = talk, drafter, seed
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, Any]] = [*self.opening]
        self.commands: dict[str, Callable[[str], None]] = {
            "retry": self.retry,
            "edit": self.edit,
            "plain": self.plain,
            "drafter": self.draft_with,
            "tree": self.tree,
            "new": self.new,
            "help": lambda rest: out.print(HELP),
        }

    def run(self) -> None:
        """Until /quit or the end of the input. An answer that is stopped stays, as far as it came."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which ends commands as Ctrl-C does
        err.print(f"{self.talk.target.name}, {self.talk.target.precision}; /help lists commands", style="dim")
        while True:
            try:
                line = asked().strip()
                if line in ("/quit", "/exit"):
                    break
                if line:
                    self.take(line)
            except KeyboardInterrupt:  # at the prompt
                out.print()
            except EOFError:
                out.print()
                break
            except ValueError as error:
                err.print(" ".join(str(error).split()), style="red", soft_wrap=True)

    def take(self, line: str) -> None:
        """A command, or what a person says. Raises ValueError."""
        if not line.startswith("/"):
            self.say(line)
            return
        name, _, rest = line[1:].partition(" ")
        if name not in self.commands:
            raise ValueError(f"there is no /{name}: /help lists what there is")
        self.commands[name](rest.strip())

    def say(self, text: str) -> None:
        """Have a turn answered. Raises ValueError, and forgets the turn."""
        self.turns.append({"role": "user", "content": text})
        try:
            self.answer()
        except ValueError:
            self.turns.pop()
            raise

    def answer(self) -> None:
        """Print the answer to the last turn as it is made, and its figures. Ctrl-C stops it, behind the round
        under way."""
        said, pieces = "", self.talk.answer(self.turns, seed=self.seed)
        with interrupted() as stopped, closing(pieces):
            for round in pieces:
                said += "".join(round)
                rounds = self.talk.made.rounds if self.talk.made else []
                guessed = rounds[-1].accepted if rounds else 0
                painted = Text("".join(round[:guessed]), ACCEPTED) + Text("".join(round[guessed:]))
                out.print(painted, end="", soft_wrap=True)
                if stopped:
                    out.print(Text(" …", "dim"), end="")
                    break
        out.print()
        self.turns.append({"role": "assistant", "content": said})
        self.figures()

    def figures(self) -> None:
        """The status line of the last answer."""
        made = self.talk.made
        assert made is not None
        how = "plain" if self.talk.plain else self.drafter
        speed = f"{len(made.tokens) / made.seconds.total:.1f} tokens/s"
        read = f"{len(made.prompt) - self.talk.shared} of {len(made.prompt)} tokens read"
        err.print(f"{how}   τ {made.tau:.2f}   {speed}   {len(made.tokens)} tokens   {read}", style="dim")

    def last(self) -> str:
        """Forget the last turn and its answer. Raises ValueError where there is none."""
        asked = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        if not asked:
            raise ValueError("nothing was said yet")
        text = str(self.turns[asked[-1]]["content"])
        del self.turns[asked[-1] :]
        return text

    @contextmanager
    def again(self) -> Iterator[str]:
        """Yields the last turn, forgotten with its answer. Both come back if another answer fails."""
        before = [*self.turns], self.seed
        try:
            yield self.last()
        except ValueError:
            self.turns, self.seed = before
            raise

    def retry(self, rest: str) -> None:
        with self.again() as text:
            self.seed += 1
            self.say(text)

    def edit(self, rest: str) -> None:
        with self.again() as text:
            try:
                changed = rest or asked(text)
            except (KeyboardInterrupt, EOFError):
                changed = ""
            if not changed.strip():
                raise ValueError("nothing was changed")
            self.say(changed.strip())

    def plain(self, rest: str) -> None:
        self.talk.plain = not self.talk.plain
        out.print("decoding plainly" if self.talk.plain else f"drafting with {self.drafter}")

    def draft_with(self, rest: str) -> None:
        if not rest:
            raise ValueError("name a drafter: /drafter eagle, /drafter ngram, …")
        self.talk.draft_with(rest)
        self.drafter, self.talk.plain = rest, False
        out.print(f"drafting with {rest}")

    def tree(self, rest: str) -> None:
        rounds = self.talk.rounds
        if not rounds:
            raise ValueError("no answer has taken a round yet")
        if rest and not (rest.isdecimal() and 1 <= int(rest) <= len(rounds)):
            raise ValueError(f"the last answer took rounds 1 to {len(rounds)}: /tree 1")
        best = max(range(len(rounds)), key=lambda i: len(rounds[i].accepted))
        at = int(rest) - 1 if rest else best
        out.print(drawn(rounds[at], at + 1, len(rounds)))

    def new(self, rest: str) -> None:
        self.turns = [*self.opening]
        out.print("another conversation")


def drawn(round: "Round", number: int, of: int) -> Tree:
    """A round's tree, with the target's probability of each node. Accepted nodes are green."""
    accepted = set(round.accepted)

    def label(slot: int) -> Text:
        p = round.p[slot]
        share = "" if p is None else f"  {100 * p:.0f} %"
        return Text(repr(round.texts[slot]), ACCEPTED if slot in accepted else "default") + Text(share, "dim")

    tree = Tree(Text(f"round {number} of {of}: ", "bold") + label(0), guide_style="dim")
    branches = {0: tree}
    for slot in range(1, len(round.tokens)):
        if round.tokens[slot] >= 0:
            branches[slot] = branches[round.parents[slot]].add(label(slot))
    own = Text(f"{round.next_text!r}", "bold") + Text(
        f"  {100 * round.next_p:.0f} %, the target's own", "dim"
    )
    branches[round.accepted[-1]].add(own)
    return tree


@contextmanager
def interrupted() -> Iterator[list[int]]:
    """A list that is not empty once Ctrl-C was pressed, which then does nothing else."""
    signals = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)


def asked(text: str = "") -> str:
    """A line from the person, who may change `text`. Arrows go through what was said before, where there is
    readline."""
    try:
        import readline
    except ModuleNotFoundError:  # not on this system
        return input(ASKS)
    readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        return input(ASKS if sys.stdin.isatty() else "")
    finally:
        readline.set_startup_hook()
