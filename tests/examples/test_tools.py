"""What the examples say of prefetching and preprocessing by hand, and of what one seed fixes."""

import re
from pathlib import Path

import pytest
import torch

from launch import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLES, BATCH, STEPS = 1797, 64, 29


@pytest.mark.slow
def test_a_prefetcher_that_begins_anew_reads_one_batch_only(tmp_path: Path) -> None:
    told = Ranks(EXAMPLES / "prefetch_gpu.py", 1, tmp_path).finish()
    assert ("no GPU here" in told) == (not torch.cuda.is_available())
    assert "epoch 0 was abandoned after 1 of 29 batches" in told, "the loader warns"
    rows = re.findall(rf"^(\S+): (\d+) read, (\d+) of {SAMPLES} samples, (\d+) whole, \d+\.\d\d s$", told, re.MULTILINE)
    names, *counts = zip(*rows, strict=True)
    assert names == ("wrong", "right", "device=")
    read, unique, whole = (list(map(int, column)) for column in counts)
    assert read == [STEPS * BATCH, SAMPLES, SAMPLES]
    assert unique == [BATCH, SAMPLES, SAMPLES]
    assert whole[1:] == [SAMPLES, SAMPLES], "what is computed with is what was copied"


@pytest.mark.slow
def test_a_pool_by_hand_lacks_what_the_loader_has(tmp_path: Path) -> None:
    told = Ranks(EXAMPLES / "preprocess_pool.py", 1, tmp_path).finish()
    assert "pictures by hand and by the loader are the same bits: True" in told
    hand, loader = (re.findall(rf"^{name}: (.+)$", told, re.MULTILINE) for name in ("by hand", "by the loader"))
    assert hand == [
        "the first batch that comes is 1",
        "no two samples have the same random number: False",
        "random numbers with one worker and with two are the same: False",
        "random numbers of a resumed run are the same: False",
        "a worker is killed: 7 of 8 batches, the same: False",
    ]
    assert loader == [
        "the first batch that comes is 0",
        "no two samples have the same random number: True",
        "random numbers with one worker and with two are the same: True",
        "random numbers of a resumed run are the same: True",
        "a worker is killed: 8 of 8 batches, the same: True",
    ]


@pytest.mark.slow
def test_one_seed_fixes_order_samples_and_weights_and_verify_names_the_line_that_no_seed_fixes(tmp_path: Path) -> None:
    script = EXAMPLES / "reproducible.py"
    alone, two = (Ranks(script, ranks, tmp_path).finish() for ranks in (1, 2))
    row = re.compile(r"^\('(\w+)', (.+)\): order (\w{8}), samples (\w{8}), weights (\w{8}), to 6 digits (\w{8})$", re.M)
    results = []
    for told in (alone, two):
        rows = row.findall(told)
        assert [(name, rest) for name, rest, *_ in rows] == [
            ("inline", "0"),
            ("process", "1"),
            ("process", "2"),
            ("thread", "2"),
            ("process", "2, 5"),
        ]
        (result,) = {tuple(digests) for _, _, *digests in rows}
        results.append(result)
    (order, samples, weights, rounded), of_two = results
    assert len({order, samples, weights, rounded}) == 4
    assert (order, samples, rounded) == (of_two[0], of_two[1], of_two[3])

    good, bad = alone.split("samples, in batches of")[1:]
    assert re.search(r"^6 cells, one digest: \w{12}$", good, re.M)
    assert "FAILED: 5 of 6 cells differ from the reference" in bad
    (line,) = re.findall(rf"^  It reads the system's entropy, at {script}:(\d+) in __getitem__: ", bad, re.M)
    assert "np.random.default_rng()" in script.read_text().splitlines()[int(line) - 1]
