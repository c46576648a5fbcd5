"""Every way to put states into bytes, ours and others', as a pair of functions over whole samples."""

from __future__ import annotations

import functools
import importlib
import io
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from store_states import Samples

from datagen.store.arrow_part import write_options
from datagen.store.arrow_row import buffers_of
from datagen.store.codecs import codec_named
from datagen.store.encoder import Encoder
from datagen.store.states import StatesSpec, encode, to_batch

Rows = NDArray[np.uint16]
PROMPT = "0" * 64


@dataclass(frozen=True)
class Scheme:
    """`encode`: samples to one buffer each or in all; `decode`: that back to rows."""

    name: str
    encode: Callable[[list[Rows]], Any]
    decode: Callable[[Any], list[Rows]]
    size: Callable[[Any], int]


def ours(name: str, spec: StatesSpec, samples: Samples) -> Scheme:
    """A codec of the store, in the Arrow file that the store writes, in memory."""
    spec = StatesSpec(spec.boundaries, spec.final_norm, spec.dtype, spec.hidden_size, name)
    codec, learnt = codec_named(name), Encoder(spec, refit_after=min(8, len(samples.rows)))
    for rows in samples.rows[:8]:
        learnt(rows)  # as a run does, once
    params = learnt.params
    assert params is not None
    schema = spec.schema(params)
    ids = {len(i): i for i in samples.ids}

    def write(rows: list[Rows]) -> pa.Buffer:
        memory, sink = _memory(rows)
        with pa.ipc.new_file(sink, schema, options=_single(write_options(schema))) as writer:
            for each in rows:
                writer.write_batch(
                    to_batch(
                        schema, prompt_id=PROMPT, turn=0, input_ids=ids[len(each)], n_context=1,
                        encoded=encode(spec, params, each),
                    )
                )  # fmt: skip
        return memory.slice(0, sink.tell())

    def read(buffer: pa.Buffer) -> list[Rows]:
        reader = pa.ipc.open_file(buffer, options=pa.ipc.IpcReadOptions(use_threads=False))
        found = []
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            n = batch.column("n_tokens")[0].as_py()
            exp, sm = codec.stored(*(buffers_of(batch.column(name)) for name in ("exp", "sm")))
            found.append(
                codec.decode(
                    exp, sm, n, spec.width, spec.hidden_size, params, slice(None),
                    range(spec.n_layers),
                )
            )  # fmt: skip
        return found

    ids_bytes = sum(5 * len(i) for i in samples.ids)  # ids and masks are stored too, by ours alone
    return Scheme(name, write, read, lambda b: b.size - ids_bytes)


@functools.cache
def _allocated(size: int) -> pa.Buffer:
    return pa.allocate_buffer(size)


def _memory(rows: list[Rows]) -> tuple[pa.Buffer, pa.NativeFile]:
    """Room for a file of all rows, the same each time: the first touch of memory costs as much as a
    codec, and a file is not written to fresh memory."""
    memory = _allocated(sum(r.nbytes for r in rows) * 5 // 4 + (1 << 20))
    return memory, pa.FixedSizeBufferWriter(memory)


def arrow(level: int | None) -> Scheme:
    """Arrow IPC over plain bf16, a batch a sample; zstd at a level, or as it is."""

    def write(rows: list[Rows]) -> pa.Buffer:
        kind = pa.list_(pa.uint16(), rows[0].shape[1])
        codec = pa.Codec("zstd", level) if level else None
        options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
        memory, sink = _memory(rows)
        with pa.ipc.new_file(sink, pa.schema([("x", kind)]), options=options) as writer:
            for each in rows:
                column = pa.FixedSizeListArray.from_arrays(pa.array(each.reshape(-1)), type=kind)
                writer.write_batch(pa.record_batch([column], names=["x"]))
        return memory.slice(0, sink.tell())

    def read(buffer: pa.Buffer) -> list[Rows]:
        reader = pa.ipc.open_file(buffer, options=pa.ipc.IpcReadOptions(use_threads=False))
        return [
            reader.get_batch(i).column(0).values.to_numpy()
            for i in range(reader.num_record_batches)
        ]

    return Scheme(f"arrow zstd {level}" if level else "arrow", write, read, lambda b: int(b.size))


def parquet() -> Scheme:
    """Parquet with BYTE_STREAM_SPLIT and zstd 1, pages large enough for the split to matter."""

    def write(rows: list[Rows]) -> list[pa.Buffer]:
        found = []
        for each in rows:
            column = pa.Array.from_buffers(pa.binary(2), each.size, [None, pa.py_buffer(each)])
            sink = pa.BufferOutputStream()
            pq.write_table(
                pa.table({"x": column}), sink, compression="zstd", compression_level=1,
                use_dictionary=False, column_encoding={"x": "BYTE_STREAM_SPLIT"},
                max_rows_per_page=512 << 10, data_page_size=1 << 20, write_statistics=False,
            )  # fmt: skip
            found.append(sink.getvalue())
        return found

    def read(buffers: list[pa.Buffer]) -> list[Rows]:
        found = []
        for buffer in buffers:
            chunks = pq.read_table(pa.BufferReader(buffer), use_threads=False).column(0).chunks
            parts = [
                np.frombuffer(c.buffers()[1], np.uint16)[c.offset : c.offset + len(c)]
                for c in chunks
            ]
            found.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
        return found

    return Scheme("parquet bss zstd 1", write, read, lambda b: sum(x.size for x in b))


def optional(name: str) -> Scheme | None:
    """blosc2 or zipnn where they are installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
    except ImportError:
        return None
    return {"blosc2": _blosc2, "zipnn": _zipnn}[name](module)


def _blosc2(blosc2: Any) -> Scheme:
    blosc2.set_nthreads(1)

    def write(rows: list[Rows]) -> list[bytes]:
        return [
            blosc2.compress2(
                each, typesize=2, codec=blosc2.Codec.ZSTD, clevel=1,
                filters=[blosc2.Filter.SHUFFLE], nthreads=1,
            )
            for each in rows
        ]  # fmt: skip

    def read(frames: list[bytes]) -> list[Rows]:
        return [np.frombuffer(blosc2.decompress2(f, nthreads=1), np.uint16) for f in frames]

    return Scheme("blosc2 shuffle zstd 1", write, read, lambda b: sum(map(len, b)))


def _zipnn(zipnn: Any) -> Scheme:
    def coder() -> Any:
        return zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)

    def write(rows: list[Rows]) -> list[bytes]:
        # it rotates the bits in the very buffer it is given
        return [coder().compress(bytearray(each.tobytes())) for each in rows]

    def read(frames: list[bytes]) -> list[Rows]:
        return [np.frombuffer(coder().decompress(f), np.uint16) for f in frames]

    return Scheme("zipnn", write, read, lambda b: sum(map(len, b)))


def _single(options: pa.ipc.IpcWriteOptions) -> pa.ipc.IpcWriteOptions:
    options.use_threads = False
    return options


def cpu_s(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, all threads, and what came out: wall time is others' too."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def pt_bytes(rows: Rows) -> bytes:
    """What torch.save makes of a sample."""
    import torch

    sink = io.BytesIO()
    torch.save(torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16), sink)
    return sink.getvalue()
