"""Where a list of layers is cut: the heaviest part is as light as any cut allows."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, strategies as st

from deepspeed.errors import UsageError
from deepspeed.pipe.partition import boundaries_of, partition_balanced, partition_uniform


def _heaviest(weights: list[float], cuts: list[int]) -> float:
    return max(sum(weights[a:b]) for a, b in pairwise(cuts))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_cut_has_a_lighter_heaviest_part(weights: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    cuts = partition_balanced(weights, parts)
    assert len(cuts) == parts + 1 and cuts[0] == 0 and cuts[-1] == len(weights)
    assert all(a < b for a, b in pairwise(cuts)), "no part is empty"
    others = ([0, *inner, len(weights)] for inner in combinations(range(1, len(weights)), parts - 1))
    assert _heaviest(weights, cuts) == min(_heaviest(weights, other) for other in others)


def test_the_other_parts_are_even_too() -> None:
    # 9 alone is the heaviest in any cut; the rest must not lie in one part
    assert partition_balanced([9, 1, 1, 1, 1], 3) == [0, 1, 3, 5]


def test_uniform_parts_differ_by_one_layer_at_most() -> None:
    assert partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert partition_uniform(3, 3) == [0, 1, 2, 3]


NAMES = ["Embed", "Block", "Block", "Block", "Block", "Norm", "Head"]
NUMELS = [100, 10, 10, 10, 10, 1, 100]


def test_methods() -> None:
    def cut(method: str | list[float]) -> list[int]:
        return boundaries_of(method, 2, names=NAMES, numels=NUMELS)

    assert cut("uniform") == [0, 4, 7] and cut([1, 1, 0, 0, 0, 0, 0])[1] == 1
    assert _heaviest([*map(float, NUMELS)], cut("parameters")) == 121
    for method, classes, each in (("type:block", "Block", 2), ("type:^(Embed|Head)$", "Embed Head", 1)):
        assert [sum(name in classes for name in NAMES[a:b]) for a, b in pairwise(cut(method))] == [each, each]


@pytest.mark.parametrize(
    ("method", "parts", "words"),
    [
        ("parameters", 8, "7 layers cannot be dealt out to 8"),
        ("type:attention", 2, "matches 0 of the layers' classes (Embed, Block, Norm, Head)"),
        ("best of all", 2, "unknown; use 'parameters'"),
        ([1.0], 2, "has 1 weights for 7 layers"),
    ],
)
def test_what_cannot_be_cut_is_refused(method: str | list[float], parts: int, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        boundaries_of(method, parts, names=NAMES, numels=NUMELS)
    assert words in str(caught.value)
