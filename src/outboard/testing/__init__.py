"""For whoever writes an engine, or tests what must survive one.

An engine's contract, checked by three lines of pytest:

    class TestMyEngine(EngineConformance):      # from outboard.testing
        def make_engine(self):
            return MyEngine(model="small.gguf", max_num_seqs=4)

An engine stepped by hand, with no process, no socket and no clock of its own:

    harness = EngineHarness(MyEngine())
    request_id = harness.add([1, 2, 3], SamplingParams(max_tokens=4))
    harness.run_until_idle()
    assert harness[request_id].tokens == [4, 5, 6, 7]

An engine that misbehaves on command, for tests of everything around one:

    AsyncMPClient(EngineConfig(engine="outboard.testing:FaultyEngine", options={"die_in": "step", "way": "sigkill"}))

Nothing here needs pytest to be imported.
"""

from outboard.testing.conformance import EngineConformance
from outboard.testing.faulty import FaultyEngine
from outboard.testing.harness import EngineHarness, ManualClock, RequestRecord

__all__ = ["EngineConformance", "EngineHarness", "FaultyEngine", "ManualClock", "RequestRecord"]
