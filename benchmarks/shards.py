"""Photographs in tar shards: reading, and decoding with a random crop, beside webdataset and torch over a folder."""

import io
import os
import random
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import grain
import numpy as np
import simplejpeg  # type: ignore[import-untyped]
import webdataset
from PIL import Image
from spdl.pipeline import PipelineBuilder
from torch.utils.data import DataLoader as Torch
from torch.utils.data import Dataset, default_collate

from benchmarks.rows import Row, compared, in_turn
from headrace import DataLoader, ShardWriter, TarDataset
from headrace.memory.slots import keep_freed_memory
from headrace.shards.scanning import scan

SAMPLES = 5_120
PER_SHARD = 160
BATCH = 64
RUNS = 5
READS = 15
SIDE = 224


def pictures() -> list[np.ndarray[Any, Any]]:
    """Return photographs that scikit-learn and scikit-image bring along."""
    found = [*import_module("sklearn.datasets").load_sample_images().images]
    data = import_module("skimage.data")
    return found + [getattr(data, name)() for name in ("astronaut", "coffee", "chelsea", "rocket")]


def make(folder: Path) -> None:
    """Write crops of the photographs as JPEGs of 50 to 110 KB, into shards and into files."""
    draw = random.Random(0)
    sources = [Image.fromarray(picture).resize((900, 700), Image.Resampling.LANCZOS) for picture in pictures()]
    (folder / "files").mkdir()
    with ShardWriter(folder / "%05d.tar", maxcount=PER_SHARD) as writer:
        for number in range(SAMPLES):
            source = draw.choice(sources)
            left, top = draw.randrange(900 - 480), draw.randrange(700 - 400)
            file, quality = io.BytesIO(), 98
            crop = source.crop((left, top, left + 480, top + 400))
            crop.save(file, "JPEG", quality=quality)
            while not 50_000 <= file.tell() <= 110_000:
                quality += 1 if file.tell() < 50_000 else -4
                if quality > 100:
                    break
                file = io.BytesIO()
                crop.save(file, "JPEG", quality=quality)
            writer.write({"__key__": f"{number:06}", "cls": number % 10, "jpg": file.getvalue()})
            (folder / "files" / f"{number:06}.jpg").write_bytes(file.getvalue())


def crop(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a random crop."""
    top = random.randrange(pixels.shape[0] - SIDE + 1)
    left = random.randrange(pixels.shape[1] - SIDE + 1)
    return pixels[top : top + SIDE, left : left + SIDE]


def cropped(sample: tuple[Any, int]) -> tuple[Any, int]:
    """Return a sample with its picture cropped."""
    return crop(sample[0]), sample[1]


def by_simplejpeg(field: str, data: bytes) -> Any:
    """Decode JPEGs as webdataset's handlers do."""
    return simplejpeg.decode_jpeg(data, "RGB") if field.endswith("jpg") else None


class Folder(Dataset[Any]):
    """The same pictures as files."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(map(str, (folder / "files").iterdir()))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        data = Path(self.paths[index]).read_bytes()
        return crop(simplejpeg.decode_jpeg(data, "RGB")), index % 10


def labelled(path: str) -> tuple[np.ndarray[Any, Any], int]:
    """Return the crop of a picture in a file, and its class."""
    return crop(simplejpeg.decode_jpeg(Path(path).read_bytes(), "RGB")), int(Path(path).stem) % 10


def by_grain(folder: Path) -> Any:
    """Return Grain's pipeline over the files, in two processes."""
    paths = grain.MapDataset.source(Folder(folder).paths).shuffle(seed=0)
    read = paths.map(labelled).batch(BATCH).to_iter_dataset()
    return read.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))


class BySpdl:
    """SPDL's pipeline over the files, in two threads.

    Args:
        folder: The folder of the files' folder.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = Folder(folder).paths

    def __iter__(self) -> Iterator[Any]:
        builder: Any = PipelineBuilder()
        builder = builder.add_source(random.sample(self.paths, len(self.paths)))
        builder = builder.pipe(labelled, concurrency=2).aggregate(BATCH).pipe(default_collate)
        pipeline = builder.add_sink(4).build(num_threads=2)
        with pipeline.auto_stop():
            yield from pipeline


def theirs(folder: Path) -> Any:
    """Return webdataset's reader of the shards."""
    return webdataset.WebDataset(
        sorted(map(str, folder.glob("*.tar"))),
        shardshuffle=False,
        empty_check=False,
        workersplitter=webdataset.split_by_worker,
    )


def per_sample(read: Callable[[], Iterable[Any]]) -> tuple[float, ...]:
    """Return the microseconds per sample of reading all."""
    start = time.perf_counter()
    count = sum(1 for _ in read())
    assert count == SAMPLES, count
    return ((time.perf_counter() - start) * 1e6 / count,)


def asked_of_the_system(read: Callable[[], Iterable[Any]]) -> tuple[float, ...]:
    """Return how many reads a sample takes, and of how many bytes."""
    if not Path("/proc/self/io").exists():
        return 0.0, 0.0
    before = _reads()
    count = sum(1 for _ in read())
    calls, size = (now - then for now, then in zip(_reads(), before, strict=True))
    return calls / count, size / count


def _reads() -> tuple[int, int]:
    """Return the number of reads of this process so far, and their bytes."""
    said = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(said["syscr"]), int(said["rchar"])


