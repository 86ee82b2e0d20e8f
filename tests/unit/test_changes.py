import pytest

from warmers.changes import Changes, Entry, Listing, compare


def listing(broken=(), **digests):
    entries = {label.replace("__", "/"): Entry(f"{label.partition('__')[0]}.yaml", d) for label, d in digests.items()}
    return Listing(entries, {f"{name}.yaml": "why" for name in broken})


def candidate(digest, name="a"):
    return Listing({name: Entry("a.yaml", "1"), f"{name}.candidate": Entry("a.candidate.yaml", digest)}, {})


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (listing(), listing(a="1", b="1"), Changes(("a", "b"), (), (), ())),
        (listing(a="1", b="1"), listing(a="2", b="1"), Changes((), ("a",), (), ())),
        (listing(a="1", b="1"), listing(b="1"), Changes((), (), ("a",), ())),
        (listing(a="1"), listing(a="1"), Changes((), (), (), ())),
        (candidate("2"), listing(a="2"), Changes((), (), (), ("a",))),
        (candidate("2"), listing(a="3"), Changes((), ("a",), ("a.candidate",), ())),
        (candidate("2"), listing(a="1"), Changes((), (), ("a.candidate",), ())),
        (candidate("2"), candidate("3"), Changes((), ("a.candidate",), (), ())),
    ],
)
def test_what_happened_between_two_looks(before, after, expected):
    assert compare(before, after) == expected
    assert (before.digest == after.digest) == (expected == Changes((), (), (), ()))


def test_the_digest_knows_no_file_names():
    moved = Listing({"a": Entry("elsewhere.json", "1")}, {})
    assert moved.digest == listing(a="1").digest


def test_a_broken_file_keeps_all_that_came_from_it_and_nothing_else():
    before = listing(a="1", a__one="2", b="3")
    after = listing(broken=["a"]).keeping(before)
    assert set(after.templates) == {"a", "a/one"}
    assert listing(b="3", broken=["a"]).keeping(before).digest == before.digest
    assert after.trouble
    assert not before.trouble


def test_long_lists_of_changes_are_cut():
    many = listing(**{f"t{n:03}": "1" for n in range(500)})
    assert str(compare(listing(), many)).endswith("and 490 more")
    assert len(str(compare(listing(), many))) < 200
