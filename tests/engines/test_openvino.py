"""The OpenVINO engine on the small model, without processes."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outboard.engine.batch import Columns, OutputBatch
from outboard.engine.core import utility_methods
from outboard.engines.models import pull
from outboard.engines.openvino import OpenVINOEngine
from outboard.engines.openvino_tokenizer import import_genai
from outboard.errors import ConfigError, InvalidRequestError, ModelFileError, PromptTooLongError
from outboard.protocol.messages import EngineCoreRequest, SchedulerStats
from outboard.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.openvino, pytest.mark.xdist_group("openvino")]

MAX_STEPS = 2000
FRANCE, PARIS = [504, 3575, 282, 4649, 314], 7042  # "The capital of France is", " Paris"
CHAT = [1, 4093, 198, 36218, 15876, 30, 2, 198, 1, 520, 9531, 198]  # the user asks to say hi
# Asks for the capital of France, with the template's system message: the answer is one short sentence on every CPU.
# What others are answered differs with the instructions that a CPU has.
SHORT = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]
EOS = 2


@pytest.fixture(scope="module")
def model() -> Path:
    return pull("smollm2-135m")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[OpenVINOEngine]:
    engine = OpenVINOEngine(max_num_seqs=16)
    yield engine
    engine.shutdown()


class Result:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self.finish: tuple[str, int | str | None] | None = None
        self.error: str | None = None
        self.scheduled_at: int | None = None  # step; so is the next
        self.first_token_at: int | None = None


class Driver:
    """What the busy loop does with an engine."""

    def __init__(self, engine: OpenVINOEngine) -> None:
        self.engine = engine
        self.batch = OutputBatch()
        self.columns = Columns()
        self.results: dict[str, Result] = {}
        self.ids: list[str] = []
        self.steps = 0

    def add(self, prompt: list[int], request_id: str = "", /, **params: Any) -> Result:
        name = request_id or f"r{len(self.ids)}"
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=array("i", prompt),
            sampling_params=SamplingParams(**({"temperature": 0.0} | params)),
        )
        self.batch.open(name, len(self.ids), self.columns)
        self.ids.append(name)
        try:
            self.engine.add_request(request)
        except InvalidRequestError:
            self.batch.close(name)
            raise
        self.results[name] = Result()
        return self.results[name]

    def step(self) -> None:
        self.steps += 1
        self.engine.step(self.batch)
        columns = self.columns
        finished = {position: (reason, stop) for position, reason, stop in columns.finished or ()}
        start = 0
        counts = columns.counts or [1] * len(columns.handles)
        for position, (handle, count) in enumerate(zip(columns.handles, counts, strict=True)):
            result = self.results[self.ids[handle]]
            if count and result.first_token_at is None:
                result.first_token_at = self.steps
            result.tokens += columns.tokens[start : start + count]
            start += count
            assert result.finish is None, "output after the finish"
            result.finish = finished.get(position)
            if columns.extras is not None:
                result.logprobs += columns.extras.logprobs.get(position, [])
                result.error = columns.extras.errors.get(position, result.error)
                if position in columns.extras.queue_times:
                    result.scheduled_at = self.steps
        assert start == len(columns.tokens)
        columns.clear()

    def abort(self, *names: str) -> None:
        for name in names:
            self.batch.close(name)
        self.engine.abort_requests(list(names))

    def run(self) -> None:
        while self.engine.has_work():
            self.step()
            assert self.steps < MAX_STEPS


@pytest.fixture
def driver(engine: OpenVINOEngine) -> Iterator[Driver]:
    driver = Driver(engine)
    yield driver
    driver.abort(*driver.ids)
    driver.run()


def test_a_greedy_completion(driver: Driver) -> None:
    result = driver.add(FRANCE, max_tokens=8)
    assert driver.engine.scheduler_stats() == SchedulerStats(waiting=1)
    driver.run()
    assert PARIS in result.tokens
    assert len(result.tokens) == 8
    assert result.finish == ("length", None)
    assert result.scheduled_at == 1
    assert driver.engine.scheduler_stats() == SchedulerStats()


def test_what_it_says_of_itself(engine: OpenVINOEngine) -> None:
    info = engine.info()
    assert (info.max_model_len, info.vocab_size, info.max_num_seqs) == (8192, 49152, 16)
    assert info.model == "smollm2-135m"
    assert "get_metrics" in utility_methods(engine)
    assert set(engine.get_metrics()) >= {"requests", "scheduled_requests", "cache_usage", "cache_size_in_bytes"}


def test_many_at_once(driver: Driver) -> None:
    lengths = [1 + 3 * number % 17 for number in range(24)]  # more than max_num_seqs
    results = [
        driver.add([504, 1000 + number, 314], max_tokens=length, ignore_eos=True)
        for number, length in enumerate(lengths)
    ]
    driver.step()
    assert driver.engine.get_metrics()["scheduled_requests"] == 16
    assert driver.engine.scheduler_stats().waiting == 8
    driver.run()
    assert [len(result.tokens) for result in results] == lengths
    assert {result.finish for result in results} == {("length", None)}
    assert [result.scheduled_at for result in results[:16]] == [1] * 16
    assert all(result.scheduled_at > 1 for result in results[16:] if result.scheduled_at)
    assert driver.steps < sum(lengths) / 4


def test_requests_join_and_leave_between_steps(driver: Driver) -> None:
    first = driver.add([504, 1], max_tokens=20, ignore_eos=True)
    for _ in range(3):
        driver.step()
    second = driver.add([600 + number for number in range(300)], "second", max_tokens=None, ignore_eos=True)
    for _ in range(4):
        driver.step()
    third = driver.add([505, 2], max_tokens=5, ignore_eos=True)
    driver.step()
    assert driver.engine.scheduler_stats().running == 3
    usage = driver.engine.scheduler_stats().kv_cache_usage
    assert 0 < usage < 0.05
    driver.abort("second")
    assert driver.engine.scheduler_stats().running == 2
    got = len(second.tokens)
    assert got > 0
    driver.step()
    driver.step()
    assert driver.engine.get_metrics()["requests"] == 2
    assert driver.engine.scheduler_stats().kv_cache_usage < usage / 2
    driver.run()
    assert len(second.tokens) == got and second.finish is None
    assert (len(first.tokens), len(third.tokens)) == (20, 5)
    assert driver.engine.scheduler_stats() == SchedulerStats()
    driver.abort("second", "never heard of")


def test_waiting_and_half_read_requests_can_be_aborted(driver: Driver) -> None:
    driver.add([700 + number for number in range(600)], "prefill", max_tokens=4)
    driver.step()
    for number in range(16):
        driver.add([504, number], f"w{number}", max_tokens=4)
    driver.abort("prefill", "w3", "w15")
    driver.run()
    assert driver.results["prefill"].tokens == []
    assert [name for name, result in driver.results.items() if result.finish is None] == ["prefill", "w3", "w15"]


def test_a_prompt_counts_as_scheduled_when_its_turn_comes(driver: Driver) -> None:
    results = [driver.add([800 + 7 * number] * 300, max_tokens=2, ignore_eos=True) for number in range(3)]
    driver.step()
    assert driver.engine.scheduler_stats().waiting == 2
    driver.run()
    scheduled = [result.scheduled_at or 0 for result in results]
    assert scheduled[0] == 1
    assert scheduled == sorted(scheduled) and scheduled[2] > scheduled[0]
    assert all(result.scheduled_at < result.first_token_at for result in results)  # type: ignore[operator]


def test_seeds(driver: Driver) -> None:
    def sample(seed: int | None) -> list[int]:
        result = driver.add([504, 3575, 282], max_tokens=12, temperature=1.0, seed=seed)
        driver.run()
        return result.tokens

    assert sample(7) == sample(7) == sample(7 + 2**32)
    assert sample(8) != sample(7)
    assert sample(-1) == sample(-1)
    assert len({tuple(sample(None)) for _ in range(3)}) > 1


def test_end_of_sequence(driver: Driver) -> None:
    plain = driver.add(SHORT, max_tokens=40)
    driver.run()
    assert plain.tokens[-1] == EOS
    assert plain.tokens.count(EOS) == 1
    assert plain.finish == ("stop", None)

    onward = driver.add(SHORT, max_tokens=40, ignore_eos=True)
    driver.run()
    assert onward.tokens[: len(plain.tokens)] == plain.tokens
    assert (len(onward.tokens), onward.finish) == (40, ("length", None))

    later = driver.add(SHORT, max_tokens=40, min_tokens=30)
    driver.run()
    assert len(later.tokens) >= 30
    assert EOS not in later.tokens[:30]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_token_ids(driver: Driver, ignore_eos: bool) -> None:
    plain = driver.add(CHAT, max_tokens=4)
    driver.run()
    stop = plain.tokens[2]
    stopped = driver.add(CHAT, max_tokens=40, stop_token_ids=[stop, 12345], ignore_eos=ignore_eos)
    driver.run()
    assert stopped.tokens == plain.tokens[:3]
    assert stopped.finish == ("stop", stop)


def test_logprobs_of_the_chosen_tokens(driver: Driver) -> None:
    result = driver.add([504, 3575, 282], max_tokens=5, logprobs=0)
    beside = driver.add([504, 3575, 283], max_tokens=5)
    driver.run()
    assert [list(logprobs) for logprobs in result.logprobs] == [[token] for token in result.tokens]
    assert all(value < 0 for logprobs in result.logprobs for value in logprobs.values())
    assert beside.logprobs == []
    with pytest.raises(InvalidRequestError, match="logprobs=2"):
        driver.add([504], logprobs=2)
    with pytest.raises(InvalidRequestError, match="logprobs=1"):
        driver.add([504], logprobs=1, temperature=1.0)


def test_every_sampling_parameter_is_taken(driver: Driver) -> None:
    result = driver.add(
        [504, 3575, 282],
        max_tokens=6,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=1.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
        ignore_eos=True,
    )
    driver.add([504, 3575, 282], max_tokens=6, temperature=1e-3, top_k=-1, n=3, stop="x")
    driver.run()
    assert len(result.tokens) == 6


def test_top_k_1_is_greedy(driver: Driver) -> None:
    sampled = driver.add([504, 3575, 282], max_tokens=6, temperature=1.0, top_k=1)
    driver.run()
    greedy = driver.add([504, 3575, 282], max_tokens=6)
    driver.run()
    assert sampled.tokens == greedy.tokens


def test_penalties_work(driver: Driver) -> None:
    repeated = [253] * 30  # " a a a ..."
    plain = driver.add(repeated, max_tokens=10, ignore_eos=True)
    driver.run()
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        penalized = driver.add(repeated, **{"max_tokens": 10, "ignore_eos": True, name: 2.0})
        driver.run()
        assert len(set(penalized.tokens)) > len(set(plain.tokens)), name


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], InvalidRequestError, "empty"),
        ([5, 49152], InvalidRequestError, "token id 49152 is outside the vocabulary: ids are 0 to 49151"),
        ([5, -1], InvalidRequestError, "token id -1"),
        ([5] * 8192, PromptTooLongError, "8192 tokens.*allows 8191"),
    ],
)
def test_bad_prompts_fail_alone(
    driver: Driver, prompt: list[int], error: type[InvalidRequestError], message: str
) -> None:
    good = driver.add([504], max_tokens=3, ignore_eos=True)
    with pytest.raises(error, match=message):
        driver.add(prompt)
    driver.run()
    assert len(good.tokens) == 3


def test_max_tokens_is_capped_by_the_models_length(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.engine, "_max_model_len", 20)
    capped = [driver.add([504] * 15, max_tokens=number, ignore_eos=True) for number in (None, 10)]
    last = driver.add([504] * 19, max_tokens=None, min_tokens=3, ignore_eos=True)
    driver.run()
    assert [len(result.tokens) for result in capped] == [5, 5]
    assert len(last.tokens) == 1
    assert last.finish == ("length", None)


@pytest.mark.parametrize(("option", "value"), [("max_num_seqs", 0), ("cache_size", -1), ("num_threads", 0)])
def test_options_out_of_range(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be at least 1"):
        OpenVINOEngine(**{option: value})  # type: ignore[arg-type]


def test_a_model_or_device_that_openvino_cannot_take(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot load .* on NOWHERE"):
        OpenVINOEngine(str(model), device="NOWHERE")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:50_000_000])
    with pytest.raises(ModelFileError, match=r"cut\.gguf is truncated: it has 50000000 bytes and needs 98362432"):
        OpenVINOEngine(str(cut))


def test_openvino_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(ConfigError, match=r"pip install 'outboard\[openvino\]'"):
        OpenVINOEngine()


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model as an OpenVINO model folder."""
    genai = import_genai()
    folder = tmp_path_factory.mktemp("folder")
    (folder / "m.gguf").symlink_to(model)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    genai.ContinuousBatchingPipeline(str(folder / "m.gguf"), scheduler, "CPU", {"enable_save_ov_model": True})
    genai.Tokenizer(str(folder / "m.gguf"), enable_save_ov_model=True)
    (folder / "m.gguf").unlink()
    return folder


