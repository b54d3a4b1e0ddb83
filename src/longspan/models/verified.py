"""Which architectures have been compared with one rank. The list is data, written by `longspan sweep`."""

from __future__ import annotations

import json
import warnings
from functools import cache
from importlib import resources
from typing import Any

FILE = "verified.json"


@cache
def verified() -> dict[str, dict[str, Any]]:
    """Verified decoders by `model_type`: {"layer_types": [..]}, the layer types that were in the comparison."""
    text = resources.files("longspan.models").joinpath(FILE).read_text()
    return dict(json.loads(text)["decoders"])


def check_verified(model: Any, decoder: Any, *, unverified: bool) -> None:
    """Raises ValueError for a decoder that the sweep has not passed, or warns with `unverified`."""
    if not verified():
        return  # TEMPORARY until the sweep has written the list
    kind = decoder.config.model_type
    entry = verified().get(kind)
    if entry is None:
        problem = f"{type(model).__name__} (model type {kind!r}) has not been compared with one rank"
    else:
        others = sorted(set(getattr(decoder.config, "layer_types", None) or ()) - set(entry["layer_types"]))
        if not others:
            return
        problem = (
            f"{type(model).__name__} has been compared with one rank, but not with layers of type {', '.join(others)}"
        )
    cure = "`longspan check MODEL` compares it; parallelize(.., unverified=True) goes on without"
    if not unverified:
        raise ValueError(f"{problem}; {cure}")
    warnings.warn(f"{problem}: its results may differ from the plain model's. {cure}", stacklevel=3)
