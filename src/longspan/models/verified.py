"""Which architectures have been compared with one rank. The list is data, written by `longspan sweep`."""

from __future__ import annotations

import json
import warnings
from functools import cache
from importlib import resources
from typing import Any

FILE = "verified.json"


@cache
def verified() -> dict[str, Any]:
    """{"decoders": model types that have been compared, "layer_types": those that occurred in them}."""
    return dict(json.loads(resources.files("longspan.models").joinpath(FILE).read_text()))


def check_verified(model: Any, decoder: Any, *, unverified: bool) -> None:
    """Raises ValueError for a decoder, or for layer types, that the sweep has not passed; warns with `unverified`."""
    name, kind = type(model).__name__, decoder.config.model_type
    others = sorted(set(getattr(decoder.config, "layer_types", None) or ()) - set(verified()["layer_types"]))
    if kind not in verified()["decoders"]:
        problem = f"{name} (model type {kind!r}) has not been compared with one rank"
    elif others:
        problem = f"{name} has layers of type {', '.join(others)}, which have not been compared with one rank"
    else:
        return
    cure = "`longspan check MODEL` compares it; parallelize(.., unverified=True) goes on without"
    if not unverified:
        raise ValueError(f"{problem}; {cure}")
    warnings.warn(f"{problem}: its results may differ from the plain model's. {cure}", stacklevel=3)
