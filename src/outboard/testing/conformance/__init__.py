"""`EngineConformance`: the contract of an `EngineCore`, as tests for an engine of your own.

from outboard.testing import EngineConformance

class TestMyEngine(EngineConformance):
    def make_engine(self):
        return MyEngine(model="small.gguf", max_num_seqs=4)
"""

from outboard.testing.conformance.aborts import AbortChecks
from outboard.testing.conformance.batching import BatchingChecks
from outboard.testing.conformance.controls import ControlChecks
from outboard.testing.conformance.life import LifeChecks
from outboard.testing.conformance.refusals import RefusalChecks
from outboard.testing.conformance.sampling import SamplingChecks
from outboard.testing.conformance.surface import SurfaceChecks
from outboard.testing.conformance.tokenizing import TokenizerChecks

__all__ = ["EngineConformance"]


class EngineConformance(
    LifeChecks,
    SamplingChecks,
    BatchingChecks,
    AbortChecks,
    RefusalChecks,
    SurfaceChecks,
    ControlChecks,
    TokenizerChecks,
):
    """Subclass it under a name that pytest collects, and define `make_engine`; see `Suite` for what else to override.

    One engine serves all tests of a class; only the test of `shutdown` makes another. Every test is bounded by
    `max_steps`, and leaves the engine idle; after one that fails the next gets a fresh engine.
    """
