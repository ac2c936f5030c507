"""Spec: a drafter as users name it, such as "eagle:tree=chain-5,proposal=noise"."""

import os
from dataclasses import dataclass, field
from typing import Union

from slipstream.files import name_of

Named = Union[str, os.PathLike[str], "Spec"]  # how a drafter may be named


@dataclass(frozen=True)
class Spec:
    """A drafter's name or directory, and its options as written. `str(spec)` gives what `parse` read."""

    name: str
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, spec: Named) -> "Spec":
        """Read "name:key=value,key=value". A comma that no `key=` follows belongs to the value before it, so
        that `tree=[[0],[1],[0,0]]` and `skip=10,11` are one option each. Raises ValueError for an empty name
        and an option without `key=`."""
        if isinstance(spec, Spec):
            return spec
        text = name_of(spec, "a drafter")
        name, _, tail = text.partition(":")
        options, last = dict[str, str](), ""
        for part in tail.split(",") if tail else ():
            key, equals, value = part.partition("=")
            if equals and key.isidentifier():
                options[key], last = value, key
            elif last:
                options[last] += f",{part}"
            else:
                raise ValueError(
                    f"drafter {text!r}: {part!r} is no option: write key=value, such as eagle:tree=chain-5"
                )
        return cls(name, options)

    def __str__(self) -> str:
        return f"{self.name}:{self.tail}" if self.options else self.name

    @property
    def tail(self) -> str:
        """The options as they are written behind the colon."""
        return ",".join(f"{key}={value}" for key, value in self.options.items())

    def replace(self, **options: str | None) -> "Spec":
        """The same drafter with other options; None takes one away."""
        merged = {**self.options, **options}
        return Spec(self.name, {key: value for key, value in merged.items() if value is not None})
