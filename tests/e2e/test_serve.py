"""`outboard serve` as its users meet it: the API, its limits, its errors."""

from __future__ import annotations

import json
import pstats
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serving import Server, ask, events, eventually, serving

MOCK = ("mock", "--option", "step_ms=2", "--option", "max_model_len=4096")
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*MOCK, "--option", "max_num_seqs=64", admin=True) as server:
        yield server


def complete(server: Server, **fields: object) -> object:
    status, _, answer = server.ask("POST", "/v1/completions", {"prompt": "hello", **fields})
    assert status == 200, answer
    return answer


def test_a_completion(server: Server) -> None:
    status, headers, answer = server.ask(
        "POST", "/v1/completions", {"prompt": "hello", "max_tokens": 5}, {"x-request-id": "mine"}
    )
    assert (status, headers["x-request-id"]) == (200, "mine")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "mock"
    assert [(one["text"], one["finish_reason"]) for one in answer["choices"]] == [("abcde", "length")]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["total_tokens"] == 10


def test_sixteen_tokens_by_default(server: Server) -> None:
    assert complete(server)["choices"][0]["text"] == ALPHABET[:16]


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream(server: Server, usage: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 30, "stream": True, "stream_options": {"include_usage": usage}}
    status, headers, text = server.ask("POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, end = events(text)
    assert end == "[DONE]"
    last = chunks.pop()["usage"] if usage else {"completion_tokens": 30}
    assert last["completion_tokens"] == 30
    assert "".join(one["choices"][0]["text"] for one in chunks) == ALPHABET + "abcd"
    assert [one["choices"][0]["finish_reason"] for one in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({one["id"] for one in chunks}) == 1


def test_usage_in_every_event(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, _, text = server.ask(
        "POST", "/v1/completions", {"prompt": "hello", "max_tokens": 9, "stream": True, "stream_options": options}
    )
    counts = [one["usage"]["completion_tokens"] for one in events(text)[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 9


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_completions(server: Server, stream: bool) -> None:
    body = {"prompt": ["one", "three", "it"], "n": 2, "max_tokens": 4, "stream": stream}
    status, _, answer = server.ask("POST", "/v1/completions", body)
    assert status == 200
    texts: dict[int, str] = {}
    choices = answer["choices"] if not stream else [one["choices"][0] for one in events(answer)[:-1]]
    for one in choices:
        texts[one["index"]] = texts.get(one["index"], "") + one["text"]
    assert sorted(texts) == list(range(6))
    assert all(len(text) == 4 for text in texts.values())
    if not stream:
        assert answer["usage"]["prompt_tokens"] == 3 + 5 + 2
        assert answer["usage"]["completion_tokens"] == 24


def test_a_chat(server: Server) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    status, _, answer = server.ask("POST", "/v1/chat/completions", {"messages": messages, "max_completion_tokens": 3})
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "abc"
    assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant:")


def test_a_streamed_chat(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    _, _, text = server.ask("POST", "/v1/chat/completions", body)
    deltas = [one["choices"][0]["delta"] for one in events(text)[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "abc"


def test_a_stop_string(server: Server) -> None:
    choice = complete(server, max_tokens=50, stop=["fg"])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abcde", "stop", "fg")


def test_models_and_tokens(server: Server) -> None:
    assert [one["id"] for one in server.ask("GET", "/v1/models")[2]["data"]] == ["mock"]
    assert server.ask("GET", "/v1/models/mock")[2]["max_model_len"] == 4096
    tokens = server.ask("POST", "/tokenize", {"prompt": "abc"})[2]
    assert tokens == {"tokens": [97, 98, 99], "count": 3, "max_model_len": 4096}
    assert server.ask("POST", "/detokenize", {"tokens": [97, 98]})[2] == {"prompt": "ab"}
    chat = server.ask("POST", "/tokenize", {"messages": [{"role": "user", "content": "a"}]})[2]
    assert chat["count"] == len("user: a\nassistant:")


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"prompt": "x", "temperature": "hot"}, 400, "temperature", "invalid_value"),
        ({"max_tokens": 1}, 400, "prompt", "invalid_value"),
        ({"prompt": ""}, 400, None, "invalid_request"),
        ({"prompt": [1, "x"]}, 400, "prompt", "invalid_value"),
        ({"prompt": []}, 400, "prompt", "invalid_value"),
        ({"prompt": "x", "guided_json": {}, "bad_words": ["y"]}, 400, "bad_words", "unsupported_parameter"),
        ({"prompt": [9999]}, 400, None, "invalid_request"),
        ({"prompt": "x" * 5000}, 400, None, "context_length_exceeded"),
        ({"prompt": "x", "echo": True}, 400, "echo", "unsupported_parameter"),
        ({"prompt": "x", "logit_bias": {"1": 5}}, 400, "logit_bias", "unsupported_parameter"),
        ({"prompt": "x", "best_of": 3}, 400, "best_of", "unsupported_parameter"),
        ({"prompt": "x", "stream_options": {}}, 400, "stream_options", "invalid_value"),
        ({"prompt": "x", "model": "gpt-9"}, 404, "model", "model_not_found"),
        ([1], 400, None, "invalid_value"),
        ("{", 400, None, "invalid_json"),
        (b"\xff\xfe", 400, None, "invalid_json"),
        ('{"a":' * 100_000, 400, None, "invalid_json"),
    ],
)
def test_bad_requests(server: Server, body: object, status: int, param: str | None, code: str | None) -> None:
    got, headers, answer = server.ask("POST", "/v1/completions", body)
    assert got == status, answer
    error = answer["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert error["message"]
    assert headers["x-request-id"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ],
)
def test_what_chat_refuses_by_name(server: Server, fields: dict[str, object], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    status, _, answer = server.ask("POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_unknown_fields_are_tolerated(server: Server) -> None:
    assert complete(server, max_tokens=1, of_tomorrow={"x": 1}, user="me")["choices"][0]["text"] == "a"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("GET", "/nowhere", 404)])
def test_no_such_thing(server: Server, method: str, path: str, status: int) -> None:
    got, _, answer = server.ask(method, path)
    assert got == status
    assert answer["error"]["message"].startswith(f"{method} {path}")


def test_every_answer_echoes_the_request_id(server: Server) -> None:
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("GET", "/nowhere", None),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 0}),
    ):
        assert server.ask(method, path, body, {"x-request-id": "mine"})[1]["x-request-id"] == "mine"


def test_mistakes_of_clients_are_refused_not_failed(server: Server) -> None:
    failed = server.metric("requests_failed_total")
    refused = server.metric("requests_refused_total", reason="invalid_request")
    assert server.ask("POST", "/v1/completions", {"prompt": ""})[0] == 400
    assert server.ask("POST", "/v1/completions", {"prompt": [9999]})[0] == 400
    assert server.metric("requests_refused_total", reason="invalid_request") == refused + 2
    assert server.metric("requests_failed_total") == failed


def test_a_deadline(server: Server) -> None:
    began = time.monotonic()
    body = {"prompt": "x", "max_tokens": 4000}
    status, _, answer = server.ask("POST", "/v1/completions", body, {"x-request-timeout": "0.3"})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert 0.3 <= time.monotonic() - began < 3
    status, _, text = server.ask("POST", "/v1/completions", {**body, "stream": True}, {"x-request-timeout": "0.3"})
    assert status == 200
    *_, error, end = events(text)
    assert (error["error"]["code"], end) == ("deadline_exceeded", "[DONE]")
    eventually(lambda: server.metric("num_requests_running") == 0)
    assert server.ask("POST", "/v1/completions", body, {"x-request-timeout": "soon"})[0] == 400


def test_a_disconnect_aborts(server: Server) -> None:
    for stream in (True, False):
        body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": stream}).encode()
        with socket.create_connection(server.host_and_port) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            eventually(lambda: server.admin("GET", "/admin/engines")["engines"][0]["running"] == 1)
        eventually(lambda: server.admin("GET", "/admin/engines")["engines"][0]["running"] == 0, timeout=4)


def test_health_and_documents(server: Server) -> None:
    for path in ("/livez", "/readyz", "/health", "/ping"):
        assert server.ask("GET", path)[0] == 200
    document = server.ask("GET", "/openapi.json")[2]
    assert document["openapi"].startswith("3.1")
    status, headers, page = server.ask("GET", "/ui/")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/html")
    assert "Outboard" in page


def test_keep_alive_and_pipelining(server: Server) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with socket.create_connection(server.host_and_port, timeout=10) as connection:
        connection.sendall(request * 3)
        got = b""
        while got.count(b'"finish_reason":"length"') < 3:
            got += connection.recv(65536)
    assert got.count(b"HTTP/1.1 200 OK") == 3


def test_limits_and_keys() -> None:
    arguments = ("--max-waiting", "2", "--max-concurrent-per-key", "3", "--max-body-bytes", "2000")
    keys = {"OUTBOARD_API_KEY": "first second"}
    with serving(*MOCK, "--option", "max_num_seqs=1", *arguments, "--api-server-count", "2", env=keys) as server:
        body = {"prompt": "x", "max_tokens": 2000}
        for wrong in ({}, {"authorization": "Bearer third"}, {"authorization": "first"}):
            status, _, answer = server.ask("POST", "/v1/completions", body, wrong)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert server.ask("GET", "/v1/models")[0] == 401
        assert server.ask("GET", "/readyz")[0] == 200
        first, second = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))
        too_large = {"prompt": "x" * 3000}
        assert server.ask("POST", "/v1/completions", too_large, first)[0] == 413
        long = {**first, "x-request-timeout": "4"}
        threads = [threading.Thread(target=server.ask, args=("POST", "/v1/completions", body, long)) for _ in range(3)]
        for thread in threads:
            thread.start()
            time.sleep(0.3)  # the first is to have its first token before the others wait for theirs
        status, headers, answer = server.ask("POST", "/v1/completions", body, first)
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "too_many_waiting", "1")
        for thread in threads:
            thread.join()
        status, _, answer = server.ask("POST", "/v1/completions", {**body, "max_tokens": 1}, second)
        assert status == 200, answer


