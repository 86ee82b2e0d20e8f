import sys
import threading

import pytest
from fakes import CHUNK, DictStore, FakeClock, FakeEngine, FreeFence, MemoryJournal, make_fleet, make_prefix, words

from warmers.errors import EngineUnavailable, LeaseLost, NotWarm
from warmers.fleet import WarmLimits
from warmers.plan import plan_warm
from warmers.presence import look
from warmers.warm import warm


class Bench:
    """Everything one warming run needs."""

    def __init__(self, *texts, tp=1, **limits):
        self.fleet = make_fleet(tp=tp, limits=WarmLimits(**{"visible_deadline_s": 0.5, **limits}))
        self.store, self.journal, self.clock = DictStore(), MemoryJournal(), FakeClock()
        self.engine = FakeEngine(self.fleet, self.store)
        self.prefixes = [make_prefix(words(text), text) for text in texts]

    def plan(self):
        tp, size = self.fleet.engine.tensor_parallel, self.fleet.chunk_bytes
        return plan_warm(self.prefixes, self.fleet, lambda tree: look(self.store, tree.names, tp, size))

    def warm(self, fence=None):
        return warm(self.plan(), self.engine, self.store, self.journal, fence or FreeFence(), self.clock)


@pytest.mark.parametrize("tp", [1, 2])
def test_everything_is_warmed_once_and_a_rerun_computes_nothing(tp):
    bench = Bench("abcd", "abx", "q", tp=tp)
    result = bench.warm()
    assert (result.computed_tokens, result.chunks, result.requests) == (6 * CHUNK, 6, 3)
    assert len(bench.store.values) == 6 * tp
    assert len(bench.journal.rows()) == 6
    again = bench.warm()
    assert (again.computed_tokens, again.requests, again.already_there) == (0, 0, 6)
    assert len(bench.engine.prefills) == 3


def test_a_chunk_of_a_wrong_size_is_replaced_even_if_the_engine_still_has_it():
    bench = Bench("abcd")
    bench.warm()
    name = bench.plan().tree.names[1]
    bench.store.put(name, b"truncated")
    result = bench.warm()
    assert result.computed_tokens == CHUNK
    assert len(bench.store.values[name]) == bench.fleet.chunk_bytes


def test_what_a_killed_run_left_in_l2_is_adopted_by_the_ledger():
    bench = Bench("abc")
    bench.warm()
    bench.journal = MemoryJournal()
    result = bench.warm()
    assert result.computed_tokens == 0
    assert len(bench.journal.rows()) == 3


def test_a_kill_in_the_middle_loses_nothing_that_arrived():
    bench = Bench("abcd", "xyz", "q", concurrency=1)

    def die(number):
        if number == 1:
            raise KeyboardInterrupt

    bench.engine.on_prefill = die
    with pytest.raises(KeyboardInterrupt):
        bench.warm()
    arrived = len(bench.journal.rows())
    assert arrived == len(bench.store.values) > 0
    bench.engine.on_prefill = lambda _: None
    assert bench.warm().computed_tokens == (8 - arrived) * CHUNK


def losing(bench, text, times):
    """LMCache loses the store of one chunk so many times."""
    put, lost = bench.engine.put, []
    name = bench.plan().tree.names[text]

    def lossy(key, value):
        if key == name and len(lost) < times:
            lost.append(key)
        else:
            put(key, value)

    bench.engine.put = lossy


def test_a_store_that_was_lost_is_made_good_within_the_run():
    bench = Bench("abcd", "abx", "q")
    losing(bench, 1, times=1)
    result = bench.warm()
    assert (result.chunks, result.repaired_chunks, result.computed_tokens) == (6, 1, 7 * CHUNK)
    assert bench.plan().missing_chunks == 0
    assert len(bench.journal.rows()) == 6


def test_the_only_chunk_of_a_run_is_made_good_too():
    bench = Bench("a")
    losing(bench, 0, times=1)
    assert bench.warm().repaired_chunks == 1
    assert bench.plan().missing_chunks == 0


def test_who_has_lost_the_lease_deletes_nothing_for_a_repair():
    class LostAtLast(FreeFence):
        def check(self):
            if sys._getframe(1).f_code.co_name == "_repair":
                raise LeaseLost("writing", seen="another run", do="Run again.")

    bench = Bench("abcd")
    losing(bench, 1, times=1)
    bench.store.delete = lambda keys: pytest.fail("it was deleted all the same")
    with pytest.raises(LeaseLost):
        bench.warm(LostAtLast())


def test_a_store_that_is_lost_again_and_again_is_an_error_and_the_rest_is_kept():
    bench = Bench("abcd", "abx", "q")
    losing(bench, 1, times=9)
    with pytest.raises(NotWarm, match="1 prefilled chunks are not whole"):
        bench.warm()
    assert len(bench.journal.rows()) == 5
    assert bench.plan().missing_chunks == 1


def test_chunks_that_never_appear_are_an_error_that_says_why():
    bench = Bench("abc", "q")
    bench.engine.write_behind = True
    with pytest.raises(NotWarm, match=r"prefilled chunks are not whole in L2 after 0\.5 s.*cannot write to L2"):
        bench.warm()


def test_a_connector_that_fell_back_is_recognised():
    bench = Bench("abc")
    bench.engine.connector = ""
    with pytest.raises(NotWarm, match="asked to store nothing: vLLM runs without its connector"):
        bench.warm()


def test_a_refused_prefix_fails_with_those_that_wait_for_it_and_harms_no_other():
    bench = Bench("abcd", "abx", "q")
    refused = words("abcd")
    bench.engine.refuse = lambda ids: ids.tolist() == refused
    result = bench.warm()
    assert [label for label, _ in result.failed] == ["abcd", "abx"]
    assert result.chunks == 1


def test_an_engine_that_goes_away_stops_the_run_and_keeps_what_arrived():
    bench = Bench("abcd", "xyz", concurrency=1)

    def vanish(number):
        if number == 1:
            raise EngineUnavailable("POST", seen="connection refused", do="Start it.")

    bench.engine.on_prefill = vanish
    with pytest.raises(EngineUnavailable):
        bench.warm()
    assert len(bench.journal.rows()) == len(bench.store.values) > 0


def test_a_lost_lease_stops_the_writer():
    class Lost(FreeFence):
        def check(self):
            raise LeaseLost("writing", seen="another run", do="Run again.")

    bench = Bench("abc")
    with pytest.raises(LeaseLost):
        bench.warm(Lost())
    assert bench.journal.segments == []


def test_siblings_run_together_and_children_wait_for_their_parent():
    bench = Bench("ab", "abx", "q", "r", concurrency=2)
    together, seen = threading.Barrier(2, timeout=5), []

    def meet(number):
        seen.append(number)
        if len(seen) <= 2:
            together.wait()

    bench.engine.on_prefill = meet
    assert bench.warm().chunks == 5
    lengths = [length // CHUNK for length, _ in bench.engine.prefills]
    assert lengths.index(3) > lengths.index(2)


def test_unflushed_bytes_hold_back_new_requests_but_never_all():
    bench = Bench("abcd", "xyz", "q", unflushed_bytes=1)
    assert bench.warm().chunks == 8
