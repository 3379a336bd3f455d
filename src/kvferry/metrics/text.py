"""One snapshot as the text that Prometheus scrapes.

What prometheus_client would write, letter by letter, in a small part of its time: it is an engine's
process that is scraped, and while the text is made the interpreter is not the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

from kvferry.metrics.catalog import Metric, catalog
from kvferry.metrics.samples import Sample, Snapshot, samples
from kvferry.stats import Distribution

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NOT_NUMBERS = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposition(snapshot: Snapshot) -> bytes:
    """Every metric that has a value, in the catalog's order."""
    found: dict[str, list[str]] = {}
    for sample in samples(snapshot):
        found.setdefault(sample.metric.name, []).extend(_lines(sample))
    parts = []
    for name, head in _HEADS.items():
        if name in found:
            parts.append(head)
            parts += found[name]
    return "".join(parts).encode()


def _lines(sample: Sample) -> Iterator[str]:
    name, value = sample.metric.name, sample.value
    braces, before, after = _places(name, sample.labels)
    if not isinstance(value, Distribution):
        yield f"{name}{braces} {shown(value)}\n"
        return
    bounds = (*_shown_bounds(value.bounds), "+Inf")
    for bound, count in zip(bounds, accumulate(value.counts), strict=True):
        yield f"{name}_bucket{{{before}{bound}{after}}} {shown(count)}\n"
    yield f"{name}_count{braces} {shown(sum(value.counts))}\n"
    yield f"{name}_sum{braces} {shown(value.total)}\n"


@lru_cache(maxsize=1024)
def _places(name: str, labels: tuple[str, ...]) -> tuple[str, str, str]:
    """The labels in their braces; and what stands before and after a bucket's bound in its own."""
    pairs = {
        label: f'{label}="{text.translate(_ESCAPES)}"'
        for label, text in sorted(zip(_LABELS[name], labels, strict=True))
    }
    before = [*(pair for label, pair in pairs.items() if label < "le"), 'le="']
    after = ['"', *(pair for label, pair in pairs.items() if label > "le")]
    return f"{{{','.join(pairs.values())}}}" if pairs else "", ",".join(before), ",".join(after)


@lru_cache(maxsize=8)
def _shown_bounds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(map(shown, bounds))


def shown(value: float) -> str:
    """A number as Go writes it, which turns to exponents sooner than Python."""
    text = repr(float(value))
    if text in _NOT_NUMBERS:
        return _NOT_NUMBERS[text]
    dot = text.find(".")
    if value > 0 and dot > 6:
        digits = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{digits}e+{dot - 1:02d}"
    return text


def _head(metric: Metric) -> str:
    words = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {metric.name} {words}\n# TYPE {metric.name} {metric.kind.value}\n"


_HEADS = {metric.name: _head(metric) for metric in catalog()}
_LABELS = {metric.name: tuple(label.name for label in metric.labels) for metric in catalog()}
