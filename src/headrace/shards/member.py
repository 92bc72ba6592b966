"""The header of a member that is written: it says which data follows."""

import tarfile
import zlib

from headrace.shards.tar import BLOCK, checksum

_SUM = slice(148, 156)
_MAJOR, _MINOR = slice(329, 337), slice(337, 345)


def summed_header(name: str, data: bytes) -> bytes:
    """Return the header of a regular member, in whole blocks, after the extension headers of a long name.

    It has the CRC-32 of the data, so that other data has another header. The checksum lies in the two device numbers,
    which mean nothing for a regular member, as octal digits. There is no owner and no time.

    Args:
        name: The member's name.
        data: Its data.
    """
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o444
    whole = member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    header, data_sum = bytearray(whole[-BLOCK:]), zlib.crc32(data)
    header[_MAJOR], header[_MINOR] = b"%07o\0" % (data_sum >> 16), b"%07o\0" % (data_sum & 0xFFFF)
    header[_SUM] = b"%06o\0 " % checksum(bytes(header))
    return whole[:-BLOCK] + bytes(header)
