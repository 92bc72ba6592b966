"""A member of a shard that is written: its header says which data follows."""

import tarfile
import zlib
from typing import Literal

from headrace.shards.tar import BLOCK, checksum

_SUM = slice(148, 156)
_MAJOR, _MINOR = slice(329, 337), slice(337, 345)


class SummedMember(tarfile.TarInfo):
    """A regular member whose header has the CRC-32 of its data, so that other data has another header.

    The checksum lies in the two device numbers, which mean nothing for a regular member, as octal digits. It has no
    owner and no time.

    Args:
        name: The member's name.
        data: Its data.
    """

    def __init__(self, name: str, data: bytes) -> None:
        super().__init__(name)
        self.size, self.mode = len(data), 0o444
        self._data_sum = zlib.crc32(data)

    def tobuf(
        self,
        format: Literal[0, 1, 2] | None = tarfile.GNU_FORMAT,
        encoding: str | None = "utf-8",
        errors: str = "surrogateescape",
    ) -> bytes:
        """Return the header, after the extension headers of a long name."""
        whole = super().tobuf(format, encoding, errors)
        header = bytearray(whole[-BLOCK:])
        header[_MAJOR], header[_MINOR] = b"%07o\0" % (self._data_sum >> 16), b"%07o\0" % (self._data_sum & 0xFFFF)
        header[_SUM] = b"%06o\0 " % checksum(bytes(header))
        return whole[:-BLOCK] + bytes(header)