def test_a_model_folder_and_a_cache_that_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFileError, match="max_position_embeddings"):
        OpenVINOEngine(str(folder))
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    genai = import_genai()

    class SmallCache(genai.SchedulerConfig):  # type: ignore[misc,name-defined]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(*(("num_kv_blocks", 4) if name == "cache_size" else (name, value)))

    monkeypatch.setattr(genai, "SchedulerConfig", SmallCache)
    driver = Driver(OpenVINOEngine(str(folder)))
    info = driver.engine.info()
    assert (info.max_model_len, info.vocab_size, info.model) == (512, 49152, folder.name)
    tokenizer = OpenVINOEngine.tokenizer({"model": str(folder)})
    assert list(tokenizer.eos_token_ids) == [2, 0]
    fits = driver.add(tokenizer.encode("The capital of France is"), max_tokens=8)
    driver.run()
    assert "Paris" in tokenizer.decode([fits.tokens])[0]

    grows = driver.add([504] * 20, max_tokens=400, ignore_eos=True)
    driver.run()
    assert 100 < len(grows.tokens) < 130  # four blocks of 32 tokens
    assert grows.finish == ("error", None)
    assert grows.error is not None and "cache_size" in grows.error
    again = driver.add([505], max_tokens=3, ignore_eos=True)
    driver.run()
    assert len(again.tokens) == 3
    driver.engine.shutdown()


TEARDOWN = """
from array import array
from outboard.engine.batch import Columns, OutputBatch
from outboard.engines.openvino import OpenVINOEngine
from outboard.protocol.messages import EngineCoreRequest
from outboard.protocol.sampling import SamplingParams
engine, batch = OpenVINOEngine(precision="f32", num_threads=2, max_num_seqs=3), OutputBatch()
columns = Columns()
for number, length in enumerate((3, 5, 600, 4, 4)):
    name = str(number)
    batch.open(name, number, columns)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    prompt = array("i", [504] * length)
    engine.add_request(EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params))
engine.step(batch)
engine.step(batch)
assert len(columns.tokens) == 4, columns.tokens
engine.shutdown()
print("done")
"""


def test_teardown_with_requests_in_flight_is_quiet(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TEARDOWN], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
