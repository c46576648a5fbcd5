"""What the parts of benchmarks/fanout.py share: null servers that take exactly known time, and clients."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Result = dict[str, Any]
ANSWER_TOKENS = 1000


def answer(tokens: int = ANSWER_TOKENS) -> bytes:
    """A response of `tokens`, as SGLang's /generate words it."""
    meta = {
        "id": "x", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 100,
        "completion_tokens": tokens, "cached_tokens": 0, "e2e_latency": 1.0,
    }  # fmt: skip
    body = {"text": text(tokens), "output_ids": token_ids(tokens), "meta_info": meta}
    return json.dumps(body).encode()


def chat_answer(tokens: int = ANSWER_TOKENS) -> bytes:
    """The same as /v1/chat/completions words it, with the ids that speculators asks for."""
    message = {"role": "assistant", "content": text(tokens)}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "stop",
        "token_ids": token_ids(tokens),
    }
    usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": tokens + 100}
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": "null", "usage": usage,
            "choices": [choice], "prompt_token_ids": list(range(100))}  # fmt: skip
    return json.dumps(body).encode()


def token_ids(tokens: int) -> list[int]:
    """Ids as a model with a vocabulary of tens of thousands gives them, and a stop token."""
    return [1000 + 37 * i % 30000 for i in range(tokens - 1)] + [2]


def text(tokens: int) -> str:
    """Some words for so many tokens."""
    return " ".join(f"word{i % 97}" for i in range(int(tokens * 0.74)))


class Bench:
    """A compiled server, a folder, and clients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.binary = folder, folder / "nullserver"
        source = ROOT / "benchmarks" / "nullserver.c"
        subprocess.run(["cc", "-O2", "-o", self.binary, source, "-lm"], check=True)
        self._ports = iter(range(random.randint(20000, 40000), 65000))

    def server(
        self, *, slots: int, step_us: float, body: bytes, port: int = 0
    ) -> tuple[subprocess.Popen[str], int]:
        """A server on a port of its own, that answers `body`; wait for it."""
        said = self.folder / f"body-{hashlib.sha256(body).hexdigest()[:8]}.json"
        said.write_bytes(body)
        while True:
            at = port or next(self._ports)
            process = subprocess.Popen(
                [self.binary, str(at), str(slots), str(step_us), said],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            assert process.stdout is not None
            if process.stdout.readline().strip() == "serving":
                return process, at

    @contextmanager
    def serving(
        self, *steps_us: float, slots: int, tokens: int = ANSWER_TOKENS, chat: bool = False
    ) -> Iterator[tuple[list[subprocess.Popen[str]], list[int]]]:
        """One server for each step time."""
        body = chat_answer(tokens) if chat else answer(tokens)
        made = [self.server(slots=slots, step_us=s, body=body) for s in steps_us]
        processes, ports = [m[0] for m in made], [m[1] for m in made]
        try:
            yield processes, ports
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def client(self, ports: Sequence[int], run: Path, **flags: Any) -> subprocess.Popen[str]:
        """A client; returned once it begins."""
        urls = [f"http://127.0.0.1:{p}" for p in ports]
        arguments = [str(x) for k, v in flags.items() for x in (f"--{k.replace('_', '-')}", v)]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fanout_client", "--run", run, *arguments, "--urls", *urls],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert process.stdout is not None
        if process.stdout.readline().strip() != "started":
            raise RuntimeError("the client did not start")
        return process

    def drive(self, ports: Sequence[int], run: Path, **flags: Any) -> Result:
        """A client from its beginning to its end."""
        return finish(self.client(ports, run, **flags))


def finish(client: subprocess.Popen[str]) -> Result:
    """What a client says at its end."""
    out, _ = client.communicate()
    if client.returncode:
        raise RuntimeError(f"the client failed: {client.returncode}")
    result: Result = json.loads(out)
    return result
