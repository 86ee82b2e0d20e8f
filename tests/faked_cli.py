"""warmfront's command line in a process of its own, on a fake engine; WARMFRONT_TEST_DIE names where it is to die.

"SIGKILL before plan", "SIGKILL after plan": around the write of a document; "record": of the ledger; "SIGKILL in
prefill 2": at the second one; "SIGKILL in proof 3": at the third sample. "SLOW" makes prefills slow.
"""

import os
import signal
import time

from fakes import FakedWorkspace

import resources.leases
import resources.state
import resources.workspace

resources.workspace.LEASE_TTL_S = 2.0  # what the next run waits for when the holder was killed
number, _, place = os.environ.get("WARMFRONT_TEST_DIE", "").partition(" ")


def die_at(here):
    if here == place:
        os.kill(os.getpid(), getattr(signal, number))
        time.sleep(0.2)  # a Python signal handler runs soon after


def around(function, name_of):
    def wrapped(*arguments, **more):
        die_at(f"before {name_of(*arguments)}")
        result = function(*arguments, **more)
        die_at(f"after {name_of(*arguments)}")
        return result

    return wrapped


resources.state.StateStore.point = around(resources.state.StateStore.point, lambda self, fleet, kind, *_: kind)
resources.state.LedgerFiles.record = around(resources.state.LedgerFiles.record, lambda *_: "record")


class DyingWorkspace(FakedWorkspace):
    def engine_of(self, name):
        engine = super().engine_of(name)
        generate, sampled, prefilled = type(engine).generate, [], []

        def on_prefill(_):
            # A moment, since the main thread is still starting this one, and an interrupt there would hit the pool.
            time.sleep(2.5 if number == "SLOW" else 0.1)
            prefilled.append(1)
            die_at(f"in prefill {len(prefilled)}")

        def sample(*arguments, **more):
            sampled.append(1)
            die_at(f"in proof {len(sampled)}")
            return generate(engine, *arguments, **more)

        engine.on_prefill = on_prefill
        if "generate" not in engine.__dict__:
            engine.generate = sample
        return engine


resources.workspace.Workspace = DyingWorkspace

if __name__ == "__main__":
    from pipelines.cli import main

    main()
