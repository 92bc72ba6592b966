"""`headrace inspect`: what a shard holds, what is wrong with it, and a page of its first samples."""

import base64
import html
import io
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from headrace.errors import HeadraceError, MissingExtra, bad_value
from headrace.shards.dataset import TarDataset
from headrace.shards.decoding import IMAGES, Decoder
from headrace.shards.fields import ABOUT
from headrace.shards.index import Index
from headrace.shards.names import SUFFIX
from headrace.shards.scanning import scan, some

_THUMBNAIL = 160
"""The largest side of a picture on the page, in pixels."""

_PAGES = (".html", ".htm")
"""How the names of pages end: no other file is replaced by one."""

_OTHER_KINDS = {
    b"headrace\0": "an index: inspect one of the shards that it tells about",
    b"\x1f\x8b": "compressed by gzip: decompress it",
    b"BZh": "compressed by bzip2: decompress it",
    b"\xfd7zXZ\0": "compressed by xz: decompress it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: decompress it",
}
"""What a file is that begins so, and what to do."""

_SHOWN_CHARACTERS = 300
"""How much of a text is shown on the page."""

_STYLE = """body{font:14px sans-serif;margin:1em}main{display:flex;flex-wrap:wrap;gap:1em}
figure{margin:0;width:180px;overflow-wrap:anywhere}img{max-width:160px}figcaption{font-size:12px}"""


@dataclass(frozen=True)
class FieldFacts:
    """A field, over all samples of a shard.

    Attributes:
        name: Its name.
        sizes: The bytes of each sample's, shape (n,).
    """

    name: str
    sizes: NDArray[np.int64]


def run_inspect(shard: str, page: str | None, samples: int, console: Console) -> int:
    """Print what a shard holds, write the page if it is wanted, and return the exit code: 1 if there are problems.

    Raises:
        OSError: The shard cannot be read, or the page cannot be written.
        ValueError: It is another kind of file, or the page would replace one that is no page.
    """
    path = Path(shard)
    if page is not None:
        _check_page(page, path)
    try:
        remarks: list[str] = []
        index = scan(path, remarks=remarks)
    except HeadraceError as error:
        _refuse_other_kinds(path)
        console.print(str(error), style="red", soft_wrap=True)
        return 1
    console.print(f"{shard}: {len(index):,} samples, {path.stat().st_size:,} bytes", soft_wrap=True)
    console.print(_table(fields_of(index)))
    problems = remarks + problems_of(index, path)
    for problem in problems:
        console.print(problem, style="red", soft_wrap=True)
    if page is not None:
        Path(page).write_text(contact_sheet(index, path, samples), encoding="utf-8")
        console.print(f"the first {min(samples, len(index))} samples are shown in {page}", soft_wrap=True)
    return 1 if problems else 0


def _check_page(page: str, path: Path) -> None:
    if not page.lower().endswith(_PAGES):
        bad_value("--html", page, f"a name that ends in {' or '.join(_PAGES)}", f"For example {path.stem}.html.")
    for read in (path, Path(f"{path}{SUFFIX}")):
        if os.path.exists(page) and read.exists() and os.path.samefile(page, read):
            bad_value("--html", page, f"another file than {read}", f"For example {path.stem}.page.html.")


def _refuse_other_kinds(path: Path) -> None:
    with path.open("rb") as file:
        begun = file.read(max(map(len, _OTHER_KINDS)))
    for magic, kind in _OTHER_KINDS.items():
        if begun.startswith(magic):
            raise ValueError(f"{path} is no plain tar shard, but {kind}.")


def fields_of(index: Index) -> list[FieldFacts]:
    """Return the fields of an index, in its order."""
    names, sizes = index.columns["name"], index.columns["size"].astype(np.int64)
    return [FieldFacts(name, sizes[names == number]) for number, name in enumerate(index.names)]


def problems_of(index: Index, path: Path) -> list[str]:
    """Return what a user of the shard should know, in sentences."""
    found = []
    if not len(index):
        found.append("no member belongs to a sample: names need a dot, as 0001.jpg")
    keys = [index.key(sample) for sample in range(len(index))]
    firsts = index.columns["first"].astype(np.int64)
    of_sample = np.repeat(np.arange(len(index)), np.diff(firsts))
    for facts, number in zip(fields_of(index), range(len(index.names)), strict=True):
        has = np.zeros(len(index), bool)
        has[of_sample[index.columns["name"] == number]] = True
        if has.mean() > 0.5 and not has.all():
            lack = np.flatnonzero(~has)
            found.append(
                f"{len(lack)} of {len(index)} samples have no {facts.name!r}: {some([keys[one] for one in lack])}"
            )
        empty = int((facts.sizes == 0).sum())
        if empty:
            found.append(f"{empty} samples have an empty {facts.name!r}")
    beside = Path(f"{path}{SUFFIX}")
    if beside.exists():
        try:
            known = Index.load(beside, mapped=False)
            sizes = [shard.size for shard in known.shards]
            if sizes != [index.shards[0].size] or len(known) != len(index):
                found.append(f"{beside} does not fit the shard. Make it again: headrace index {path}")
        except HeadraceError as error:
            found.append(str(error))
    return found


def _table(fields: list[FieldFacts]) -> Table:
    table = Table("field", "samples", "bytes", "smallest", "median", "largest", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for facts in fields:
        numbers = facts.sizes.sum(), facts.sizes.min(), int(np.median(facts.sizes)), facts.sizes.max()
        table.add_row(facts.name, f"{len(facts.sizes):,}", *(f"{int(number):,}" for number in numbers))
    return table


def contact_sheet(index: Index, path: Path, samples: int) -> str:
    """Return a page in HTML that shows the first samples; it needs no other file.

    Raises:
        MissingExtra: There are images, and Pillow is not installed.
    """
    dataset = TarDataset(index)
    figures = []
    for number in range(min(samples, len(index))):
        fields = dataset[number].items()
        parts = "".join(f"<div>{_shown(name, data)}</div>" for name, data in fields if name not in ABOUT)
        figures.append(f"<figure>{parts}<figcaption>{html.escape(index.key(number))}</figcaption></figure>")
    title = html.escape(path.name)
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>{len(index):,} samples</p><main>{''.join(figures)}</main>\n"
    )


def _shown(name: str, data: bytes) -> str:
    """Return a field in HTML: a picture, a text, or the number of bytes."""
    kind = name.rpartition(".")[2]
    if kind in IMAGES:
        return _picture(name, data)
    try:
        value: Any = Decoder({}, allow_pickle=False)(name, data)
    except Exception as error:  # noqa: BLE001 - the page shows what is wrong
        return f"{html.escape(name)}: <em>{html.escape(str(error)[:_SHOWN_CHARACTERS])}</em>"
    if isinstance(value, bytes):
        return f"{html.escape(name)}: {len(data):,} bytes"
    return f"{html.escape(name)}: {html.escape(str(value)[:_SHOWN_CHARACTERS])}"


def _picture(name: str, data: bytes) -> str:
    try:
        pillow = import_module("PIL.Image")
    except ImportError:
        raise MissingExtra("showing images needs Pillow", "images") from None
    try:
        image = pillow.open(io.BytesIO(data)).convert("RGB")
        image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    except Exception as error:  # noqa: BLE001 - the page shows what is wrong
        return f"{html.escape(name)}: <em>{html.escape(str(error)[:_SHOWN_CHARACTERS])}</em>"
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return f'<img alt="{html.escape(name)}" src="data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}">'
