"""A trace server within the process, in place of Weave's service: keeps what a client sends.

`install(monkeypatch)` before `weave.init("entity/project")`; written for weave 0.54, whose wheel has no local server.
"""

from __future__ import annotations

import hashlib
import json
import threading
from types import SimpleNamespace
from typing import Any


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:43]


class TraceServer:
    """What the client of weave asks for, and nothing else: an unknown request is an AttributeError."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        self.objects: dict[tuple[str, str], Any] = {}
        self.tables: dict[str, list[Any]] = {}
        self._lock = threading.Lock()

    def ended(self, op: str) -> list[dict[str, Any]]:
        """Finished calls of an operation, in order of their start."""
        found = [c for c in self.calls.values() if c["op_name"].split("/op/")[-1].split(":")[0] == op]
        return sorted((c for c in found if "ended_at" in c), key=lambda c: c["started_at"])

    def ensure_project_exists(self, entity: str, project: str) -> Any:
        return SimpleNamespace(project_name=project)

    def server_info(self) -> Any:
        return SimpleNamespace(min_required_weave_python_version="0.0.0", trace_server_version="999.0.0")

    def call_start(self, req: Any) -> Any:
        start = dict(req["start"]) if isinstance(req, dict) else req.start.model_dump()
        with self._lock:
            self.calls.setdefault(start["id"], {}).update(start)
        return SimpleNamespace(id=start["id"], trace_id=start.get("trace_id"))

    def call_end(self, req: Any) -> Any:
        end = dict(req["end"]) if isinstance(req, dict) else req.end.model_dump()
        with self._lock:
            self.calls.setdefault(end["id"], {}).update({k: v for k, v in end.items() if v is not None})
        return SimpleNamespace()

    def call_update(self, req: Any) -> Any:
        return SimpleNamespace()

    def obj_create(self, req: Any) -> Any:
        made = req["obj"]
        digest = made.get("expected_digest") or _digest(made["val"])
        with self._lock:
            self.objects[made["object_id"], digest] = made["val"]
        return SimpleNamespace(digest=digest)

    def obj_read(self, req: Any) -> Any:
        value = self.objects[req["object_id"], req["digest"]]
        found = SimpleNamespace(
            val=value, digest=req["digest"], object_id=req["object_id"], version_index=0, is_latest=1
        )
        return SimpleNamespace(obj=found)

    def table_create(self, req: Any) -> Any:
        rows = req["table"]["rows"]
        digest = req["table"].get("expected_digest") or _digest(rows)
        with self._lock:
            self.tables[digest] = rows
        return SimpleNamespace(digest=digest, row_digests=[_digest(row) for row in rows])

    def table_query(self, req: Any) -> Any:
        rows = self.tables[req["digest"]]
        found = [SimpleNamespace(val=row, digest=_digest(row), original_index=i) for i, row in enumerate(rows)]
        return SimpleNamespace(rows=found)

    def table_query_stats(self, req: Any) -> Any:
        return SimpleNamespace(count=len(self.tables[req["digest"]]))

    def file_create(self, req: Any) -> Any:
        content = req["file"][1] if "file" in req else req["content"]
        content = content if isinstance(content, bytes) else content.read()
        return SimpleNamespace(digest=req.get("expected_digest") or hashlib.sha256(content).hexdigest()[:43])

    def feedback_create(self, req: Any) -> Any:
        return SimpleNamespace(id="1", created_at=None, wb_user_id="u", payload={})


def install(monkeypatch: Any) -> TraceServer:
    """Every client that weave makes from now on sends here; no login, no network."""
    from weave.trace import init_message, weave_init  # pyright: ignore[reportMissingImports]

    server = TraceServer()
    monkeypatch.setenv("WEAVE_PRINT_CALL_LINK", "false")
    auth = SimpleNamespace(wal_seed=lambda: None, api_key="x")
    project = lambda name: tuple(name.split("/")) if "/" in name else ("entity", name)  # noqa: E731
    for name, value in {
        "get_wandb_auth_context": lambda: auth,
        "init_weave_get_server": lambda *args, **kwargs: server,
        "use_server_cache": lambda: False,
        "get_username": lambda: "tester",
        "_setup_conversation_tracing": lambda *args, **kwargs: None,
        "get_entity_project_from_project_name": project,
    }.items():
        monkeypatch.setattr(weave_init, name, value)
    monkeypatch.setattr(init_message, "print_init_message", lambda *args, **kwargs: None)  # asks for a newer version
    return server
