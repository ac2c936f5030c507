"""chat: a conversation in the terminal."""

import json
import os
import re
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from slipstream.cli import common as cli
from slipstream.cli.common import err, out
from slipstream.files import check_writable, replacing
from slipstream.provenance import suggested

if TYPE_CHECKING:
    from slipstream.engine.chat_session import ChatSession
    from slipstream.engine.trace import TracedStep

ACCEPTED, ASKS = "green", "› "
HELP = """\
/retry           answer once more, with another seed
/edit            change what you said last, and have it answered
/system [TEXT]   what the system says first; without a text, nothing
/temperature T   0 is greedy
/plain           decode without guesses, or with them again
/drafter NAME    take another drafter
/tree [N]        the guesses of round N of the last answer (default: the largest accepted)
/save FILE       write the conversation, as a line of JSON that train reads
/new             begin another conversation
/help, /quit     this list; the end (Ctrl-D, too)
Alt+Enter, or a backslash at its end, begins another line of a turn. Pasted lines are one turn.
Ctrl-C stops an answer. What was drafted and accepted is green."""
PASTES_BEGIN, PASTES_END = "\x1b[?2004h", "\x1b[?2004l"  # pasted text is bracketed
ENDED = {"eos": "stop", "stop": "stop"}  # as OpenAI's clients are told


@cli.command(
    "chat",
    "chat --target ./my-model --compile",
    "chat --drafter eagle --temperature 0.7",
    takes=f"target drafter draft_model system max_new_tokens own_temperature seed {cli.MACHINE}",
    max_new_tokens=512,
)
def chat(options: cli.Arguments) -> None:
    """ChatSession with a model. /help lists what there is beside talking.

    Figures stand below each answer. An answer reads what was said before only once.
    """
    drafter = cli.with_model(options.drafter, options.draft_model)
    cli.inputs(options.target, [drafter])
    from slipstream.engine.chat_session import ChatSession

    with without_echo():
        target = options.load()
        if target.text is None or not target.text.has_chat:
            instead = f"{suggested('generate')} goes on with a text"
            raise ValueError(f"target {options.target} has no chat template: it cannot chat: {instead}")
        with err.status(cli.MEASURING):
            limits = {"max_new_tokens": options.max_new_tokens, "temperature": options.own_temperature}
            talk = ChatSession(target, drafter, **limits)
    Chat(talk, drafter, options.system, options.seed).run()


