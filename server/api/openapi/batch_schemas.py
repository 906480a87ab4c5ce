"""JSON schemas of the responses of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

from typing import Any

from oarlock.server.api.openapi.shapes import COUNT, STRING, list_of, nullable, object_of

_FILE = object_of(
    {
        "id": STRING,
        "object": {"const": "file"},
        "bytes": COUNT,
        "created_at": COUNT,
        "expires_at": nullable(COUNT),
        "filename": STRING,
        "purpose": {"enum": ["batch", "batch_output"]},
        "status": {"const": "processed"},
    }
)
_BATCH_STATES = ["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
_BATCH = object_of(
    {
        "id": STRING,
        "object": {"const": "batch"},
        "endpoint": STRING,
        "input_file_id": STRING,
        "completion_window": STRING,
        "status": {"enum": _BATCH_STATES},
        "created_at": COUNT,
        "expires_at": COUNT,
        "request_counts": object_of({"total": COUNT, "completed": COUNT, "failed": COUNT}),
        "output_file_id": nullable(STRING),
        "error_file_id": nullable(STRING),
        "errors": nullable(
            object_of(
                {
                    "object": {"const": "list"},
                    "data": list_of(object_of({"code": STRING, "message": STRING, "line": nullable(COUNT)})),
                }
            )
        ),
        "usage": nullable(object_of({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT})),
    }
)


def _page(shape: dict[str, Any]) -> dict[str, Any]:
    ends = {"first_id": nullable(STRING), "last_id": nullable(STRING)}
    return object_of({"object": {"const": "list"}, "data": list_of(shape), **ends, "has_more": {"type": "boolean"}})


SCHEMAS: dict[str, Any] = {
    "File": _FILE,
    "FileList": _page(_FILE),
    "DeletedFile": object_of({"id": STRING, "object": {"const": "file"}, "deleted": {"const": True}}),
    "Batch": _BATCH,
    "BatchList": _page(_BATCH),
}
