"""A front end that drops an OpenVINO tokenizer in another thread than it was loaded in dies of the next signal."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.openvino, pytest.mark.xdist_group("openvino")]

PROGRAM = textwrap.dedent(
    """
    import faulthandler, os, signal, threading
    faulthandler.enable()
    from outboard.engines.models import resolve_model
    from outboard.engines.openvino_tokenizer import OpenVINOTokenizer

    tokenizers = [OpenVINOTokenizer(resolve_model(None))]
    thread = threading.Thread(target=tokenizers.clear)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, lambda *_: print("taken", flush=True))
    os.kill(os.getpid(), signal.SIGINT)
    """
)


def test_a_signal_is_taken() -> None:
    pytest.importorskip("openvino_genai")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "taken\n"), done.stderr
