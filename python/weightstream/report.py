"""What `Attachment.report` gives: a dictionary that prints as a summary."""

from __future__ import annotations

from typing import Any

__all__ = ["Report"]

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Report(dict[str, Any]):
    """The plan, the memory it takes, and what was noticed: keys as in the native report, sizes in bytes.

    `str()` gives the main lines for people; `json.dumps` and `repr` give all of it.
    """

    def __str__(self) -> str:
        if "engine" not in self:
            return "no report: the device failed before the model was detached"
        engine = self["engine"]
        stats, units, page = engine["stats"], engine["units"], engine["page_bytes"]
        streaming = sum(1 for unit in units if unit["streamed_bytes"])
        host = ", ".join(
            f"{_size(size)} {key.removesuffix('_bytes').replace('_', ' ')}"
            for key, size in self["host"].items()
            if key.endswith("_bytes") and size
        )
        lines = [
            ("device", f"{self['device']}: {self['reason']}"),
            ("weights", f"{_size(self['model_bytes'])} in {self['tensors']} tensors"),
            ("budget", f"{_size(engine['page_limit_bytes'])}, {_size(engine['page_bytes_peak'])} taken at most"),
            ("resident", f"{_size(self['resident_bytes'])}, of which {_size(self['base_bytes'])} outside blocks"),
            ("ring", f"{_size(engine['ring_pages'] * page)}, copies {engine['look_ahead']} units ahead"),
            ("streamed", f"{_size(self['streamed_bytes_per_step'])} a step, in {streaming} of {len(units)} units"),
            ("host memory", host or "none"),
            (
                "so far",
                f"{stats['steps']} steps, {stats['visits']} visits, {stats['copies']} copies of "
                f"{_size(stats['copied_bytes'])}, {stats['fetched_on_demand']} of them not ahead",
            ),
            *(("note", note) for note in self["notes"]),
        ]
        return "\n".join(f"{label:12} {text}" for label, text in lines)


def _size(count: int) -> str:
    """Bytes for people."""
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"