class Chat:
    """A conversation, and the commands between its turns."""

    def __init__(self, talk: "ChatSession", drafter: str, system: str | None, seed: int) -> None:
        self.talk, self.drafter, self.seed = talk, drafter, seed
        self.ask: Callable[[str], str] = plainly
        self.saved = set[str]()  # files
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, Any]] = [*self.opening]

    def run(self) -> None:
        """Until /quit or the end of the input. An answer that is stopped stays, as far as it came."""
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # not as Ctrl-C, which stays
        self.ask = editor() if is_terminal() else plainly
        err.print(f"{self.talk.target.name}, {self.talk.target.precision}; /help lists commands", style="dim")
        while True:
            try:
                line = self.ask("").strip()
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
        """Do what a line says: a command, or a turn. Raises ValueError."""
        if not line.startswith("/"):
            self.say(line)
            return
        name, rest = re.fullmatch(r"/(\S*)\s*(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        command = getattr(self, f"do_{name}", None)
        if command is None:
            raise ValueError(f"there is no /{name}: /help lists what there is")
        command(rest.strip())

    def say(self, text: str) -> None:
        """Answer a turn. Raises ValueError, and forgets the turn."""
        self.turns.append({"role": "user", "content": text})
        try:
            self.answer()
        except ValueError:
            self.turns.pop()
            raise

    def answer(self) -> None:
        """Print the answer to the last turn as it is made, and its figures. Ctrl-C stops it after a step."""
        text, steps = "", self.talk.answer(self.turns, seed=self.seed)
        with interrupted() as stopped, without_echo(), closing(steps), wrapping(out) as show:
            for pieces in steps:
                text += "".join(pieces)
                rounds = self.talk.last.rounds if self.talk.last else []
                accepted = rounds[-1].accepted if rounds else 0
                show("".join(pieces[:accepted]), ACCEPTED)
                show("".join(pieces[accepted:]), "")
                if stopped:
                    show(" …", "dim")
                    break
        out.print()
        self.turns.append({"role": "assistant", "content": text})
        answer = self.talk.last
        assert answer is not None
        limit = self.talk.options.get("max_new_tokens")
        length = f"--max-new-tokens is {limit}"
        if len(answer.tokens) != limit:
            length = f"the window's {self.talk.target.window:,} tokens are full"
        ended = "interrupted" if stopped else ENDED.get(answer.finish, f"length: {length}")
        how = "plain" if self.talk.plain else self.drafter
        speed = f"{len(answer.tokens) / answer.seconds.total:.1f} tokens/s"
        read = f"{len(answer.prompt) - self.talk.shared} of {len(answer.prompt)} tokens read"
        figures = f"{how}   τ {answer.tau:.2f}   {speed}   {len(answer.tokens)} tokens   {read}   {ended}"
        err.print(figures, style="dim", soft_wrap=not err.is_terminal)

    @contextmanager
    def again(self) -> Iterator[str]:
        """Yields the last turn, forgotten with its answer. Both come back if another answer fails. Raises
        ValueError where there is no turn."""
        before = [*self.turns], self.seed
        asked = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        if not asked:
            raise ValueError("nothing was said yet")
        text = str(self.turns[asked[-1]]["content"])
        del self.turns[asked[-1] :]
        try:
            yield text
        except ValueError:
            self.turns, self.seed = before
            raise

    def do_retry(self, rest: str) -> None:
        with self.again() as text:
            if not self.talk.temperature:
                same = "at temperature 0 no seed changes an answer: it will be the same (/temperature 0.7)"
                err.print(same, style="yellow")
            self.seed += 1
            self.say(text)

    def do_edit(self, rest: str) -> None:
        with self.again() as text:
            try:
                changed = rest or self.ask(text)
            except (KeyboardInterrupt, EOFError):
                changed = ""
            if not changed.strip():
                raise ValueError("nothing was changed")
            self.say(changed.strip())

    def do_system(self, rest: str) -> None:
        turns = self.turns[len(self.opening) :]
        self.opening = [{"role": "system", "content": rest}] if rest else []
        self.turns = [*self.opening, *turns]
        out.print("from now on the system says this first" if rest else "no system message")

    def do_temperature(self, rest: str) -> None:
        before = self.talk.options.get("temperature")
        try:
            if rest:
                self.talk.options["temperature"] = float(rest)
                self.talk.draft_with(self.drafter)  # which may take other trees at another temperature
        except ValueError as error:
            self.talk.options["temperature"] = before
            what = f"temperature is {rest!r}; it must be a number: /temperature 0.7"
            raise ValueError(what if "convert" in str(error) else str(error)) from error
        out.print(f"temperature {self.talk.temperature:g}")

    def do_save(self, rest: str) -> None:
        if not rest:
            raise ValueError("name a file: /save talk.jsonl")
        path = os.path.expanduser(rest)
        if path not in self.saved and os.path.exists(path):
            raise ValueError(f"{rest} is there already: name another file")
        check_writable(path)
        with replacing(path) as file:
            file.write(json.dumps({"messages": self.turns}, ensure_ascii=False) + "\n")
        self.saved.add(path)
        out.print(f"{len(self.turns)} messages in {rest}", soft_wrap=True)

    def do_plain(self, rest: str) -> None:
        self.talk.plain = not self.talk.plain
        out.print("decoding plainly" if self.talk.plain else f"drafting with {self.drafter}")

    def do_drafter(self, rest: str) -> None:
        if not rest:
            raise ValueError("name a drafter: /drafter eagle, /drafter ngram, …")
        self.talk.draft_with(rest)
        self.drafter, self.talk.plain = rest, False
        out.print(f"drafting with {rest}")

    def do_tree(self, rest: str) -> None:
        rounds = self.talk.steps
        if not rounds:
            raise ValueError("no answer has taken a round yet")
        if rest and not (rest.isdecimal() and 1 <= int(rest) <= len(rounds)):
            raise ValueError(f"the last answer took rounds 1 to {len(rounds)}: /tree 1")
        best = max(range(len(rounds)), key=lambda i: len(rounds[i].accepted))
        i = int(rest) - 1 if rest else best
        out.print(drawn(rounds[i], i + 1, len(rounds)))

    def do_new(self, rest: str) -> None:
        self.turns = [*self.opening]
        out.print("another conversation")

    def do_help(self, rest: str) -> None:
        out.print(HELP)


def drawn(round: "TracedStep", number: int, of: int) -> Tree:
    """A round's tree, with the target's probability of each node. Accepted nodes are green."""

    def label(slot: int) -> Text:
        p, colour = round.p[slot], ACCEPTED if slot in round.accepted else "default"
        return Text(repr(round.texts[slot]), colour) + Text("" if p is None else f"  {100 * p:.0f} %", "dim")

    tree = Tree(Text(f"round {number} of {of}: ", "bold") + label(0), guide_style="dim")
    branches = {0: tree}
    for slot in range(1, len(round.tokens)):
        if round.tokens[slot] >= 0:
            branches[slot] = branches[round.parents[slot]].add(label(slot))
    share = f"  {100 * round.next_p:.0f} %, the target's own"
    branches[round.accepted[-1]].add(Text(f"{round.next_text!r}", "bold") + Text(share, "dim"))
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


@contextmanager
def without_echo() -> Iterator[None]:
    """Keys typed in this context are not shown. They wait for the next prompt, but for Ctrl-C."""
    if not sys.stdin.isatty():
        yield
        return
    terminal, pastes = sys.stdin.fileno(), is_terminal()
    before, quiet = termios.tcgetattr(terminal), termios.tcgetattr(terminal)
    quiet[0] &= ~termios.ICRNL
    quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        print(PASTES_BEGIN * pastes, end="", flush=True)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
        print(PASTES_END * pastes, end="", flush=True)


@contextmanager
def wrapping(console: Console) -> Iterator[Callable[[str, str], None]]:
    """A function that prints pieces of a text in a style each, and breaks lines between words where the
    console is a terminal. What may be a part of a word waits for its end."""
    word, gap, column = Text(), "", 0

    def end_word() -> None:
        nonlocal word, gap, column
        if not word:
            return
        wide = cell_len(word.plain)
        if gap and column and column + len(gap) + wide > console.width:
            gap, column = "\n", 0
        console.print(Text(gap) + word, end="", soft_wrap=True)
        column = (column + len(gap.strip("\n")) + wide - 1) % console.width + 1
        word, gap = Text(), ""

    def show(text: str, style: str) -> None:
        nonlocal gap, column
        if not console.is_terminal:
            console.print(Text(text), end="", soft_wrap=True)
            return
        for letter in text.expandtabs():
            wide = cell_len(letter) > 1  # Chinese breaks anywhere, by the terminal itself
            if letter.isspace() or wide:
                end_word()
            if letter == "\n":
                console.print(gap, soft_wrap=True)
                gap, column = "", 0
            elif letter.isspace():
                gap += letter
            else:
                word.append(letter, style)
                if wide or cell_len(word.plain) >= console.width:
                    end_word()

    yield show
    end_word()


def is_terminal() -> bool:
    """Whether a person types at a terminal that can edit lines."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def plainly(text: str) -> str:
    """A turn of plain lines. A line that ends in a backslash is continued. Raises EOFError."""
    turn = input(asks := ASKS if sys.stdin.isatty() else "")
    with suppress(EOFError):
        while turn.endswith("\\"):
            line = input(asks)
            turn = f"{turn[:-1]}\n{line}"
    return turn


def editor() -> Callable[[str], str]:
    """Asks for a turn by prompt_toolkit, and begins with the text that it is given. Alt+Enter begins another
    line, too, pasted lines stay together, and arrows go through earlier turns."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session = PromptSession[str](ASKS, multiline=True, key_bindings=keys, prompt_continuation=" " * len(ASKS))
    return lambda text: session.prompt(default=text)
