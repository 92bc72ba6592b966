"""Tar shards: datasets over them by index, decoders, and a writer."""

from headrace.shards.dataset import TarDataset
from headrace.shards.decoding import ImageDecoder
from headrace.shards.stream import TarStream
from headrace.shards.writer import ShardWriter

__all__ = ["ImageDecoder", "ShardWriter", "TarDataset", "TarStream"]
