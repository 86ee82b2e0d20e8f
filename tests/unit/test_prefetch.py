from dataclasses import replace

import pytest
from fakes import CHUNK, DictStore, FakeClock, make_fleet, make_prefix, words

from warmers.errors import EngineUnavailable
from warmers.fleet import WarmLimits
from warmers.keys import KeyLayout, chunk_keys
from warmers.prefetch import AT_ONCE, SHARE, Loaded, prefetch

FLEET = make_fleet()


class FakeLoader:
    """A daemon with an L1, over a store; each load takes a few looks."""

    def __init__(self, store, chunks=1000, looks=3):
        self.store, self.room, self.looks = store, chunks * FLEET.chunk_bytes / SHARE, looks
        self.under_way, self.order, self.most = {}, [], 0

    def l1_bytes(self):
        return int(self.room) + 1

    def prefetch(self, ids, fleet, salt):
        names = list(chunk_keys(ids, KeyLayout.of(fleet), salt))
        request = f"r{len(self.order)}"
        self.order.append((len(ids), salt))
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
    done = prefetch(prefixes, FLEET, loader, FakeClock(), told.append)
    assert done.whole
    assert sorted(one.label for one in done.loaded) == sorted(p.label for p in prefixes if p.chunks)
    assert tuple(told) == done.loaded
    assert loader.order[-1] == (3 * CHUNK, sql.salt)
    assert loader.most == AT_ONCE


def test_what_l2_lacks_is_said_and_stops_nothing():
    there, gone = make_prefix(words("ab"), "there"), make_prefix(words("xyz"), "gone")
    done = prefetch([gone, there], FLEET, FakeLoader(stored(there)), FakeClock())
    assert not done.whole
    assert set(done.loaded) == {Loaded("there", 2, 2), Loaded("gone", 3, 0)}


def test_the_heaviest_come_in_where_l1_is_small():
    light, heavy = make_prefix(words("ab"), "light"), make_prefix(words("xyz"), "heavy", weight=2.0)
    done = prefetch([light, heavy], FLEET, FakeLoader(stored(light, heavy), chunks=4), FakeClock())
    assert ([one.label for one in done.loaded], done.left_out, done.whole) == (["heavy"], ("light",), False)


def test_a_load_that_hangs_is_an_error():
    prefix = make_prefix(words("ab"), "slow")
    fleet = replace(FLEET, limits=WarmLimits(request_timeout_s=5.0))
    with pytest.raises(EngineUnavailable, match=r"prefetching 'slow'.*not loaded after 5 s"):
        prefetch([prefix], fleet, FakeLoader(stored(prefix), looks=10**9), FakeClock())