def test_one_key_has_so_many_at_once() -> None:
    env = {"OUTBOARD_API_KEY": "first second"}
    with serving(*MOCK, "--max-concurrent-per-key", "1", "--api-server-count", "2", env=env) as server:
        first, second = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))
        body = {"prompt": "x", "max_tokens": 1000}
        thread = threading.Thread(target=server.ask, args=("POST", "/v1/completions", body, first))
        thread.start()
        time.sleep(0.5)
        for _ in range(6):  # whichever API process takes it
            status, _, answer = server.ask("POST", "/v1/completions", body, first)
            assert (status, answer["error"]["code"]) == (429, "too_many_for_key")
        assert server.ask("POST", "/v1/completions", {**body, "max_tokens": 1}, second)[0] == 200
        thread.join()
        assert server.ask("POST", "/v1/completions", {**body, "max_tokens": 1}, first)[0] == 200


def test_administration(server: Server) -> None:
    report = server.admin("GET", "/admin/engines")
    assert [(one["rank"], one["state"]) for one in report["engines"]] == [(0, "ready")]
    assert report["api_processes"] == server.api_pids()
    assert server.admin("POST", "/admin/pause", {"mode": "keep"}) == {}
    status, _, answer = server.ask("POST", "/v1/completions", {"prompt": "x"}, {"x-request-timeout": "0.3"})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    eventually(lambda: server.admin("GET", "/admin/engines")["engines"][0]["paused"])
    assert server.admin("POST", "/admin/resume") == {}
    assert complete(server, max_tokens=1)["choices"][0]["text"] == "a"
    assert server.admin("POST", "/admin/log-level", {"level": "warning"}) == {}
    assert server.admin("POST", "/admin/log-level", {"level": "info"}) == {}
    for path, body, status in (
        ("/admin/pause", {"mode": "now"}, 400),
        ("/admin/sleep", {}, 409),
        ("/admin/scale", {"data_parallel_size": 2}, 409),
        ("/admin/engines/0/restart", None, 409),
        ("/admin/engines/7/restart", None, 404),
        ("/admin/nothing", {}, 404),
        ("/admin/scale", None, 400),
        ("/admin/log-level", {"level": "loud"}, 400),
    ):
        got, answer = server.admin("POST", path, body)
        assert got == status, answer
        assert answer["error"]["message"]
    assert 'outboard.audit: /admin/pause {"mode":"keep"}: done' in server.stderr()
    assert "outboard.audit: /admin/scale: refused: data_parallel_size" in server.stderr()