def per_member(folder: Path, found: Callable[[Path], int]) -> tuple[float, ...]:
    """Return the microseconds per member of finding out where all lie."""
    start = time.perf_counter()
    count = sum(map(found, sorted(folder.glob("*.tar"))))
    return ((time.perf_counter() - start) * 1e6 / count,)


def by_scan(path: Path) -> int:
    """Index a shard; return the number of its members."""
    return len(scan(path).columns["block"])


def by_tarfile(path: Path) -> int:
    """Read a shard's headers as Python's own module does; return the number of its members."""
    with tarfile.open(path, "r:") as archive:
        return len(archive.getmembers())


def by_number(dataset: TarDataset, order: np.ndarray[Any, Any]) -> Iterator[Any]:
    """Read samples undecoded, in batches."""
    for start in range(0, SAMPLES, BATCH):
        for raw in dataset.read_many(order[start : start + BATCH].tolist()):
            yield dataset.decode(raw)


def bare(places: list[tuple[str, list[tuple[int, int]]]]) -> Iterator[Any]:
    """Read the same bytes without anything else."""
    descriptors: dict[str, int] = {}
    for path, ranges in places:
        if path not in descriptors:
            descriptors[path] = os.open(path, os.O_RDONLY)
        descriptor = descriptors[path]
        yield [os.pread(descriptor, size, start) for start, size in ranges]
    for descriptor in descriptors.values():
        os.close(descriptor)


def places(dataset: TarDataset, order: np.ndarray[Any, Any]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return the file and the byte ranges of each sample's fields."""
    at = dataset.index.places(order.tolist())
    found = []
    for number, shard in enumerate(at.shard):
        fields = range(at.first[number], at.first[number + 1])
        found.append((dataset.index.shards[shard].name, [(at.header[one] + 512, at.size[one]) for one in fields]))
    return found


def per_batch(loader: Any) -> tuple[float, ...]:
    """Return the milliseconds per batch, without the start."""
    reader = iter(loader)
    for _ in range(4):
        next(reader)
    start = time.perf_counter()
    count = sum(1 for _ in reader)
    return ((time.perf_counter() - start) * 1e3 / count,)


def shards() -> Iterator[Row]:
    """Compare reading and decoding with webdataset, torch and a bare loop."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-shards-"))
    try:
        make(folder)
        yield from _rows(folder)
    finally:
        shutil.rmtree(folder)


def _rows(folder: Path) -> Iterator[Row]:
    keep_freed_memory()  # for all readers, as in a worker process
    dataset = TarDataset(f"{folder}/*.tar")
    epoch = dataset.order.epoch(0, 0, SAMPLES)
    in_order, shuffled = np.arange(SAMPLES), np.asarray(epoch(np.arange(SAMPLES)))
    ways_of_reading: dict[str, Callable[[], Iterable[Any]]] = {
        "ours": partial(by_number, dataset, in_order),
        "two fields": partial(by_number, TarDataset(dataset.index, "jpg cls"), in_order),
        "shuffled": partial(by_number, dataset, shuffled),
        "webdataset": partial(theirs, folder),
        "pread": partial(bare, places(dataset, in_order)),
    }
    ways = {name: partial(per_sample, read) for name, read in ways_of_reading.items()}
    taken = in_turn(ways, READS)
    name = (
        f"photographs in shards, read in one process, {os.path.getsize(folder / '00000.tar') // PER_SHARD // 1000} KB"
    )
    yield from compared({name: "us"}, taken["ours"], taken["webdataset"], "webdataset")
    yield from compared(
        {f"{name}, without key and shard": "us"}, taken["two fields"], taken["pread"], "a loop of pread"
    )
    yield from compared({f"{name}, shuffled": "us"}, taken["shuffled"], taken["ours"], "in order")
    asked = in_turn({way: partial(asked_of_the_system, ways_of_reading[way]) for way in ("ours", "shuffled")}, RUNS)
    figures = {f"{name}, shuffled, reads of a sample": "", f"{name}, shuffled, bytes read of a sample": "B"}
    yield from compared(figures, asked["shuffled"], asked["ours"], "in order")
    indexed = {"ours": partial(per_member, folder, by_scan), "tarfile": partial(per_member, folder, by_tarfile)}
    taken = in_turn(indexed, RUNS)
    yield from compared({"shards indexed, by the member": "us"}, taken["ours"], taken["tarfile"], "Python's tarfile")
    name = "photographs in shards, decoded and cropped, 2 workers"
    ours = DataLoader(
        TarDataset(f"{folder}/*.tar", "jpg cls", "rgb8", cropped), BATCH, shuffle=True, num_workers=2, seed=0
    )
    rivals: dict[str, Any] = {}
    for rival, decode in {"webdataset, its decoder": "rgb8", "webdataset, the same decoder": by_simplejpeg}.items():
        data = theirs(folder).decode(decode).to_tuple("jpg", "cls").map(cropped)
        rivals[rival] = Torch(data, BATCH, num_workers=2)
    rivals["torch over files, the same decoder"] = Torch(Folder(folder), BATCH, shuffle=True, num_workers=2)
    rivals["Grain over files, the same decoder"] = by_grain(folder)
    rivals["SPDL over files, the same decoder"] = BySpdl(folder)
    taken = in_turn(
        {"ours": partial(per_batch, ours)} | {one: partial(per_batch, two) for one, two in rivals.items()}, RUNS
    )
    for rival in rivals:
        yield from compared({name: "ms"}, taken["ours"], taken[rival], rival)
