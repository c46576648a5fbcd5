"""What a real SGLang server captures, against transformers on the same machine, while it decodes.

    python benchmarks/sglang_check.py --model DIR --boundaries 2,15,27 -- server flags

200 captures of real text among concurrent decodes, prefilled in chunks of 64 with the radix cache on: each
file's ids, rows and checksum; mean cosine of every boundary and of the final state >= 0.999 against a
float32 forward; the same captured alone; argmax(lm_head(final of the last token)) is the sampled token
wherever the server's own two best differ by more than 0.125. Runs in SGLang's environment, with
transformers in it; a GPU if there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.sglang_server import Server  # noqa: E402
from datagen.capture.spool import discard, read_spool  # noqa: E402

CAPTURES, ALONE, GAP, LEAST = 200, 16, 0.125, 0.999


def ask(url: str, ids: list[int], **more: Any) -> dict[str, Any]:
    """POST /generate."""
    rid = uuid.uuid4().hex
    body = {"rid": rid, "extra_key": rid, "input_ids": ids, **more}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def capture(url: str, ids: list[int]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Rows [n, K+1, H] of one capture, and its answer."""
    params = {"temperature": 0, "max_new_tokens": 1, "custom_params": {"datagen": True}}
    answer = ask(
        url, ids, return_hidden_states=True, sampling_params=params, return_logprob=True,
        top_logprobs_num=2,
    )  # fmt: skip
    (note,) = answer["meta_info"]["datagen"]
    path = Path(note["path"])
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    spooled = read_spool(path)
    discard(path)
    if spooled.input_ids != tuple(ids) or note["rows"] != len(ids):
        raise RuntimeError(f"{note} for {len(ids)} tokens")
    layers = len(spooled.boundaries) + 1
    rows = torch.frombuffer(bytearray(spooled.rows), dtype=torch.bfloat16)
    return rows.reshape(len(ids), layers, -1), answer


def texts(tokenizer: Any) -> list[list[int]]:
    """Real text from this repository's documentation, cut into prompts of 40 to 400 tokens."""
    pages = [
        p.read_text(encoding="utf-8")
        for p in sorted(ROOT.glob("**/*.md"))
        if ".venv" not in p.parts
    ]
    ids = tokenizer("\n".join(pages)).input_ids
    found, at = [], 0
    for number in range(CAPTURES):
        n = 40 + (number * 97) % 360
        found.append(ids[at % (len(ids) - 400) :][:n])
        at += n
    return found


def main() -> int:
    """Start, capture, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--boundaries", default="2,15,27")
    parser.add_argument("--port", type=int, default=30078)
    parser.add_argument("--spool", default="/dev/shm/datagen-check")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = texts(AutoTokenizer.from_pretrained(given.model))
    chunk = ("--chunked-prefill-size", "64")
    args = SimpleNamespace(**vars(given), python=sys.executable)
    args.flags = [*given.flags, *chunk]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args, given.model, Path(folder))  # type: ignore[arg-type]
        try:
            server.wait(300)
            ended, decoded = threading.Event(), []

            def decode(number: int) -> None:
                while not ended.is_set():
                    params = {"max_new_tokens": 48, "ignore_eos": True}
                    answer = ask(server.url, asked[number], sampling_params=params)
                    decoded.append(answer["meta_info"]["completion_tokens"])

            with ThreadPoolExecutor(16) as pool, ThreadPoolExecutor(4) as decoders:
                for number in range(4):
                    decoders.submit(decode, number)
                try:
                    loaded = list(pool.map(lambda ids: capture(server.url, ids), asked))
                finally:
                    ended.set()
            alone = [capture(server.url, ids)[0] for ids in asked[:ALONE]]
            info = json.load(urllib.request.urlopen(f"{server.url}/server_info"))
        finally:
            server.stop()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device).eval()
    boundaries = [int(b) for b in given.boundaries.split(",")]
    cosines, clear, agree = [], 0, 0
    with torch.inference_mode():
        for ids, (rows, answer) in zip(asked, loaded, strict=True):
            states = model(
                torch.tensor([ids], device=device), output_hidden_states=True
            ).hidden_states
            wanted = torch.stack([states[b][0] for b in boundaries] + [states[-1][0]], dim=1)
            ours = rows.float().to(device)
            cosines.append(torch.cosine_similarity(ours, wanted, dim=-1))
            (top,) = answer["meta_info"]["output_top_logprobs"]
            if top[0][0] - top[1][0] > GAP:
                clear += 1
                agree += int(model.lm_head(ours[-1, -1]).argmax()) == answer["output_ids"][0]
    mean = torch.cat(cosines).mean(0).tolist()
    same = torch.cat(
        [
            torch.cosine_similarity(a.float(), r.float(), dim=-1)
            for a, (r, _) in zip(alone, loaded, strict=False)
        ]
    ).mean(0)
    chunks = [a["meta_info"]["datagen"][0].get("chunks", 1) for _, a in loaded]
    result = {
        "sglang": info["version"], "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "captures": len(loaded), "rows": sum(len(r) for r, _ in loaded), "most_chunks": max(chunks),
        "tokens_decoded_meanwhile": sum(decoded), "mean_cosine": mean,
        "mean_cosine_alone_and_under_load": same.tolist(), "clear_tokens": clear, "clear_agree": agree,
        "passed": min(mean) >= LEAST and float(same.min()) >= LEAST and agree == clear and sum(decoded) > 0,
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"sglang-check-{device}-{date.today().isoformat()}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(not result["passed"])


if __name__ == "__main__":
    sys.exit(main())
