# SPDX-License-Identifier: Apache-2.0
"""The job table of the HTTP front end: Arctic's job ids over one trainer and one sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

JOB_TYPES = ("training", "sampling", "log_prob")

#: Of the body of /initialize, what is used. The embedded server was told the rest at its start.
_USED = ("job_type", "model_name")


class JobError(Exception):
    """A request about jobs that cannot be met; `status` is the HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class JobTable:
    """At most one job of each type, numbered from 1; a number is never used again.

    Args:
        model_name: The model that is served; None accepts every name.
    """

    def __init__(self, model_name: str | None) -> None:
        self._model_name = model_name
        self._jobs: dict[int, dict[str, Any]] = {}
        self._last = 0

    def all(self) -> list[dict[str, Any]]:
        """Every job's info."""
        return list(self._jobs.values())

    def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer `/initialize`.

        Returns:
            `{"job_id", "job_type", "running", "ignored"}`; the last names the settings that
            the embedded server takes at its own start instead.

        Raises:
            JobError: 400 for an unknown type or another model, 409 for a second job of a type.
        """
        self._last += 1
        kind, model = body.get("job_type"), body.get("model_name")
        if kind not in JOB_TYPES:
            raise JobError(400, f"unknown job_type {kind!r}; known: {', '.join(JOB_TYPES)}")
        if model is not None and self._model_name is not None and model != self._model_name:
            raise JobError(400, f"this server serves {self._model_name!r}, not {model!r}")
        if any(job["job_type"] == kind for job in self._jobs.values()):
            raise JobError(409, f"a {kind} job is already running")
        info: dict[str, Any] = {
            "job_id": self._last,
            "job_type": kind,
            "model_name": model or self._model_name,
            "status": "RUNNING",
            "checkpoint_path": body.get("checkpoint_path"),
            "sync_path": None,
        }
        if kind == "log_prob":
            info["engine"] = "embedded"
        if kind == "training":
            info["cuda_ipc"] = bool(body.get("cuda_ipc", False))
            info["low_memory"] = bool(body.get("low_memory", False))
        self._jobs[self._last] = info
        return {
            "job_id": self._last,
            "job_type": kind,
            "running": True,
            "ignored": sorted(key for key in body if key not in _USED),
        }

    def destroy(self, number: Any, kind: Any) -> dict[str, Any]:
        """Answer `/destroy`. The trainer and the sampler go on; they are the server's own."""
        job = self.find(number)
        if kind is not None and kind != job["job_type"]:
            raise JobError(400, f"Job {number} is not a {kind} job")
        del self._jobs[job["job_id"]]
        return {"job_id": job["job_id"]}

    def find(self, number: Any) -> dict[str, Any]:
        """The info of a job; JobError 404 when there is none of that number."""
        try:
            return self._jobs[int(number)]
        except (KeyError, TypeError, ValueError, OverflowError):
            raise JobError(404, f"Job {number} not found") from None

    def require(self, number: Any, kinds: Sequence[str]) -> dict[str, Any]:
        """The info of a job of one of the types; JobError 400 for another type."""
        job = self.find(number)
        if job["job_type"] not in kinds:
            raise JobError(400, f"Job {number} is not a {' or '.join(kinds)} job")
        return job
