"""The causal-LM head: the loss from local hidden rows, logits whole, local, or not at all.

The head is the model's own forward, run with its decoder replaced, so softcaps, scalings and biases are as its authors
wrote them. One call of the wrapped forward runs the model's forward

    once   with a stand-in that runs the split decoder, keeps the local hidden rows and hands on zero rows of them.
           Labels go in, and the model's `loss_function` is answered from the kept rows; whatever the model adds to
           the loss afterwards (a router loss, from whole router logits) is added by its own code.
    per chunk of rows, with a stand-in that returns the chunk as the decoder's output.

Stand-ins are put into the parent module for the duration of one call, on the calling thread. Both passes work for a
decoder that is not split as well (`keep_rows`, `head_over`): that is how `score` runs any causal LM.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from longspan.models.decoder import (
    REQUEST,
    STATE,
    Request,
    State,
    brings_cache,
    call_arguments,
    check_dropout,
    plain_forward,
    plainly,
)
from longspan.models.find import decoder_of, parent_of
from longspan.models.forward import Forward
from longspan.models.hooks import masks_later
from longspan.scoring import (
    IGNORE,
    causal_lm_loss,
    check_targets,
    chunk_rows,
    chunked_loss_sum,
    divide,
    shift_left,
    summed_cross_entropy,
)

# What a sum over rows, divided by a count, expresses.
KNOWN_LOSSES = (ForCausalLMLoss, causal_lm_loss)
OF_THE_HEAD = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")
LOGITS = ("auto", "whole", "local", "none")


def scored_from_rows(model: Any) -> bool:
    """Whether a model's head is a causal LM's that leaves its loss to `loss_function`, so that local rows do. Any other
    head gets whole hidden states, and keeps its own loss."""
    if model.get_output_embeddings() is None:
        return False
    forwards = [vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind)]
    codes = [getattr(inspect.unwrap(forward), "__code__", None) for forward in forwards]
    return any(code is not None and "loss_function" in code.co_names for code in codes)


class StandIn(nn.Module):
    """A module whose forward is a plain function, and whose everything else is the original's: models ask their
    decoder for its embeddings or its config."""

    def __init__(self, function: Callable[..., Any], original: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.behind = [original]  # in a list, not to become a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["behind"][0], name)


@contextmanager
def replaced(parent: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`parent.name` answers with `function` inside the block."""
    original = parent._modules[name]
    parent._modules[name] = StandIn(function, original)  # type: ignore[arg-type]
    try:
        yield
    finally:
        parent._modules[name] = original


