"""Greedy packing of gradients into allreduces."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.inject.buckets import BucketLimits, pack

SIZES = st.lists(st.tuples(st.integers(1, 100), st.sampled_from("ab")), max_size=60)


@given(SIZES, st.integers(1, 150), st.integers(1, 20))
def test_every_gradient_is_in_one_bucket_within_the_limits(
    gradients: list[tuple[int, str]], limit_bytes: int, limit_count: int
) -> None:
    sizes, kinds = [size for size, _ in gradients], [kind for _, kind in gradients]
    buckets = pack(sizes, kinds, BucketLimits(limit_bytes, limit_count))
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert len({kinds[index] for index in bucket}) == 1
        assert len(bucket) <= limit_count
        assert len(bucket) == 1 or sum(sizes[index] for index in bucket) <= limit_bytes
        assert bucket == sorted(bucket)


@given(SIZES, st.integers(1, 150))
def test_no_two_neighbours_of_a_kind_would_fit_together(
    gradients: list[tuple[int, str]], limit_bytes: int
) -> None:
    sizes, kinds = [size for size, _ in gradients], [kind for _, kind in gradients]
    buckets = pack(sizes, kinds, BucketLimits(limit_bytes))
    for kind in "ab":
        own = [bucket for bucket in buckets if kinds[bucket[0]] == kind]
        for before, after in itertools.pairwise(own):
            assert sum(sizes[index] for index in before) + sizes[after[0]] > limit_bytes


def test_without_limits_each_kind_is_one_bucket() -> None:
    assert pack([1, 2, 3], ["a", "b", "a"], BucketLimits()) == [[1], [0, 2]]


def test_a_last_gradient_that_is_too_large_for_the_last_bucket_is_one_by_itself() -> None:
    sizes = [4, 4, 4, 9]
    assert pack(sizes, "aaaa", BucketLimits(last_bytes=5)) == [[0, 1, 2], [3]]
    assert pack(sizes, "aaaa", BucketLimits(last_bytes=0)) == [[0, 1, 2], [3]]
    assert pack([9], "a", BucketLimits(last_bytes=5)) == [[0]]
