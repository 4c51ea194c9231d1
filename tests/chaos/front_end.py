"""A front end that joins engine cores, streams for a while, and leaves. As a program: `python -m chaos.front_end`."""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from outboard import AsyncLLM, EngineAddresses, EngineDeadError, OutboardError, SamplingParams

__all__ = ["GONE", "REPLACED", "WRONG", "stream"]

# Exit statuses: another front end has its index; the engine core is gone for ever; it got wrong tokens.
REPLACED, GONE, WRONG = 3, 4, 5


async def stream(llm: AsyncLLM, seconds: float, echo: bool) -> str:
    """Makes short requests for so long; what was wrong with them, or "". Lost ones are made again."""
    deadline = time.monotonic() + seconds
    prompt = [7 * i % 251 + 1 for i in range(40)] if echo else [1]
    expected = prompt if echo else [97 + i % 26 for i in range(40)]
    params = SamplingParams(max_tokens=40, output_kind="delta", detokenize=False)
    while time.monotonic() < deadline:
        got: list[int] = []
        try:
            async for output in llm.generate(prompt, params):
                got += output.outputs[0].token_ids
        except OutboardError as error:
            if not error.retryable:
                raise
            await asyncio.sleep(0.01)
        if got != expected[: len(got)]:
            return f"got {got}"
    return ""


async def main() -> int:
    addresses = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineAddresses)
    index, seconds, echo = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "echo"
    try:
        async with AsyncLLM(addresses=addresses, client_index=index) as llm:
            print("joined", flush=True)
            wrong = await stream(llm, seconds, echo)
    except EngineDeadError as error:
        print(error, file=sys.stderr)
        return REPLACED if "another front end" in str(error) else GONE
    if wrong:
        print(wrong, file=sys.stderr)
    return WRONG if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
