import pytest
from fakes import CHUNK, DictStore, FakeClock, make_fleet, make_prefix, words

from warmers.errors import EngineUnavailable
from warmers.hot_set import HotSet
from warmers.keys import KeyLayout, chunk_keys
from warmers.prefetch import AT_ONCE, SHARE, Loaded, prefetch

FLEET = make_fleet()


class FakeLoader:
    """A daemon with an L1, over a store; each load takes a few looks."""

    def __init__(self, store, chunks=1000, looks=3):
        self.store, self.room, self.looks = store, chunks * FLEET.chunk_bytes / SHARE, looks
        self.under_way, self.order, self.most, self.contended = {}, [], 0, False

    def l1_bytes(self):
        return int(self.room) + 1

    def prefetch(self, hot, prefix):
        names = list(chunk_keys(prefix.ids, KeyLayout.of(FLEET), prefix.key_salt))
        request = f"r{len(self.order)}"
        self.contended |= any(names[0] in others for _, others in self.under_way.values())
        self.order.append((len(prefix.ids), prefix.key_salt))
        self.under_way[request] = [self.looks, names]
        self.most = max(self.most, len(self.under_way))
        return request

    def prefetched(self, request):
        self.under_way[request][0] -= 1
        left, names = self.under_way[request]
        if left > 0:
            return None
        del self.under_way[request]
        return sum(self.store.get(name) is not None for name in names), len(names)


def stored(*prefixes):
    store = DictStore()
    for prefix in prefixes:
        for name in chunk_keys(prefix.ids, KeyLayout.of(FLEET), prefix.key_salt):
            store.put(name, b"kv")
    return store


def test_prefixes_are_loaded_under_their_salts_a_few_at_a_time():
    sql = make_fleet(adapters={"sql": "1"}).adapters[0]
    prefixes = [make_prefix(words("ab"), f"p{n}", salt=f"s{n}") for n in range(10)]
    prefixes += [make_prefix(words("abc"), "of sql", adapter=sql), make_prefix(words("a")[:5], "short")]
    loader, told = FakeLoader(stored(*prefixes)), []
    done = prefetch(HotSet.of(FLEET, prefixes), loader, FakeClock(), 300.0, told.append)
    assert done.whole
    assert sorted(one.label for one in done.loaded) == sorted(p.label for p in prefixes if p.chunks)
    assert tuple(told) == done.loaded
    assert loader.order[-1] == (3 * CHUNK, sql.salt)
    assert loader.most == AT_ONCE


def test_what_l2_lacks_is_said_and_stops_nothing():
    there, gone = make_prefix(words("ab"), "there"), make_prefix(words("xyz"), "gone")
    done = prefetch(HotSet.of(FLEET, [gone, there]), FakeLoader(stored(there)), FakeClock(), 300.0)
    assert not done.whole
    assert set(done.loaded) == {Loaded("there", 2, 2), Loaded("gone", 3, 0)}


def test_the_heaviest_come_in_where_l1_is_small():
    light, heavy = make_prefix(words("ab"), "light"), make_prefix(words("xyz"), "heavy", weight=2.0)
    done = prefetch(HotSet.of(FLEET, [light, heavy]), FakeLoader(stored(light, heavy), chunks=4), FakeClock(), 300.0)
    assert ([one.label for one in done.loaded], done.left_out, done.whole) == (["heavy"], ("light",), False)


def test_a_load_that_hangs_is_an_error():
    prefix = make_prefix(words("ab"), "slow")
    with pytest.raises(EngineUnavailable, match=r"prefetching 'slow'.*not loaded after 5 s"):
        prefetch(HotSet.of(FLEET, [prefix]), FakeLoader(stored(prefix), looks=10**9), FakeClock(), 5.0)


def test_prefixes_that_begin_alike_are_loaded_one_after_the_other():
    prefixes = [make_prefix(words(text), text) for text in ("abc", "abd", "abe", "xyz")]
    loader = FakeLoader(stored(*prefixes))
    assert prefetch(HotSet.of(FLEET, prefixes), loader, FakeClock(), 300.0).whole
    assert (loader.contended, loader.most) == (False, 2)


def test_the_heaviest_is_loaded_first():
    prefixes = [
        make_prefix(words(text), text, weight=weight) for text, weight in (("a", 1.0), ("bc", 9.0), ("def", 5.0))
    ]
    loader = FakeLoader(stored(*prefixes))
    prefetch(HotSet.of(FLEET, prefixes), loader, FakeClock(), 300.0)
    assert [tokens // CHUNK for tokens, _ in loader.order] == [2, 3, 1]


def test_what_another_load_brought_meanwhile_is_asked_for_again():
    prefix, counts = make_prefix(words("abc"), "t"), iter([1, 3])
    loader = FakeLoader(stored(prefix), looks=1)
    loader.prefetched = lambda request: (next(counts), 3)
    assert prefetch(HotSet.of(FLEET, [prefix]), loader, FakeClock(), 300.0).loaded == (Loaded("t", 3, 3),)
