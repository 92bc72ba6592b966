"""The code in the pages, and how tests run it.

A comment in the line above a block says how it runs, with one or more of these, separated by semicolons:

    <!-- run: alone -->                 in a namespace and a folder of its own: a complete script
    <!-- run: with NAME -->             after tests/docs/before/NAME.py, which makes what the block speaks of
    <!-- run: then NAME -->             before tests/docs/after/NAME.py, which looks at what the block made
    <!-- run: OLD as NEW -->            with this text replaced, since the page speaks of more than a test can have
    <!-- run: on gpu -->                with "cuda" replaced by "cpu", where there is no such device
    <!-- run: only on gpu -->           alone, and only where there is one
    <!-- run: prints "TEXT" -->         and must print this
    <!-- run: after prints "TEXT" -->   of a diff this side; likewise before
    <!-- run: needs MODULE -->          alone, and only where this package is installed
    <!-- run: on 2 ranks -->            alone, on so many ranks
    <!-- run: on ray -->                in a process that may join a Ray cluster
    <!-- run: into FILE -->             is written into this file instead
    <!-- run: continued -->             commands, together with the page's Python
    <!-- run: before -->, after         of a diff this side alone

The blocks of a page without "alone" share one namespace and one folder, in order: they are one example. Both sides of a
```diff run, each alone. In blocks that are no Python, the commands of headrace run if there is such a comment;
otherwise they are only parsed.
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^(?:<!-- run: (?P<how>.*?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
_PART = re.compile(r'(?:"[^"]*"|[^;"])+')
_COMMAND = re.compile(r"^(?:\$ )?(headrace .*)$", re.M)
_INLINE = re.compile(r"`(headrace [a-z][^`]*)`")


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Attributes:
        page: The page's name.
        line: Where its code begins in the page, from 1.
        language: What its fence says.
        code: What stands in it.
        how: The parts of the comment above it.
    """

    page: Path
    line: int
    language: str
    code: str
    how: tuple[str, ...]

    @property
    def first_line(self) -> str:
        """The first line of its code."""
        return self.code.partition("\n")[0]

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of headrace in it."""
        return [shlex.split(line, comments=True) for line in _COMMAND.findall(self.code)]

    def named(self, key: str) -> list[str]:
        """Return what follows a key in the comment, for each time it is there."""
        return [part.removeprefix(key).strip() for part in self.how if part.startswith(f"{key} ")]

    @property
    def alone(self) -> bool:
        """Whether it shares no namespace."""
        alone = bool({"alone", "only on gpu"} & {*self.how}) or bool(self.named("needs"))
        return alone or (self.language != "python" and "continued" not in self.how)

    def replaced(self, code: str) -> str:
        """Return code with what the comment wants replaced."""
        for part in self.how:
            old, wanted, new = part.partition(" as ")
            if wanted and "prints " not in part:
                assert old in self.code, f"{self.page.name}:{self.line}: there is no {old}"
                code = code.replace(old, new)
        return code.replace('"cuda"', '"cpu"') if "on gpu" in self.how and not torch.cuda.is_available() else code


class Step(NamedTuple):
    """One step of a group.

    Attributes:
        kind: "python", "command", or "file" for code that is only written to one.
        code: The code, or the command.
        file: Where Python code comes from; the name of the file to write.
        line: Where the code begins in its file, from 1.
    """

    kind: str
    code: str
    file: str = ""
    line: int = 1


@dataclass
class Group:
    """What runs in one process.

    Attributes:
        name: The page, and the line of its first block if that is alone.
        steps: What it does in turn.
        prints: What its output must have.
        needs: The packages that it needs.
        on_ray: Whether it needs a Ray cluster.
        on_gpu: Whether it needs a GPU.
        ranks: How many processes run it, as ranks of a group; 0 for one that is no rank.
    """

    name: str
    steps: list[Step] = field(default_factory=list)
    prints: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    on_ray: bool = False
    on_gpu: bool = False
    ranks: int = 0

    def add(self, block: Block, code: str, side: str = "") -> None:
        """Let a block, or one side of a diff, run after the others."""
        for name in block.named("with"):
            self._add_file(HERE / "before" / f"{name}.py")
        if file := block.named("into"):
            self.steps.append(Step("file", code, *file))
        elif block.language in ("python", "diff"):
            self.steps.append(Step("python", block.replaced(code), str(block.page), block.line))
        else:
            self.steps += [Step("command", block.replaced(shlex.join(command))) for command in block.commands]
        for name in block.named("then"):
            self._add_file(HERE / "after" / f"{name}.py")
        texts = block.named("prints") + (block.named(f"{side} prints") if side else [])
        self.prints += [text.strip('"') for text in texts]
        self.needs += block.named("needs")
        self.on_ray |= "on ray" in block.how
        self.on_gpu |= "only on gpu" in block.how
        self.ranks = max([self.ranks, *(int(on.split()[0]) for on in block.named("on") if on.endswith("ranks"))])

    def _add_file(self, file: Path) -> None:
        self.steps.append(Step("python", file.read_text(), str(file)))


def blocks_of(page: Path) -> list[Block]:
    """Return all blocks of a page, in order."""
    text, found = page.read_text(), []
    for match in _FENCE.finditer(text):
        how = tuple(part.strip() for part in _PART.findall(match["how"] or ""))
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(page, line, match["language"], match["code"], how))
    return found


def inline_commands(page: Path) -> list[list[str]]:
    """Return the words of each command of headrace that a page names outside of blocks."""
    prose = _FENCE.sub("", page.read_text())
    return [shlex.split(command.replace("\n", " ")) for command in _INLINE.findall(prose)]


def sides(diff: str) -> tuple[str, str]:
    """Return what stands in a diff before and after."""
    lines = diff.splitlines(keepends=True)
    before, after = ("".join(line[1:] for line in lines if line[:1] != without) for without in "+-")
    return before, after


def groups_of(page: Path) -> list[Group]:
    """Return what of a page runs."""
    shared, groups = Group(page.name), []
    for block in blocks_of(page):
        codes = {"": block.code}
        if block.language == "diff":
            codes = dict(zip(("before", "after"), sides(block.code), strict=True))
            codes = {side: code for side, code in codes.items() if side in block.how or not {*codes} & {*block.how}}
        elif block.language != "python" and not block.how:
            continue
        for side, code in codes.items():
            group = Group(f"{page.name}:{block.line}") if block.alone else shared
            group.add(block, code, side)
            if block.alone:
                groups.append(group)
    return [shared, *groups] if shared.steps else groups