@contextmanager
def loss_answered(model: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """`model.loss_function` answers with `function` inside the block."""
    had = "_loss_function" in model.__dict__
    original = model.__dict__.get("_loss_function")
    model.loss_function = function  # type: ignore[assignment]
    try:
        yield
    finally:
        if had:
            model.loss_function = original  # type: ignore[assignment]
        else:
            del model._loss_function


@torch._dynamo.disable(recursive=False)
def split_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward that replaces a causal LM's; its signature stays the model's own."""
    state: State = getattr(self, STATE)
    original = plain_forward(self)
    call = call_arguments(original, args, kwargs)
    labels, shift_labels = call.get("labels"), call.get("shift_labels")
    scored = labels is not None or shift_labels is not None
    caches = brings_cache(call) or call.get("use_cache") is True
    if state.suspended or (caches and not scored):
        with plainly(state):
            return original(*args, **kwargs)
    decoder = decoder_of(self)
    vocabulary = self.get_output_embeddings().weight.shape[0]
    keep = call.pop("logits_to_keep", 0)
    everything_kept = isinstance(keep, int) and keep == 0
    as_tuple = call.pop("return_dict", None) is False
    mode = state.logits
    if mode == "auto":
        mode = "none" if scored and self.training else "whole"
    loss_function = self.loss_function if scored else None

    def check(batch: int, length: int) -> None:
        check_dropout(self)  # of the head; the decoder looks at its own
        blind_see_all = _blind_see_all(state, decoder)
        _check(call, batch, length, vocabulary, loss_function, everything_kept, blind_see_all=blind_see_all)

    request = Request({"labels": labels, "shift_labels": shift_labels}, check)
    head = head_over(self, original, request)
    answer = _Loss(request, labels, shift_labels, mode, head, vocabulary, wide=loss_function is causal_lm_loss)
    call.pop("shift_labels", None)
    if scored:
        # Any tensor makes the model ask for its loss; the answer is computed from the whole labels kept here.
        call["labels"] = labels if labels is not None else shift_labels
    with loss_answered(self, answer):
        out = keep_rows(self, original, request, call)
    if request.forward is None or request.hidden is None or (scored and not answer.asked):
        raise ValueError(
            f"{type(self).__name__} did not ask its decoder for hidden states, or its loss_function for a loss"
        )
    out = type(out)(**{**out, "logits": _logits(request, answer, mode, head, keep, everything_kept)})
    return out.to_tuple() if as_tuple else out


def head_over(model: Any, original: Callable[..., Any], request: Request) -> Callable[..., Tensor]:
    """Logits of hidden rows [B, rows, width] by the model's own forward `original`, once `keep_rows` has filled the
    request."""
    parent, name = parent_of(model, decoder_of(model))

    def head(hidden: Tensor, **options: Any) -> Tensor:
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        answer_hidden = request.output_class(last_hidden_state=hidden)
        with replaced(parent, name, lambda *args, **kwargs: answer_hidden), masks_later():
            return original(input_ids=ids, use_cache=False, return_dict=True, **options).logits

    return head


def keep_rows(model: Any, original: Callable[..., Any], request: Request, call: Mapping[str, Any]) -> Any:
    """Runs the model's own forward `original` on `call`: its decoder's hidden rows are kept in the request (local ones
    where it is split, else all) and its head gets none of them. Returns what the forward returns."""
    decoder = decoder_of(model)
    parent, name = parent_of(model, decoder)
    split = getattr(decoder, STATE, None) is not None

    def body(*body_args: Any, **body_kwargs: Any) -> Any:
        for name in OF_THE_HEAD:  # some models hand their head's arguments on, for nobody
            body_kwargs.pop(name, None)
        outputs = decoder(*body_args, **body_kwargs, **({REQUEST: request} if split else {}))
        request.output_class = type(outputs)
        request.hidden = outputs.last_hidden_state
        return type(outputs)(**{**outputs, "last_hidden_state": outputs.last_hidden_state[:, :0]})

    with replaced(parent, name, body), masks_later():
        return original(**{**call, "use_cache": False, "return_dict": True})


def _logits(
    request: Request, answer: _Loss, mode: str, head: Callable[..., Tensor], keep: Any, everything_kept: bool
) -> Tensor | None:
    if mode == "none" or request.forward is None or request.hidden is None:
        return None
    if not everything_kept:
        return head(request.forward.cp.gather(request.hidden, 1), logits_to_keep=keep)
    local = head(request.hidden) if answer.logits is None else answer.logits
    return request.forward.cp.gather(local, 1) if mode == "whole" else local


class _Loss:
    """What the model's `loss_function` is during a split forward."""

    def __init__(
        self,
        request: Request,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        mode: str,
        head: Callable[..., Tensor],
        vocabulary: int,
        *,
        wide: bool,
    ) -> None:
        self.request, self.labels, self.shift_labels = request, labels, shift_labels
        self.mode, self.head, self.vocabulary, self.wide = mode, head, vocabulary, wide
        self.asked = False
        self.logits: Tensor | None = None

    @torch._dynamo.disable(recursive=False)
    def __call__(self, *args: Any, num_items_in_batch: Any = None, ignore_index: int = IGNORE, **_: Any) -> Tensor:
        self.asked = True
        forward: Forward | None = self.request.forward
        hidden = self.request.hidden
        if forward is None or hidden is None:
            raise ValueError("the loss was asked for before the decoder had run")
        whole = self.shift_labels
        if whole is None:
            whole = shift_left(self.labels, ignore_index)  # type: ignore[arg-type]
        whole = whole.to(hidden.device)
        targets = forward.cp.cut(whole, 1)
        dtype = torch.promote_types(hidden.dtype, torch.float32) if self.wide else torch.float32

        if self.mode == "none":
            longest = max(forward.cp.bound.row_counts)
            rows = min(max(1, longest), chunk_rows(forward.batch, self.vocabulary))
            local = chunked_loss_sum(hidden, targets, self.head, rows=rows, dtype=dtype, ignore_index=ignore_index)
        else:
            self.logits = self.head(hidden)
            local = summed_cross_entropy(self.logits, targets, dtype, ignore_index)
        count = num_items_in_batch if num_items_in_batch is not None else (whole != ignore_index).sum()
        return divide(forward.cp.total(local), count)


def _check(
    call: dict[str, Any],
    batch: int,
    length: int,
    vocabulary: int,
    loss_function: Callable[..., Any] | None,
    everything_kept: bool,
    *,
    blind_see_all: bool,
) -> None:
    labels, shift_labels = call.get("labels"), call.get("shift_labels")
    if labels is None and shift_labels is None:
        return
    if brings_cache(call) or call.get("use_cache") is True:
        raise ValueError("a forward with labels cannot use a cache under context parallelism; pass use_cache=False")
    if not everything_kept:
        raise ValueError("logits_to_keep together with labels is not supported under context parallelism")
    for name, value in (("labels", labels), ("shift_labels", shift_labels)):
        if value is not None:
            if tuple(value.shape) != (batch, length):
                raise ValueError(f"{name} are {tuple(value.shape)}, the batch is {(batch, length)}")
            check_targets(value, vocabulary, name, call.get("ignore_index", IGNORE))
    if loss_function not in KNOWN_LOSSES:
        name = getattr(loss_function, "__qualname__", type(loss_function).__name__)
        raise ValueError(
            f"the model has its own loss function {name}, which a sum over shards may not express; call the model "
            "without labels and compute the loss from the whole logits"
        )
    mask = call.get("attention_mask")
    if blind_see_all and isinstance(mask, Tensor) and tuple(mask.shape) == (batch, length):
        targets = shift_labels if shift_labels is not None else shift_left(labels)  # type: ignore[arg-type]
        blind = mask.cumsum(1) == 0
        scored = (targets.to(mask.device) != call.get("ignore_index", IGNORE)) & blind
        if bool(scored.any()):
            row, token = (int(i) for i in scored.nonzero()[0])
            raise ValueError(
                f"the token at [{row}, {token + 1}] is predicted from padding on its left, which sees no key; the "
                "eager attention of this model lets it see all keys, later ones too. Set that label to -100, or "
                "load the model with attn_implementation='sdpa'"
            )


def _blind_see_all(state: State, decoder: nn.Module) -> bool:
    """Whether a query that sees no key attends to all of them in the plain model: eager attention adds the same huge
    number to every score. (With sinks it attends to those, and the answer is 0, as everywhere else.)"""
    return state.original_backend == "eager" and not any(n.endswith("sinks") for n, _ in decoder.named_parameters())