def test_a_profile(server: Server, tmp_path: Path) -> None:
    path = str(tmp_path / "steps.prof")
    assert server.admin("POST", "/admin/profile/start", {"path": path}) == {"paths": [path]}
    complete(server, max_tokens=3)
    assert server.admin("POST", "/admin/profile/stop") == {"paths": [path]}
    assert pstats.Stats(path).total_calls > 0  # type: ignore[attr-defined]


def test_the_admin_key_and_the_closed_door(server: Server) -> None:
    assert server.ask("GET", "/admin/engines")[0] == 404  # not on the port of the API
    with serving(*MOCK, admin=True, env={"OUTBOARD_ADMIN_KEY": "secret"}) as locked:
        status, answer = locked.admin("GET", "/admin/engines")
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert locked.admin("POST", "/admin/resume")[0] == 401
        assert "outboard.audit: /admin/resume: refused: administration wants its key" in locked.stderr()
        report = ask(locked.admin_url, "GET", "/admin/engines", headers={"authorization": "Bearer secret"})[2]
        assert report["model"] == "mock"
        for child in locked.tree():
            assert "secret" not in " ".join(child.cmdline())


def test_traces_reach_a_collector() -> None:
    posted: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with serving(*MOCK, "--otlp-traces-endpoint", url) as server:
            headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-id": "mine"}
            assert server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 3}, headers)[0] == 200
        collector.shutdown()  # the server has ended, and has sent what it had
    spans = ExportTraceServiceRequest.FromString(b"".join(posted)).resource_spans[0].scope_spans[0].spans
    (span,) = spans
    assert span.trace_id.hex() == trace_id
    attributes = {one.key: one.value for one in span.attributes}
    assert attributes["gen_ai.request.id"].string_value == "mine"
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 3
    assert 0 < attributes["gen_ai.latency.time_to_first_token"].double_value < 10


def test_json_logs_have_no_prompt() -> None:
    with serving(*MOCK, "--log-format", "json") as server:
        complete(server, prompt="a secret thing", max_tokens=2)
        lines = eventually(lambda: [line for line in server.stderr().splitlines() if '"outboard.requests"' in line])
        line = json.loads(lines[0])
        assert (line["path"], line["status"], line["completion_tokens"]) == ("/v1/completions", 200, 2)
        assert "a secret thing" not in server.stderr()
    with serving(*MOCK, "--log-prompts") as server:
        complete(server, prompt="a secret thing", max_tokens=2)
        eventually(lambda: "a secret thing" in server.stderr())
