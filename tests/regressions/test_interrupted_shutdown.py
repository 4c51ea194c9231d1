"""A shutdown that is interrupted cannot be repeated, the engine lives on, and the garbage collector hangs for ever."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_shutdown_after_ctrl_c_in_shutdown(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "slow_stop.py").write_text(
        textwrap.dedent(
            """
            import gc, os, signal, threading, time
            from outboard import AsyncMPClient, EngineCore

            class SlowStop(EngineCore):
                def add_request(self, request): ...
                def abort_requests(self, request_ids): ...
                def has_work(self): return False
                def step(self, outputs): ...
                def shutdown(self): time.sleep(60)

            if __name__ == "__main__":
                client = AsyncMPClient(SlowStop)
                pid = client.core_engines[0].pid
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                try:
                    client.shutdown(10)
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
                client.shutdown(0)
                print("alive" if os.path.exists(f"/proc/{pid}") else "gone", flush=True)
                del client
                gc.collect()
                print("collected", flush=True)
            """
        )
    )
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "slow_stop.py")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        output, _ = process.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    assert output.split() == ["interrupted", "gone", "collected"]
