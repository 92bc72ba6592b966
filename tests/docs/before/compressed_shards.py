from pathlib import Path

import numpy as np
import zstandard

from headrace import ShardWriter

with ShardWriter("train-%03d.tar", maxcount=32) as writer:
    for number in range(128):
        writer.write({"__key__": f"{number:04}", "jpg": np.full((8, 8, 3), number, np.uint8), "cls": number % 10})
for shard in Path().glob("train-*.tar"):
    Path(f"{shard}.zst").write_bytes(zstandard.compress(shard.read_bytes()))
