"""longspan: transformer models on sequences too long for one device; whole in, whole out, equal to one rank.

Names resolve lazily (PEP 562), so that `longspan --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from longspan.version import VERSION

if TYPE_CHECKING:
    from longspan.attention import attend
    from longspan.checks import check
    from longspan.comm import ContextParallel
    from longspan.engine.core import Engine
    from longspan.engine.datum import Datum
    from longspan.engine.mesh import init_mesh
    from longspan.engine.train import train
    from longspan.layout import Layout, Span
    from longspan.models import parallelize, report, suspended, unparallelize
    from longspan.models.own import register_style
    from longspan.models.score import Scores, check_loss, dp_reduce, score
    from longspan.rule import Rule

__version__ = VERSION

_HOME = {
    "ContextParallel": "longspan.comm",
    "Datum": "longspan.engine.datum",
    "Engine": "longspan.engine.core",
    "Layout": "longspan.layout",
    "Rule": "longspan.rule",
    "Scores": "longspan.models.score",
    "Span": "longspan.layout",
    "attend": "longspan.attention",
    "check": "longspan.checks",
    "check_loss": "longspan.models.score",
    "dp_reduce": "longspan.models.score",
    "init_mesh": "longspan.engine.mesh",
    "parallelize": "longspan.models",
    "register_style": "longspan.models.own",
    "report": "longspan.models",
    "score": "longspan.models.score",
    "suspended": "longspan.models",
    "train": "longspan.engine.train",
    "unparallelize": "longspan.models",
}

__all__ = [
    "ContextParallel",
    "Datum",
    "Engine",
    "Layout",
    "Rule",
    "Scores",
    "Span",
    "__version__",
    "attend",
    "check",
    "check_loss",
    "dp_reduce",
    "init_mesh",
    "parallelize",
    "register_style",
    "report",
    "score",
    "suspended",
    "train",
    "unparallelize",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'longspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
