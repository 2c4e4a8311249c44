"""Reads what the W&B client has written to the disk in offline mode."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768  # a log of LevelDB: records are cut at the ends of blocks
_HEAD = struct.Struct("<IHB")  # checksum, length, kind


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a run's file, as messages of the client's own protocol."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    place, parts = 7, b""
    while place + _HEAD.size <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEAD.size:
            place += left
            continue
        _, length, kind = _HEAD.unpack_from(content, place)
        place += _HEAD.size
        parts += content[place : place + length]
        place += length
        if kind in (1, 4):  # whole, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def run_files(folder: Path) -> list[Path]:
    """Return the files of all runs under a folder, oldest first."""
    # Their folders are named by the time of their start.
    return sorted(folder.rglob("run-*.wandb"), key=lambda path: path.parent.name)


def history(path: Path) -> list[dict[str, Any]]:
    """Return what was logged, a dict a call."""
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        for items in (record.history.item for record in records(path) if record.HasField("history"))
    ]


def config(path: Path) -> dict[str, Any]:
    """Return the config of the run."""
    return {
        ".".join(item.nested_key) or item.key: json.loads(item.value_json)
        for record in records(path)
        if record.HasField("config")
        for item in record.config.update
    }


def definitions(path: Path) -> dict[str, Any]:
    """Return the definitions of metrics, by name or pattern."""
    return {
        record.metric.name or record.metric.glob_name: record.metric
        for record in records(path)
        if record.HasField("metric")
    }


def artifacts(path: Path) -> list[Any]:
    """Return the artifacts that would be uploaded."""
    found = []
    for record in records(path):
        if record.HasField("artifact"):
            found.append(record.artifact)
        elif record.HasField("request") and record.request.HasField("log_artifact"):
            found.append(record.request.log_artifact.artifact)
    return found
